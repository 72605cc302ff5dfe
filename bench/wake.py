"""A model server that wakes on request, against loading its model anew: `python -m nvshare.bench.wake --json`.

Method: one server of class interactive in mode `swap` with `--gib` of memory (bench.workloads.day_job: llama.cpp or
transformers; on simulated GPUs a double that compares its memory).  Each of `--rounds` times it answers a request while
its memory is on the card, after a rival has evicted it, and after it was parked.  The figure is the time from the
request until the first part of the answer.  Then the server ends, and `--loads` times a new one is started, up to the
first part of its answer.  Answers to one request must be equal.

Bars: evicted, the time of a server on the card, 50 ms and what was evicted at 45 GiB/s; parked, 0.5 s instead of 50 ms.
Non-goals: how long parking takes (bench.park), many servers at once (bench.day).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from typing import Any, Final

from nvshare.bench.harness.command import add_figures, parser_for, run_benchmark, simulated
from nvshare.bench.harness.fixture import Fixture, coordinator, percentile, uncoordinated
from nvshare.bench.harness.worker_group import Member, closing
from nvshare.bench.park import GIB, LINK, WAIT_S, park, program

SPARE: Final = 1.25
"""Capacity over the server's memory, so that the rival leaves nothing of it on the card."""
BARS_S: Final = {"evicted": 0.05, "parked": 0.5}


def start(stand: Fixture, mib: int, where: str) -> Member:
    command = [sys.executable, "-m", "nvshare.bench.workloads.day_job", "server", where, str(mib)]
    return Member(stand, command, hooked=True, name="server", options=("--memory=swap", "--class=interactive"))


def request(server: Member, began: float | None = None) -> tuple[float, str]:
    """Seconds until the first part of an answer, from now or from `began`, and the digest of all of it."""
    began = time.monotonic() if began is None else began
    told = server.ask("unit 1", WAIT_S)
    return told["first"] - began, told["digest"]


def host_gib(stand: Fixture) -> float:
    """What the server has on the host."""
    (server,) = (each for each in stand.control("clients")["clients"] if each["name"] == "server")
    return float(sum(seat["host_bytes"] for seat in server["seats"])) / GIB


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    simulate, mib = simulated(options, "1x8GiB"), round(float(options.gib) * 1024)
    torch = simulate is None and importlib.util.find_spec("torch") is not None
    where, library, capacity = *(("cuda", "torch") if torch else ("driver", "driver")), round(mib * SPARE)
    seconds: dict[str, list[float]] = {"resident": [], "evicted": [], "parked": [], "anew": []}
    gib: dict[str, list[float]] = {"evicted": [], "parked": []}
    digests = []

    def note(kind: str, answer: tuple[float, str]) -> None:
        seconds[kind].append(answer[0])
        digests.append(answer[1])

    with uncoordinated(simulate=simulate) as stand, coordinator(stand, [f"--capacity={capacity}MiB"]):
        server, rival = start(stand, mib, where), program(stand, "rival", round(capacity * 0.96), library)
        with closing([server, rival]):
            about = server.answer(WAIT_S)
            rival.answer(WAIT_S)
            request(server)
            for _ in range(options.rounds):
                note("resident", request(server))
                rival.ask("step", WAIT_S)
                gib["evicted"].append(host_gib(stand))
                note("evicted", request(server))
                park(stand, "server")
                gib["parked"].append(host_gib(stand))
                note("parked", request(server))
        for _ in range(options.loads):
            began = time.monotonic()
            server = start(stand, mib, where)
            with closing([server]):
                server.answer(WAIT_S)
                note("anew", request(server, began))
    found = {kind: {"p50": percentile(each, 0.5), "max": max(each)} for kind, each in seconds.items() if each}
    for kind, more_s in BARS_S.items():
        size = statistics.median(gib[kind])
        found[kind] |= {"gib": size, "bar": found["resident"]["p50"] + more_s + size * GIB / LINK}
    return {"program": about.get("program"), "seconds": found, "mismatches": len(set(digests)) - 1}


def fault(result: dict[str, Any]) -> str:
    """What is wrong with the result."""
    return "the same request had different answers" if result["mismatches"] else ""


def show(result: dict[str, Any]) -> None:
    """Text."""
    print(f"{result['program']}: seconds until the first part of an answer, usual and most")
    for kind, each in result["seconds"].items():
        more = f" (bar {each['bar']:.2f}, {each['gib']:.1f} GiB on the host)" if "bar" in each else ""
        print(f"  {kind}: {each['p50']:.3f}, {each['max']:.3f}{more}")


def main() -> int:
    """Entry point."""
    parser = parser_for("wake", "a model server that wakes on request, against loading its model anew")
    add_figures(
        parser,
        gib=("10", "memory of the server"),
        rounds=(10, "requests of each kind"),
        loads=(3, "servers that are started anew"),
    )
    return run_benchmark(parser, measure, show, fault)


if __name__ == "__main__":
    sys.exit(main())
