"""Runs a command under the bypass detector of this folder, and reads what each of its processes reports.

The driver loads the detector (CUDA_INJECTION64_PATH) when a process initialises CUDA.  It compares CUPTI's records with
the hook's gate, and writes a report of each process.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    sources = [HERE / f"{name}.c" for name in ("cupti", "report", "tally")]
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", "-I", str(HERE))
    return compile_c(directory / "libdetector.so", *sources, flags=flags)


def environment(detector: Path, cupti: Path, reports: Path) -> dict[str, str]:
    """Variables of the command."""
    return {
        "CUDA_INJECTION64_PATH": str(detector),
        "NVSHARE_CUPTI_LIBRARY": str(cupti),
        "NVSHARE_VERIFY_REPORT": str(reports),
    }


def read(directory: Path) -> list[Report]:
    """Reports of all processes that initialised CUDA, in that order."""
    return list(_read(directory))


def _read(directory: Path) -> Iterator[Report]:
    for path in sorted(directory.glob("*.json"), key=lambda path: int(path.stem.split("-")[-1])):
        told: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
        problem = told["error"]
        if problem is None and not told["complete"]:
            problem = "it ended without a report"
        elif problem is None and not told["matched"]:
            problem = f"this CUPTI (API {told['cupti']}) is newer than the detector"
        elif problem is None and not (told["hooked"] and told["active"]):
            problem = "its gate was open"
        elif problem is None and told["lost_records"]:
            problem = f"CUPTI lost {told['lost_records']} records"
        escapes = tuple((one["function"], one["symbol"], one["ran"]) for one in told["escaped"])
        yield Report(told["kernels"]["ran"], told["kernels"]["gated"], escapes, problem)
