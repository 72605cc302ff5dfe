"""The environment of a program on simulated GPUs, and the grammar of `GPUS[xCAPACITY]`.

This module writes nothing: the first process that initialises CUDA creates the state file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvshare.simulated_gpu import library_directory

MAX_GPUS = 32
DEFAULT_CAPACITY_BYTES = 16 << 30
MIN_CAPACITY_BYTES = 1 << 20

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_SPEC = re.compile(r"(?P<gpus>\d+)(?:x(?P<number>\d+(?:\.\d+)?)(?P<unit>[A-Za-z]*))?")


@dataclass(frozen=True, slots=True)
class SimulatedCards:
    """The GPUs that `GPUS[xCAPACITY]` describes."""

    gpus: int
    capacity_bytes: int

    def __str__(self) -> str:
        return f"{self.gpus}x{self.capacity_bytes}"


def parse_cards(spec: str) -> SimulatedCards:
    """`2x8GiB` -> two cards of 8 GiB; without a capacity 16 GiB each.  Raises ValueError."""
    example = "write GPUS[xCAPACITY], for example 2x8GiB"
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ValueError(f"{spec!r} does not describe simulated GPUs: {example}")
    gpus = int(match["gpus"])
    if not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"{spec!r}: {gpus} GPUs, but 1 to {MAX_GPUS} can be simulated")
    if match["number"] is None:
        return SimulatedCards(gpus, DEFAULT_CAPACITY_BYTES)
    factor = _UNITS.get(match["unit"].upper())
    if factor is None:
        raise ValueError(f"{spec!r}: unknown unit {match['unit']!r}; use KiB, MiB, GiB or TiB")
    capacity_bytes = int(float(match["number"]) * factor)
    if capacity_bytes < MIN_CAPACITY_BYTES:
        raise ValueError(f"{spec!r}: {capacity_bytes} bytes a GPU is less than 1MiB; {example}")
    return SimulatedCards(gpus, capacity_bytes)


def simulated_environment(state: Path, spec: str | None, base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that make CUDA programs load the simulated libraries and share the cards of `state`.

    Only the process that creates the state file reads the spec.  Raises ValueError and LibraryNotFoundError.
    """
    environment = dict(base)
    directory = str(library_directory())
    others = [part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part and part != directory]
    environment["LD_LIBRARY_PATH"] = ":".join([directory, *others])
    environment["NVSHARE_SIM_STATE"] = str(state)
    if spec is not None:
        environment["NVSHARE_SIMULATE"] = str(parse_cards(spec))
    return environment
