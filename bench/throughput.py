"""What sharing costs and gains in real frameworks: `python -m nvshare.bench.throughput --json`.

For each workload (workloads/steps.py) these cases, in turns in one run, so that each ratio has its baseline beside it:
alone without the hook; alone under the hook; two at once without the hook (the card's own time slicing); two under the
hook, exclusive, 100 ms.  The processes are started once and told when to run: start-up and warm-up are not measured.

JSON: `workloads` by name: `alone`, `alone_hooked`, `two_native`, `two_exclusive` (steps a second, sums for two) and the
ratios `hooked_share` (alone_hooked / alone), `native_share`, `exclusive_share` (both sums / alone), each as median,
min and max.

Non-goals: how steps are made (workloads/steps.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nvshare.bench.harness.command import parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import BenchError, Fixture, fixture, machine, spread
from nvshare.bench.harness.progress import track
from nvshare.bench.workloads.steps import CUPY, TORCH

READY_TIMEOUT_S = 180.0


class Worker:
    """One process of a workload, warmed up, waiting to be told to run."""

    def __init__(self, stand: Fixture, workload: str, *, hooked: bool, name: str) -> None:
        command = [sys.executable, "-m", "nvshare.bench.workloads.steps", workload]
        self._process = stand.start(command, hooked=hooked, name=name, stdin=subprocess.PIPE)
        self._name = name

    def await_ready(self) -> None:
        """Returns when the warm-up is done."""
        if self._line(READY_TIMEOUT_S) != "ready":
            raise BenchError(f"{self._name}: did not become ready")

    def go(self, seconds: float) -> None:
        """Starts a measurement and returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def result(self, seconds: float) -> dict[str, Any]:
        """What the measurement gave."""
        told: dict[str, Any] = json.loads(self._line(seconds + 60))
        return told

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise BenchError(f"{self._name}: silent for {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._name}: ended with exit code {self._process.wait()}")
        return line.strip()


@contextmanager
def workers(stand: Fixture, workload: str, count: int, *, hooked: bool) -> Iterator[list[Worker]]:
    """So many ready processes of a workload."""
    kind = "hooked" if hooked else "plain"
    with ExitStack() as stack:
        made = []
        for number in range(count):
            worker = Worker(stand, workload, hooked=hooked, name=f"{workload}-{kind}-{number}")
            stack.callback(worker.close)
            made.append(worker)
        for worker in made:
            worker.await_ready()
        yield made


def together(group: Sequence[Worker], seconds: float) -> dict[str, Any]:
    """All of them at once; their sum, and the latencies of those that have any."""
    for worker in group:
        worker.go(seconds)
    results = [worker.result(seconds) for worker in group]
    found: dict[str, Any] = {
        "steps_per_s": sum(result["steps_per_s"] for result in results),
        "each": [round(result["steps_per_s"], 2) for result in results],
    }
    if latencies := [result["latency_ms"] for result in results if "latency_ms" in result]:
        found["latency_ms"] = latencies
    return found


def one_workload(
    workload: str, *, simulate: str | None, seconds: float, repetitions: int, quantum: str
) -> dict[str, Any]:
    """All cases of one workload, interleaved."""
    cases: dict[str, list[dict[str, Any]]] = {"alone": [], "alone_hooked": [], "two_native": [], "two_exclusive": []}
    bases: dict[str, list[float]] = {"hooked": [], "native": [], "exclusive": []}
    with fixture(simulate=simulate, quantum=quantum) as stand, workers(stand, workload, 2, hooked=False) as plain:
        with workers(stand, workload, 1, hooked=True) as hooked:
            for _ in track(range(repetitions), f"{workload}, alone, repetition"):
                cases["alone"].append(together(plain[:1], seconds))
                cases["alone_hooked"].append(together(hooked, seconds))
                bases["hooked"].append(cases["alone"][-1]["steps_per_s"])
        with workers(stand, workload, 2, hooked=True) as hooked:
            for _ in track(range(repetitions), f"{workload}, two, repetition"):
                cases["alone"].append(together(plain[:1], seconds))
                cases["two_native"].append(together(plain, seconds))
                cases["two_exclusive"].append(together(hooked, seconds))
                bases["native"].append(cases["alone"][-1]["steps_per_s"])
                bases["exclusive"].append(cases["alone"][-1]["steps_per_s"])
    shares = {
        "hooked_share": ("alone_hooked", "hooked"),
        "native_share": ("two_native", "native"),
        "exclusive_share": ("two_exclusive", "exclusive"),
    }
    result: dict[str, Any] = {
        case: round(statistics.median(run["steps_per_s"] for run in runs), 2) for case, runs in cases.items()
    }
    for share, (case, base) in shares.items():
        ratios = [run["steps_per_s"] / alone for run, alone in zip(cases[case], bases[base], strict=True) if alone > 0]
        result[share] = spread(ratios) if ratios else None
    result["runs"] = cases
    return result


def available(wanted: Sequence[str]) -> list[str]:
    """The workloads whose framework is installed."""
    have = [
        name
        for names, module in ((TORCH, "torch"), (CUPY, "cupy"))
        for name in names
        if importlib.util.find_spec(module) is not None
    ]
    unknown = [name for name in wanted if name not in (*TORCH, *CUPY)]
    if unknown:
        raise BenchError(f"unknown workload {unknown[0]}; known: {', '.join((*TORCH, *CUPY))}")
    chosen = [name for name in have if not wanted or name in wanted]
    if not chosen:
        raise BenchError("neither PyTorch nor CuPy is installed here (or not for the workloads named)")
    return chosen


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    simulate = simulated(options, "1x8GiB")
    workloads = {
        name: one_workload(
            name,
            simulate=simulate,
            seconds=options.seconds,
            repetitions=options.repetitions,
            quantum=options.quantum,
        )
        for name in available(options.workload)
    }
    about = {"simulated": simulate is not None, "quantum": options.quantum, "machine": machine()}
    return {**about, "workloads": workloads}


def _show(result: dict[str, Any]) -> None:
    for name, found in result["workloads"].items():
        print(f"{name}: alone {found['alone']} steps/s")
        for share in ("hooked_share", "native_share", "exclusive_share"):
            if (ratio := found[share]) is not None:
                print(f"  {share}: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")


def main() -> int:
    """Command line."""
    parser = parser_for("throughput", "Steps a second, shared and alone")
    parser.add_argument("--workload", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (default 5)")
    parser.add_argument("--repetitions", type=int, default=3, help="of every case (default 3)")
    parser.add_argument("--quantum", default="100ms", help="of the exclusive case (default 100ms)")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
