"""The command line of `python -m nvshare.bench.simulate`.

JSON: `policies` by name with the keys of figures.py; `jobs`, `gpus`, `seed` or `trace`, `quantum`.  Figures are
SIMULATED: the core and the policies are real, jobs and cards are models (virtual_node/node.py, virtual_node/card.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvshare.bench.harness.command import names_of, parser_for, run_benchmark, step
from nvshare.bench.harness.fixture import BenchError, machine
from nvshare.bench.simulate.day import day
from nvshare.bench.simulate.figures import figures
from nvshare.bench.simulate.jobs import fitted, scaled, synthetic
from nvshare.bench.simulate.traces import read_trace
from nvshare.bench.virtual_node.node import Job, VirtualNode
from nvshare.coordinator.model.settings import SECOND_NS, Settings
from nvshare.coordinator.units import format_duration, parse_quantum, parse_size
from nvshare.scheduler_policies.registry import BUILT_IN


def simulate(policy: str, jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, Any]:
    """One policy's figures."""
    settings = Settings(policy=policy, quantum_ns=options.quantum)
    world = VirtualNode(jobs, options.gpus, options.capacity, settings)
    begin = time.process_time()
    world.run(lambda left: step(f"{policy}: {len(jobs) - left} of {len(jobs)} jobs"))
    return figures(world) | {"processor_s": round(time.process_time() - begin, 1)}


def _jobs(options: argparse.Namespace) -> list[Job]:
    if options.trace is None:
        jobs = synthetic(options.jobs or 1000, options.gpus, options.hours, options.load, options.seed)
        return fitted(jobs, options.gpus, options.capacity)
    try:
        jobs = read_trace(options.trace, options.seed)
    except (OSError, ValueError) as error:
        raise BenchError(f"{options.trace}: {error}") from None
    jobs = fitted(jobs, options.gpus, options.capacity)[: options.jobs]
    if not jobs:
        raise BenchError(f"{options.trace}: no job that used a GPU and ended")
    if options.load is None:
        return jobs
    span_s = max(1.0, jobs[-1].arrives_ns / SECOND_NS)
    return scaled(jobs, options.load * options.gpus * span_s)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    about: dict[str, Any] = {"simulated": True, "machine": {"cpu": machine()["cpu"]}}
    if options.trace is None and options.load is None:
        options.load = 0.7
    unknown = [name for name in options.policies if name not in BUILT_IN]
    if unknown:
        raise BenchError(f"no policy {unknown[0]!r}; known: {', '.join(sorted(BUILT_IN))}")
    if options.day:
        return about | {"day": {name: day(name) for name in options.policies or sorted(BUILT_IN)}}
    jobs = _jobs(options)
    quantum = "auto" if options.quantum is None else format_duration(options.quantum)
    about |= {"gpus": options.gpus, "jobs": len(jobs), "quantum": quantum}
    about |= {"seed": options.seed} if options.trace is None else {"trace": options.trace.name}
    found = {name: simulate(name, jobs, options) for name in options.policies or sorted(BUILT_IN)}
    return about | {"policies": found}


def _show(result: dict[str, Any]) -> None:
    if "day" in result:
        for name, found in result["day"].items():
            print(f"{name:15} {found}")
        return
    print(f"SIMULATED: {result['jobs']} jobs on {result['gpus']} GPUs, quantum {result['quantum']}")
    columns = ("mean JCT", "median", "p95", "makespan", "rho p95", "Jain users", "used", "moved GiB", "grants")
    print(f"{'policy':15}" + "".join(f"{column:>11}" for column in columns))
    for name, of in result["policies"].items():
        jct = of["jct_s"]
        cells = [f"{jct['mean']:.0f} s", f"{jct['median']:.0f} s", f"{jct['p95']:.0f} s", f"{of['makespan_s']:.0f} s"]
        cells += [f"{of['rho']['p95']:.2f}", f"{of['jain_users']:.3f}", f"{of['utilisation']:.3f}"]
        cells += [f"{of['moved_gib']:.0f}", f"{of['handovers']}"]
        print(f"{name:15}" + "".join(f"{cell:>11}" for cell in cells))
        if of["replaced"]:
            print(f"{'':15}on {of['replaced']} GPUs the core has replaced the policy: it let a job starve")


def main() -> int:
    """Command line."""
    parser = parser_for("simulate", "Jobs of a day under each policy, in virtual time", simulate=False)
    parser.add_argument("--policies", type=names_of, default=[], metavar="NAMES", help="such as auto,round_robin (all)")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--jobs", type=int, help="of the mix (1000), or the first ones of the trace (all)")
    parser.add_argument("--hours", type=float, default=24.0, help="in which the jobs of the mix arrive")
    parser.add_argument("--load", type=float, help="work over what the GPUs have; 0.7, a trace's own if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capacity", type=parse_size, default=80 << 30, metavar="SIZE", help="of each GPU (80GiB)")
    parser.add_argument("--quantum", type=parse_quantum, default=5 * SECOND_NS, help="5s; or auto")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the jobs of a public trace instead of a mix")
    parser.add_argument("--day", action="store_true", help="the programs of bench.day on a card of 24 GiB")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
