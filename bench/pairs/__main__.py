"""The command line of `python -m nvshare.bench.pairs`.

JSON: `alone` by workload; `pairs` by mix and way with `np`, `stp`, `min_np`, `latency_ms` of the server,
`best_of_others`, `ratio` (figures.py) or `failed`; `ways` with what was left out and why; `geometric_means`; `found` of
a scenario.

Invariants: the object is printed whatever fails, and within the budget; SIGTERM leaves no process behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from typing import Any

from nvshare.bench.harness.command import names_of, parser_for, run_benchmark, simulated, step
from nvshare.bench.harness.fixture import BenchError, machine
from nvshare.bench.pairs.figures import geometric_means
from nvshare.bench.pairs.mixes import WAYS, Mix, chosen_mixes, chosen_ways
from nvshare.bench.pairs.programs import Command, Plan, measure_all
from nvshare.bench.pairs.scenarios import SCENARIOS, measure_scenario

SECONDS, SETTLE_S = 2.5, 3.0


def command_of(where: str) -> Command:
    """The program of a workload, on `cuda`, `cpu` or the simulated GPU's `driver`."""
    return lambda name: [sys.executable, "-m", "nvshare.bench.workloads.pair_job", name, where]


def without_missing(mixes: list[Mix]) -> tuple[list[Mix], list[str]]:
    """The mixes whose frameworks are installed, and a note for the others.  Raises BenchError when none is left."""
    if importlib.util.find_spec("torch") is None:
        raise BenchError("PyTorch is not installed here")
    if importlib.util.find_spec("torchvision") is not None:
        return mixes, []
    kept = [mix for mix in mixes if all(job.workload != "cnn" for job in mix.jobs)]
    if not kept:
        raise BenchError("torchvision is not installed here")
    return kept, [f"{mix.name}: torchvision is not installed" for mix in mixes if mix not in kept]


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    simulate = simulated(options, "1x16GiB") if options.device != "cpu" else "1x16GiB"
    where = options.device or ("cuda" if simulate is None else "driver")
    seconds = options.seconds or (SECONDS if options.scenario is None else SCENARIOS[options.scenario].seconds)
    begin = time.monotonic()
    plan = Plan(command_of(where), simulate, seconds, options.settle, begin + options.budget, step)
    about: dict[str, Any] = {
        "simulated": simulate is not None, "machine": machine(), "device": where,
        "seconds": seconds, "settle_s": options.settle,
    }  # fmt: skip
    if options.scenario is not None:
        result = (
            about
            | {"scenario": options.scenario}
            | measure_scenario(options.scenario, options.ways, options.pairs, plan)
        )
    else:
        mixes = chosen_mixes(options.pairs)
        skipped: list[str] = []
        if where != "driver":
            mixes, skipped = without_missing(mixes)
        result = about | {"skipped": skipped} | measure_all(mixes, chosen_ways(options.ways), plan)
        result["geometric_means"] = geometric_means(result["pairs"])
    result["versions"]["python"] = sys.version.split()[0]
    result["took_s"] = round(time.monotonic() - begin, 1)
    return result


def _show(result: dict[str, Any]) -> None:
    print(f"{result['machine']['gpu']}: normalised progress of each program (sum), ratio to the best of the others")
    for name, cases in result["pairs"].items():
        print(name)
        for way, case in cases.items():
            print(f"  {way:12} {_line(case)}")
    for name, told in result["ways"].items():
        if "skipped" in told:
            print(f"{name}: left out: {told['skipped']}")
    for note in result.get("skipped", ()):
        print(note)
    for key in ("geometric_means", "found"):
        if key in result:
            print(f"{key}: {json.dumps(result[key])}")


def _line(case: dict[str, Any]) -> str:
    if "failed" in case:
        return f"failed: {case['failed']}"
    words = [" + ".join(f"{share:.3f}" for share in case["np"]), f"({case['stp']:.3f})"]
    words += [f"ratio {case['ratio']:.3f} to {case['best_way']}"] if "ratio" in case else []
    words += [f"p50 {case['latency_ms']['p50']} p99 {case['latency_ms']['p99']} ms"] if case.get("latency_ms") else []
    return " ".join(words)


def main() -> int:
    """Command line."""
    parser = parser_for("pairs", "What programs that share a card keep of their speed alone, by ways of sharing")
    parser.add_argument("--pairs", type=names_of, default=[], metavar="NAMES", help="such as train+decode,cnn+cnn")
    parser.add_argument("--ways", type=names_of, default=[], metavar="NAMES", help=f"of {','.join(WAYS)} (all)")
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), help="a question about classes or shares instead")
    parser.add_argument("--seconds", type=float, help=f"length of a window (default {SECONDS}; scenarios longer)")
    parser.add_argument(
        "--settle", type=float, default=SETTLE_S, help=f"before the window, where a policy learns (default {SETTLE_S})"
    )
    parser.add_argument("--budget", type=float, default=460.0, help="seconds; no mix begins later (default 460)")
    parser.add_argument("--device", choices=("cuda", "cpu", "driver"), help="cpu: a smoke test of the workloads")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
