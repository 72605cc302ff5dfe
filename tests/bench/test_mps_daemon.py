"""The benchmark's control daemon of MPS, with a script in its place: it is always stopped.

Non-goals: MPS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.bench.harness.fixture import BenchError
from nvshare.bench.pairs.mps_daemon import CONTROL, clients, control_daemon
from tests.conftest import ROOT
from tests.waiting import eventually

FAKE = """#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
  [ -z "$MPS_REFUSES" ] || { echo "no rights" >&2; exit 1; }
  setsid sleep 3600 </dev/null >/dev/null 2>&1 &
  echo $! >"$pid"
  cp "$pid" "$MPS_KEPT"
  exit 0
fi
read -r command
case "$command" in
  get_server_list) echo 99999999 ;;
  get_client_list*) printf '1\\n2\\n' ;;
  quit*) [ -n "$MPS_STUBBORN" ] || kill "$(cat "$pid")" ;;
esac
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script, first on the PATH, notes its daemon."""
    script = tmp_path / "bin" / CONTROL
    script.parent.mkdir()
    script.write_text(FAKE, encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MPS_KEPT", str(tmp_path / "kept"))
    return tmp_path / "kept"


def ended(kept: Path) -> bool:
    """Whether the daemon has ended."""
    status = Path(f"/proc/{int(kept.read_text(encoding='utf-8'))}/stat")
    try:
        return ") Z" in status.read_text(encoding="utf-8")
    except FileNotFoundError:
        return True


def test_it_runs_for_the_block_only(tmp_path: Path, kept: Path) -> None:
    """Broken: another daemon would be used, or one stays behind that every later program joins."""
    with control_daemon(tmp_path) as variables:
        assert not ended(kept)
        assert variables["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(tmp_path))
        assert clients(variables) == 2
    eventually(lambda: ended(kept), "the daemon's end")


def test_it_stops_on_failure_though_it_will_not(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does not quit is killed, also when the measurement has failed."""
    monkeypatch.setenv("MPS_STUBBORN", "1")
    with pytest.raises(BenchError, match="failed measurement"), control_daemon(tmp_path):
        raise BenchError("failed measurement")
    eventually(lambda: ended(kept), "the daemon's end")


def test_it_stops_when_the_benchmark_is_killed(tmp_path: Path, kept: Path) -> None:
    """Broken: a time limit of the caller leaves MPS running on the machine."""
    program = (
        "import sys; from pathlib import Path; from nvshare.bench.pairs.mps_daemon import control_daemon\n"
        "with control_daemon(Path(sys.argv[1])):\n    print('here', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert not ended(kept)
        process.send_signal(signal.SIGKILL)
    eventually(lambda: ended(kept), "the daemon's end")


def test_a_refusal_is_said(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a machine that allows no MPS would get an empty figure instead of a reason."""
    monkeypatch.setenv("MPS_REFUSES", "1")
    with pytest.raises(BenchError, match="no rights"), control_daemon(tmp_path):
        pass
    assert not kept.exists()
