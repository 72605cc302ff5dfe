"""PyTorch, transformers and vLLM, as they are, on the simulated GPU: `python -m nvshare.bench.frameworks --json`.

Method: each job (workloads/framework_jobs.py) runs without the hook, then alone under it in the modes `device` and
`swap`, then two at a time: in `device` both fit, in `swap` each keeps 0.6 of the capacity, so that one of them has left
the card whenever the other runs.  Each process is new, keeps a pattern in GPU memory and compares it after the job.
The memory of vLLM's engine is its cache.

The Python is `--python`, else this one if it has PyTorch, else one of an environment in `--cache` into which PyTorch
for CUDA 13 and transformers are installed; vLLM, of some gigabytes, only if `--only` names a row of it.

Non-goals: what a card computes (bench.compatibility), speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any, Final

from nvshare.bench.harness.command import names_of, parser_for, run_benchmark, step
from nvshare.bench.harness.fixture import BenchError, Fixture, coordinator, uncoordinated
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.bench.workloads import framework_jobs

PROGRAM: Final = Path(framework_jobs.__file__)
WHEELS: Final = ("torch==2.11.0", "numpy", "transformers>=4.57,<6")
VLLM: Final = "vllm==0.24.0"
CARD: Final = "1x2560MiB"
CARD_MIB: Final = 2048
"""The capacity: as on a card, the driver has the rest for itself."""
SMALL_MIB, LARGE_MIB = CARD_MIB // 8, CARD_MIB * 6 // 10
READY_S: Final = 240.0

EVERYWHERE: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The check of PyTorch before a fork asks NVML."""

FOR_VLLM: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
"""Its newer runner takes a length from a kernel; FlashInfer's sampler is compiled at its first use."""

VARIANTS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    **{name: (name, {}) for name in framework_jobs.JOBS},
    "allocator-async": ("allocator", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "allocator-segments": ("allocator", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    **{
        f"{job.replace('_', '-')}-{how}": (job, {**FOR_VLLM, "VLLM_WORKER_MULTIPROC_METHOD": how})
        for job in framework_jobs.ENGINES
        for how in ("spawn", "fork")
    },
}
"""Row -> its job, its environment."""

NEEDS: Final = {"transformer": "transformers", **dict.fromkeys(framework_jobs.ENGINES, "vllm")}
ALONE: Final = "fork"
"""A job without a pattern and a neighbour: its GPU memory belongs to a child."""
GREEDY: Final = "allocator-segments"
"""Has no neighbour either: an allocation beyond the card takes all of it, piece by piece, before it fails."""


def interpreter(options: argparse.Namespace) -> Path:
    """The Python that has the frameworks.  Raises BenchError."""
    wanted = [VARIANTS[name][0] for name in names_of(options.only)]
    wheels = (*WHEELS, VLLM) if any(NEEDS.get(job) == "vllm" for job in wanted) else WHEELS
    if options.python:
        return Path(options.python)
    if importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    python = Path(options.cache) / "bin" / "python"
    if not python.exists():
        venv.create(options.cache, with_pip=True)
    step(f"installing {', '.join(wheels)} into {options.cache}")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *wheels], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"{', '.join(wheels)} cannot be installed into {options.cache}:\n{done.stderr[-600:]}")
    return python


def absent(python: Path, job: str) -> str:
    """A sentence that names the package which the job needs and this Python lacks; empty if nothing is missing."""
    needed = NEEDS.get(job, "torch")
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({needed!r}) is None)"
    return "" if subprocess.run([python, "-c", look], check=False).returncode == 0 else f"{needed} is not installed"


def total(stand: Fixture, *names: str) -> int:
    """The sum of these counters over the GPUs."""
    return sum(gpu.get(name) or 0 for gpu in stand.control("status")["gpus"] for name in names)


class Runs:
    """The runs of one row."""

    def __init__(self, python: Path, name: str, scratch: Path, limit_s: float) -> None:
        self.job, environment = VARIANTS[name]
        self.versions: dict[str, str] = {}
        self._python, self._limit_s = python, limit_s
        # One cache for all runs: what is compiled once need not be compiled again.
        caches = {f"{each}_CACHE_DIR": str(scratch / each.lower()) for each in ("TORCHINDUCTOR", "TRITON")}
        self._environment = {**EVERYWHERE, **caches, "HOME": str(scratch), **environment}

    def _member(self, stand: Fixture, name: str, mode: str, mib: int) -> Member:
        command = [str(self._python), str(PROGRAM), self.job, "--mib", str(0 if self.job == ALONE else mib)]
        options = [f"--memory={mode}"] if mode != "plain" else []
        return Member(
            stand, command, hooked=mode != "plain", name=name, options=options, extra=self._environment, own_group=True
        )

    def run(self, mode: str, count: int) -> dict[str, Any]:
        """`count` programs at a time; their seconds, and what moved.  Raises BenchError."""
        mib = LARGE_MIB if count > 1 and mode == "swap" else SMALL_MIB
        with uncoordinated(simulate=CARD) as stand:
            if mode == "plain":
                return self._together(stand, mode, count, mib)
            with coordinator(stand, ["--capacity", f"{CARD_MIB}MiB"]):
                told = self._together(stand, mode, count, mib)
                moved_mib = total(stand, "evicted_bytes", "restored_bytes") >> 20
        if mib == LARGE_MIB and moved_mib == 0:
            raise BenchError("the programs do not fit together, and no memory has moved")
        return told | {"moved_mib": moved_mib}

    def _together(self, stand: Fixture, mode: str, count: int, mib: int) -> dict[str, Any]:
        members = [self._member(stand, f"{self.job} {number}", mode, mib) for number in range(count)]
        with closing(members):
            for member in members:
                self.versions = member.answer(READY_S)["versions"]
            for member in members:
                member.tell("go")
            told = [member.answer(self._limit_s * count) for member in members]
        if not all(each["kept"] for each in told):
            raise BenchError("the pattern in GPU memory was not kept")
        return {"seconds": [each["seconds"] for each in told]}


def row(python: Path, name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All runs of one row."""
    runs = Runs(python, name, scratch, options.limit)
    found: dict[str, Any] = {"row": name, "result": "ok", "reason": ""}
    if missing := absent(python, runs.job):
        return found | {"result": "skipped", "reason": missing}
    ways = [("plain", 1), *((mode, 1) for mode in options.modes)]
    if runs.job != ALONE and name != GREEDY:
        ways += [(mode, 2) for mode in options.modes]
    for mode, count in ways:
        way = mode if count == 1 else f"{mode}, two"
        step(f"{name}: {way}")
        try:
            found[way] = runs.run(mode, count)
        except BenchError as error:
            return found | {"result": "failed", "reason": f"{way}: {error}"}
    return found | {"versions": runs.versions}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    chosen = names_of(options.only) or list(VARIANTS)
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise BenchError(f"no row {', '.join(unknown)}; there are: {'; '.join(VARIANTS)}")
    options.modes = names_of(options.modes) or ["device", "swap"]
    python = interpreter(options)
    with tempfile.TemporaryDirectory(prefix="nvshare-frameworks-") as scratch:
        rows = [row(python, name, options, Path(scratch)) for name in chosen]
    return {"python": str(python), "card": CARD, "rows": rows}


def fault(result: dict[str, Any]) -> str:
    """The rows that failed."""
    failed = [each["row"] for each in result["rows"] if each["result"] == "failed"]
    return f"failed: {', '.join(failed)}" if failed else ""


def show(result: dict[str, Any]) -> None:
    """Text."""
    print(f"{result['python']}, simulated cards {CARD}, of which {CARD_MIB} MiB are the capacity")
    for each in result["rows"]:
        ways = {way: each[way] for way in ("plain", "device", "swap", "device, two", "swap, two") if way in each}
        times = "; ".join(f"{way} {' and '.join(map(str, told['seconds']))} s" for way, told in ways.items())
        moved = sum(told.get("moved_mib", 0) for told in ways.values())
        print(f"{each['row']}: {each['result']} {each['reason'] or f'{times}; {moved} MiB moved'}")


def main() -> int:
    """Entry point."""
    parser = parser_for(
        "frameworks", "PyTorch, transformers and vLLM, as they are, on the simulated GPU", simulate=False
    )
    parser.add_argument("--python", help="the Python that has the frameworks (default: this one, if it has PyTorch)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nvshare-frameworks")
    parser.add_argument(
        "--cache", type=Path, default=cache, help="else this environment, made here (default %(default)s)"
    )
    parser.add_argument("--only", default="all", help="rows, separated by commas")
    parser.add_argument("--modes", default="all", help="device, swap (default: both)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one program alone (default 240)")
    return run_benchmark(parser, measure, show, fault)


if __name__ == "__main__":
    sys.exit(main())
