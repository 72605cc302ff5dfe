"""A runtime directory of one's own, and the programs that start in it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.waiting import BOUND_S

ROOT = Path(__file__).resolve().parent.parent.parent

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@contextlib.contextmanager
def runtime_directory() -> Iterator[RuntimeDir]:
    """An empty directory with a short path, because socket paths are short; its coordinator ends with it."""
    made = RuntimeDir(Path(tempfile.mkdtemp(prefix="nvs-")))
    try:
        yield made
    finally:
        pid = made.coordinator_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just left
                descriptor = os.pidfd_open(pid)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                wait_for_end(descriptor)
        shutil.rmtree(made.path)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the opt-in in its site-packages, as an installation has it."""
    home = tmp_path_factory.mktemp("opt-in")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    (packages / "a_packages.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (packages / "nvshare_autoload.pth").write_bytes((ROOT / "client_hook" / "nvshare_autoload.pth").read_bytes())
    return home / "bin" / "python"


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    """A directory for one test; modules whose tests may share a coordinator override this fixture."""
    with runtime_directory() as made:
        yield made


@pytest.fixture(scope="module")
def module_runtime() -> Iterator[RuntimeDir]:
    """One coordinator for all tests of a module: the first program starts it."""
    with runtime_directory() as made:
        yield made


@pytest.fixture
def environ(runtime: RuntimeDir) -> dict[str, str]:
    """For programs that use `runtime`; nothing of an outer hook."""
    made = {name: value for name, value in os.environ.items() if not name.startswith("NVSHARE_")}
    made.pop("LD_PRELOAD", None)
    for name in ("NVSHARE_HOOK_LIBRARY", "NVSHARE_SIM_LIBRARY_DIR"):
        if name in os.environ:
            made[name] = os.environ[name]
    made["NVSHARE_RUNTIME_DIR"] = str(runtime.path)
    made["PYTHONPATH"] = str(ROOT)
    return made


@pytest.fixture
def nvshare_run(environ: dict[str, str]) -> Start:
    """Runs `nvshare-run` with these arguments to its end, on simulated GPUs unless told otherwise."""

    def start(
        *arguments: str, simulate: bool = True, data: str | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            run_command(*arguments, simulate=simulate),
            env=environ | changes,
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            text=True,
            check=False,
        )

    return start


def run_command(*arguments: str, simulate: bool = True) -> list[str]:
    """The command line of nvshare-run, from this checkout."""
    return [sys.executable, "-m", "nvshare.coordinator.cli.run", *(["--simulate"] if simulate else []), *arguments]


def command_lines() -> dict[int, list[bytes]]:
    """The words of every process's command line, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                found[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
    return found


def wait_for_end(pidfd: int) -> None:
    """Until the process has ended; fails when it does not."""
    ready, _, _ = select.select([pidfd], [], [], BOUND_S)
    os.close(pidfd)
    assert ready, "the process did not end"


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status and what it said."""
    out, err = process.communicate()
    return process.returncode, out, err


def launch(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """A program whose output is read."""
    return subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
