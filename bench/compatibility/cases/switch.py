"""The Python side of bench/programs/in_process.c, in the program that is measured: what it answers to `by WHICH`.

Non-goals: measuring (harness/in_process.py), which would load the whole bench into the program.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any, Final

LIBRARY: Final = "NVSHARE_BENCH_SWITCH"
"""The environment variable that tells a program where the compiled in_process.c is."""


def answer(which: str) -> dict[str, Any]:
    """`which`: look, look-pools, hook, direct."""
    path = os.environ.get(LIBRARY)
    if path is None:
        return {"error": f"in one process: no library in {LIBRARY}"}
    by = ctypes.CDLL(path).nvshare_bench_by
    by.restype = ctypes.c_char_p
    told: dict[str, Any] = json.loads(by(which.encode()))
    return told
