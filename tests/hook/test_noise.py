"""What the hook writes into a program's standard error.

May not go here: messages of single parts, which stand with their tests.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.scripted import BOUND_S, ScriptedCoordinator
from tests.hook.test_fault_sweep import MODES, serve

PROGRAMS = Path(__file__).resolve().parent / "programs"
DEINITIALIZED = 4


def heard(coordinator: ScriptedCoordinator, environment: dict[str, str], *words: str | Path) -> tuple[str, str]:
    """What a program writes, which gets all that it asks for: output and errors."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    reader = threading.Thread(target=serve, args=(coordinator, process))
    reader.start()
    try:
        output, errors = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
        reader.join()
    assert process.returncode == 0, errors
    return output, errors


@pytest.mark.parametrize("mode", MODES)
def test_memory_freed_at_exit(
    coordinator: ScriptedCoordinator, hook_env: dict[str, str], tmp_path: Path, built: Built, mode: str
) -> None:
    """Broken: ordinary programs end with a warning that the driver does not take memory back."""
    program = compile_c(tmp_path / "free", PROGRAMS / "free_at_exit.c", built.sim_dir / "libcuda.so.1")
    output, errors = heard(coordinator, {**hook_env, "NVSHARE_MEMORY": mode}, program)
    assert (output, errors) == (f"{DEINITIALIZED}\n", "")
