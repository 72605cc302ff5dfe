"""Runs a command under the bypass detector (detector.c), and reads what each of its processes reports."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tests.hook.compiled import compile_c

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Report:
    """GPU work of one process.  `problem` is the reason why the check is incomplete."""

    kernels: int
    kernels_gated: int
    escapes: tuple[tuple[str, str, int], ...]
    """(driver function, kernel or empty, pieces of work that ran)"""
    problem: str | None


def find_cupti() -> Path | None:
    """Path of CUPTI, from a wheel or a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    folders = [place / part / "lib" for place in places for part in ("cu13", "cuda_cupti")]
    folders += [Path("/usr/local/cuda") / part for part in ("extras/CUPTI/lib64", "lib64")]
    found = (folder / name for folder in folders for name in ("libcupti.so.13", "libcupti.so.12"))
    return next((path for path in found if path.is_file()), None)


def build(directory: Path) -> Path:
    """Compiles the detector."""
    flags = ("-shared", "-fPIC", "-fvisibility=hidden")
    return compile_c(directory / "libdetector.so", HERE / "detector.c", flags=flags)


def environment(detector: Path, cupti: Path, reports: Path) -> dict[str, str]:
    """Variables of the command."""
    return {
        "CUDA_INJECTION64_PATH": str(detector),
        "NVSHARE_CUPTI_LIBRARY": str(cupti),
        "NVSHARE_REPORTS": str(reports),
    }


def read(directory: Path) -> list[Report]:
    """Reports of all processes that initialised CUDA."""
    return [_read(path) for path in sorted(directory.iterdir())]


def _read(path: Path) -> Report:
    head, *lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()] or [[]]
    if not head:
        return Report(0, 0, (), "it ended without a report")
    escapes = tuple((function, symbol, int(ran)) for function, symbol, ran in lines)
    return Report(int(head[0]), int(head[1]), escapes, head[2] or None)
