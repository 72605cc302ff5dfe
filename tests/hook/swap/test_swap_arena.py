"""The allocator of small pieces, alone."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from tests.hook.compiled import SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"


def test_pieces_never_overlap(tmp_path: Path) -> None:
    """Broken: two small allocations share bytes, or memory is lost between them."""
    program = compile_c(
        tmp_path / "arena", PROGRAMS / "swap_arena_check.c", SOURCE / "swap/arena.c",
        flags=("-fsanitize=address,undefined",),
    )  # fmt: skip
    for seed in (1, random.randrange(2**32)):
        done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
        assert "sound" in done.stdout
