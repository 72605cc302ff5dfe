"""The name that a Python program has for tools: what it runs, not `python`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import ScriptedCoordinator

CUDA = "import ctypes, sys; ctypes.CDLL('libcuda.so.1').cuInit(0); sys.stdin.read()"
CHILD = CUDA.replace("sys.stdin.read()", "__import__('threading').Event().wait()")  # it has no standard input
SPAWN = f"""
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    child = multiprocessing.Process(target=exec, args=({CHILD!r},))
    child.start()
    sys.stdin.read()
    child.kill()
"""
KERNEL = ("-m", "ipykernel_launcher", "-f", "/run/kernel-1a2b3c4d-5e6f-7081.json")


@pytest.mark.parametrize(
    ("words", "session", "name"),
    [
        (("{dir}/train.py", "--rate", "3"), None, "train.py"),
        (("-u", "-W", "ignore", "-Xdev", "--check-hash-based-pycs", "never", "{dir}/train.py"), None, "train.py"),
        (("-m", "package.job", "-c"), None, "package.job"),
        (("-um", "package.job"), None, "package.job"),
        (("-c", CUDA), None, "python -c"),
        (KERNEL, "/data/study.ipynb", "study.ipynb"),
        (KERNEL, None, "kernel-1a2b3c4d"),
        (("{dir}/train.py",), "/data/study.ipynb", "train.py"),
        (("{dir}/spawn.py",), None, "spawn.py"),
    ],
)
def test_a_python_program_is_its_script(
    coordinator: ScriptedCoordinator,
    hook_env: dict[str, str],
    tmp_path: Path,
    words: tuple[str, ...],
    session: str | None,
    name: str,
) -> None:
    """Broken if all programs of a server were called `python`."""
    (tmp_path / "package").mkdir()
    for path in ("train.py", "package/job.py", "ipykernel_launcher.py"):
        (tmp_path / path).write_text(CUDA)
    (tmp_path / "spawn.py").write_text(SPAWN)
    environment = {**hook_env, "NVSHARE_NAME": "", "PYTHONPATH": str(tmp_path)}
    if session is not None:
        environment["JPY_SESSION_NAME"] = session
    command = [sys.executable, *(word.format(dir=tmp_path) if "{dir}" in word else word for word in words)]
    program = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    try:
        assert coordinator.expect(messages.Hello).name == name
    finally:
        program.communicate()
