"""The command line of `python -m nvshare.bench.day`.

JSON: `alone` by program; `ways` by name with the keys of figures.py or why one was left out (`skipped`); `bars` of our
ways; `server` names the program that served.

Invariants: the object is printed whatever fails; no way begins after the budget; SIGTERM leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from typing import Any

from nvshare.bench.day.figures import bars, describe
from nvshare.bench.day.ways import CLASSES, NAMES, Plan, alone, day, place, ways_of
from nvshare.bench.harness.command import names_of, parser_for, run_benchmark, simulated, step
from nvshare.bench.harness.fixture import BenchError, machine

SIZES_MIB = {"server": 10240, "images": 10240, "notebook": 10240, "training": 12288}
SMALL_MIB = {"server": 40, "images": 40, "notebook": 32, "training": 48}
CAPACITY_MIB, SMALL_CAPACITY_MIB, SMALL_CARD = 24 << 10, 96, "1x512MiB"
SECONDS, SMALL_SECONDS = 45.0, 6.0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    simulate = simulated(options, SMALL_CARD)
    real = simulate is None
    begin = time.monotonic()
    plan = Plan(
        simulate, options.seconds or (SECONDS if real else SMALL_SECONDS), options.drain,
        CAPACITY_MIB if real else SMALL_CAPACITY_MIB, SIZES_MIB if real else SMALL_MIB, begin + options.budget,
        step, options.seed, options.load, options.cold,
    )  # fmt: skip
    ways = ways_of(plan.capacity_mib)
    if unknown := [name for name in options.ways if name not in ways]:
        raise BenchError(f"unknown way {unknown[0]!r}; known: {', '.join(ways)}")
    before = alone(plan)
    result: dict[str, Any] = {
        "simulated": not real, "machine": machine(), "seconds": plan.seconds, "seed": plan.seed, "load": plan.load,
        "cold": plan.cold,
        "capacity_mib": plan.capacity_mib, "sizes_mib": plan.sizes_mib, "link_gib_s": options.link,
        "demand_gib": round(sum(plan.sizes_mib.values()) / 1024, 1), "classes": CLASSES,
        "server": before["server"]["program"], "alone": before, "ways": {}, "bars": {},
        "memory_of_turns30": "swap: managed memory beyond the card is not measured",
    }  # fmt: skip
    tokens: dict[int, str] = {}
    for name, way in ways.items():
        if options.ways and name not in options.ways:
            continue
        if time.monotonic() + 1.2 * plan.seconds > plan.deadline:
            result["ways"][name] = {"skipped": "no time left"}
            continue
        try:
            with place(plan, way) as there:
                records, began, moved = day(there)
        except (BenchError, subprocess.TimeoutExpired) as error:
            result["ways"][name] = {"skipped": str(error)}
            continue
        told = describe(plan, records, began, moved, before)
        answers = [(number, answer["digest"]) for number, (_, answer) in enumerate(records["server"].done)]
        told["other_tokens"] = sum(tokens.setdefault(number, digest) != digest for number, digest in answers)
        result["ways"][name] = told
        plan.tell(f"{name}: {told}")
    result["bars"] = bars(result["ways"], plan.sizes_mib["server"] / 1024, options.link)
    result["took_s"] = round(time.monotonic() - begin, 1)
    return result


def _show(result: dict[str, Any]) -> None:
    print(f"{result['machine']['gpu']}: {result['capacity_mib']} MiB, programs of {result['sizes_mib']} MiB")
    for name, way in result["ways"].items():
        print(f"{name:12} " + (f"left out: {way['skipped']}" if "skipped" in way else json.dumps(way)))
    for name, judged in result["bars"].items():
        print(f"{name}: {json.dumps(judged)}")


def main() -> int:
    """Command line."""
    parser = parser_for("day", f"A day of {', '.join(NAMES)} that want twice the card, by ways of sharing it")
    parser.add_argument("--ways", type=names_of, default=[], metavar="NAMES", help="of those of the text (all)")
    parser.add_argument("--seconds", type=float, help=f"of each way's day (default {SECONDS:g}; simulated less)")
    parser.add_argument("--drain", type=float, default=15.0, help="seconds for late work after the day (default 15)")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; no way begins later (default 500)")
    parser.add_argument("--link", type=float, default=50.0, help="GiB/s to the card, for the bar (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="of the times at which work comes (default 1)")
    parser.add_argument("--cold", action="store_true", help="the day begins with the first eviction of each program")
    parser.add_argument("--load", type=float, default=1.0, help="work that comes, over the usual (default 1)")
    return run_benchmark(parser, _measure, _show)


if __name__ == "__main__":
    sys.exit(main())
