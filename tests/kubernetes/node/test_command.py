"""`nvshare-device-plugin`, `nvshare-nri` and `nvshare-dra` as commands, where gRPC and protobuf are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.coordinator.kubernetes.node import plugin_main
from nvshare.coordinator.system.extras import install_command

WITHOUT_GRPC = """import sys
sys.modules["grpc"] = sys.modules["google.protobuf"] = None
from nvshare.coordinator.kubernetes.{}.plugin_main import main
main(sys.argv[1:])
"""
PLUGINS = pytest.mark.parametrize(
    ("plugin", "option"), [("node", "--slots-per-gpu"), ("nri", "--nri-socket"), ("dra", "--kubelet-dir")]
)


def without_grpc(plugin: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command's end."""
    program = WITHOUT_GRPC.format(plugin)
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


@PLUGINS
def test_help_needs_no_grpc(plugin: str, option: str) -> None:
    """Broken if nobody could read which options there are before installing the extra."""
    done = without_grpc(plugin, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert option in done.stdout


@PLUGINS
def test_what_is_missing_is_named(plugin: str, option: str, tmp_path: Path) -> None:
    """Broken if serving without gRPC ended in a traceback."""
    del option
    done = without_grpc(plugin, "--slots-dir", str(tmp_path / "slots"), *["--node-name=n"] * (plugin == "dra"))
    assert done.returncode == 2
    assert f"is not installed; install it: {install_command('kubernetes')}\n" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("wrong", ["--slots-per-gpu=0", "--slots-per-gpu=1001", "--on-loss=stop", "--preferred=first"])
def test_an_option_that_cannot_be_names_itself(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the DaemonSet crashes and its values say nothing, or it offers slots that cannot be."""
    with pytest.raises(SystemExit) as ended:
        plugin_main.main([wrong])
    assert ended.value.code == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err
