"""A user's own modules may have the names of our folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import run_command

NAMES = ("coordinator", "scheduler_policies", "client_hook", "simulated_gpu", "bench")
HOOKED = "import coordinator, bench; print('libnvshare_hook' in open('/proc/self/maps').read(), coordinator.MINE)"


@pytest.fixture
def users(tmp_path: Path, environ: dict[str, str]) -> dict[str, str]:
    """The environment of a program in a directory that has such modules, which is on its path."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
        (tmp_path / "nvshare").mkdir(exist_ok=True)  # the name of a clone
    packages = environ["PYTHONPATH"]
    return environ | {"PYTHONPATH": f".:{packages}", "NVSHARE_SIMULATE": "1x1GiB", "PWD": str(tmp_path)}


@pytest.mark.parametrize(
    ("command", "changes", "expected"),
    [
        (run_command("--", sys.executable, "-c", HOOKED), {}, "True True"),
        ([sys.executable, "-c", HOOKED], {"NVSHARE_ENABLE": "1"}, "True True"),
        ([sys.executable, "-m", "nvshare.coordinator.cli.ctl", "--help"], {}, "Usage: nvshare-ctl"),
    ],
    ids=["nvshare-run", "NVSHARE_ENABLE", "nvshare-ctl"],
)
def test_a_users_modules_hide_none_of_ours(
    users: dict[str, str], command: list[str], changes: dict[str, str], expected: str
) -> None:
    """Broken: a job with its own `coordinator.py` breaks the tools, or runs unscheduled."""
    done = subprocess.run(command, env=users | changes, cwd=users["PWD"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_packages_of_another_python_hide_none_of_ours(python: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """Broken: with a PYTHONPATH of an HPC module or ROS every command ends with a traceback."""
    for name in ("cffi", "cuda", "msgpack", "pydantic", "rich", "typer", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of another Python')\n")
    theirs = environ | {"PYTHONPATH": str(tmp_path), "NVSHARE_SIMULATE": "1x1GiB"}
    inner = [str(python), "-m", "nvshare.coordinator.cli.ctl", "status"]
    command = [str(python), *run_command("--", "sh", "-c", 'echo $PYTHONPATH; "$@"', "sh", *inner)[1:]]
    done = subprocess.run(command, env=theirs, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}\ncoordinator ")
