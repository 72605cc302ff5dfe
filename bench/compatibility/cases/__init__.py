"""Deterministic programs that the compatibility matrix compares: small ones, one a feature, and whole ones.

FRAMEWORK_cases is a module with `CASES`: name -> function that makes the `Program`.

Invariants: a check starts from its own seeds, so that it gives the same in every process.  A small case takes a second
at most once everything is compiled, and stays below 32 MiB of device memory; one of programs_cases.py takes about
`size_bytes()`.

Non-goals: anything of nvshare.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIZE_VARIABLE = "NVSHARE_BENCH_BYTES"


def size_bytes() -> int:
    """Device memory that a whole program takes, about."""
    return int(os.environ.get(SIZE_VARIABLE, 64 << 20))


class Skipped(Exception):  # noqa: N818 - it is no failure
    """The case cannot run here.  The text says why."""


@dataclass(slots=True)
class Outcome:
    """A digest of every byte that was computed, and figures, for comparing within `tolerance` (relative)."""

    tolerance: float = 0.0
    values: list[float] = field(default_factory=list)
    _seen: Any = field(default_factory=hashlib.sha256)

    def bytes_of(self, array: Any) -> None:
        """A NumPy array: all of it into the digest, its sum into the figures."""
        self._seen.update(array.tobytes())
        self.values.append(float(array.astype("float64").sum()))

    def figure(self, value: float) -> None:
        """One number into both."""
        self._seen.update(repr(value).encode())
        self.values.append(value)

    @property
    def digest(self) -> str:
        """The digest of all results so far."""
        return str(self._seen.hexdigest())


@dataclass(frozen=True, slots=True)
class Program:
    """`step` None: checked only, because its speed is not the GPU's."""

    check: Callable[[], Outcome]
    step: Callable[[], object] | None = None
    synchronize: Callable[[], object] = lambda: None
