"""`nvshare-device-plugin` as a command, where gRPC is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nvshare.coordinator.system.extras import install_command

WITHOUT_GRPC = """import sys
sys.modules["grpc"] = sys.modules["google.protobuf"] = None
from nvshare.coordinator.kubernetes.node.plugin_main import main
main(sys.argv[1:])
"""


def without_grpc(*words: str) -> subprocess.CompletedProcess[str]:
    """The command's end."""
    return subprocess.run([sys.executable, "-c", WITHOUT_GRPC, *words], capture_output=True, text=True, check=False)


def test_help_needs_no_grpc() -> None:
    """Broken if nobody could read which options there are before installing the extra."""
    done = without_grpc("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--slots-per-gpu" in done.stdout


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """Broken if serving without gRPC ended in a traceback."""
    done = without_grpc("--slots-dir", str(tmp_path / "slots"))
    assert done.returncode == 2
    assert f"is not installed; install it: {install_command('kubernetes')}\n" in done.stderr
    assert done.stderr.count("\n") == 1
