"""Two model servers on one card, by ways of sharing it: `python -m nvshare.bench.servers`.

Method: two servers (workloads/serving.py) with a Llama of 1.5 billion random weights have so many requests each under
way (`--in-flight`), a new one when one has ended.  `alone`: each of them while the other waits, without the hook.
`part`: tokens a second of a server over its own alone at the same number of requests, the mean of both.

JSON: `alone` and `ways` by number of requests with `part`, `parts`, `tokens_per_s`, `first_ms` (from a request to its
first token), `requests`, `other_tokens` (answers that differ from the server's own alone), `moved_gib`, or `failed`;
`bars` of our ways.

Invariants: the object is printed whatever way fails; none begins after the budget; SIGTERM leaves no process behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from nvshare.bench.harness.command import names_of, parser_for, run_benchmark, simulated, step
from nvshare.bench.harness.fixture import BenchError, machine, percentile
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.pairs.mixes import WAYS as PAIRS
from nvshare.bench.pairs.mixes import Way
from nvshare.bench.pairs.programs import Plan, Programs, check_clients, sharing

SECONDS, SETTLE_S, LEAD_S = 4.0, 3.0, 1.0
SIZE_MIB, SMALL_MIB, SMALL_CARD = 6144, 12, "1x512MiB"
READY_S, ANSWER_S = 240.0, 60.0
BEYOND: Final = "beyond"
BEST_OF_OTHERS: Final = 0.97
SERVERS: Final = ("first", "second")

Answers = dict[tuple[str, int, int], str]
"""Server, requests under way, prompt -> the digest of its tokens alone."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way of sharing, with variables for the servers."""

    way: Way
    variables: Mapping[str, str] = field(default_factory=dict)


def cases(capacity_mib: int) -> dict[str, Case]:
    """The ways in the order of measuring.  Under `beyond` the servers do not fit together."""
    beyond = Way(BEYOND, ("--capacity", f"{capacity_mib}MiB"), learns=True)
    return {
        "native": Case(PAIRS["native"]), "default": Case(PAIRS["default"]), "default_mps": Case(PAIRS["default_mps"]),
        "mps_halves": Case(PAIRS["mps"], {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}), "mps": Case(PAIRS["mps"]),
        BEYOND: Case(beyond, {"NVSHARE_MEMORY": "swap"}),
    }  # fmt: skip


@dataclass(slots=True)
class Run:
    """The two servers of one way."""

    programs: Programs
    members: list[Member]
    seconds: float
    lead_s: float

    def window(self, number: int, members: Sequence[Member]) -> list[dict[str, Any]]:
        """The answers of these servers after a common window."""
        begin = time.monotonic() + self.lead_s
        end = begin + self.seconds
        for member in members:
            member.tell(f"window {number} {begin:.6f} {end:.6f}")
        limit = end + ANSWER_S
        return [member.answer(max(1.0, limit - time.monotonic())) for member in members]

    def moved_bytes(self) -> int | None:
        """Evicted and restored so far; None without a coordinator."""
        if self.programs.way.coordinator is None:
            return None
        gpus = self.programs.stand.control("status")["gpus"]
        return sum(int(gpu["evicted_bytes"]) + int(gpu["restored_bytes"]) for gpu in gpus)


@contextmanager
def servers(case: Case, plan: Plan, versions: dict[str, str]) -> Iterator[Run]:
    """Two servers, ready.  Raises BenchError."""
    with sharing(case.way, plan) as programs:
        extra = {**programs.variables, **case.variables}
        hooked = case.way.coordinator is not None
        members: list[Member] = []
        try:
            for name in SERVERS:
                command = plan.command(name)
                members += [Member(programs.stand, command, hooked=hooked, name=name, extra=extra, own_group=True)]
            for member in members:
                versions.update(member.answer(READY_S)["versions"])
            check_clients(programs)
            yield Run(programs, members, plan.seconds, plan.settle_s if case.way.learns else min(LEAD_S, plan.settle_s))
        except BaseException:
            for member in members:
                member.kill()
            raise
        for member in members:  # in order, because MPS suffers from clients that are killed
            member.end_input()
        for member in members:
            member.close()


def compare(answers: Answers, name: str, number: int, told: Mapping[str, Any]) -> int:
    """Answers that differ from the server's first one to the same prompt.  Those alone come first."""
    return sum(
        count
        for prompt, digest, count in told["answers"]
        if answers.setdefault((name, number, prompt), digest) != digest
    )


def describe(
    answers: Answers, number: int, told: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The figures of both servers."""
    rates = [each["rate"] for each in told]
    parts = [rate / one["tokens_per_s"] for rate, one in zip(rates, alone, strict=True)]
    firsts = [value for each in told for value in each["first_ms"]]
    return {
        "part": round(sum(parts) / len(parts), 4), "parts": [round(part, 4) for part in parts],
        "tokens_per_s": [round(rate, 1) for rate in rates], "first_ms": ranks(firsts), "requests": len(firsts),
        "other_tokens": sum(
            compare(answers, name, number, each) for name, each in zip(SERVERS, told, strict=True)
        ),
    }  # fmt: skip


def ranks(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile; None of nothing."""
    return {f"p{rank}": percentile(values, rank / 100) for rank in (50, 99)} if values else None


def bars(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Whether our ways reach their bars: `default` the card's own slicing, `default_mps` nearly the best of all."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, factor, others in (
        ("default", 1.0, ("native",)),
        ("default_mps", BEST_OF_OTHERS, ("native", "default", "mps_halves", "mps")),
    ):
        for number, told in ways.get(name, {}).items():
            before = [ways[other][number]["part"] for other in others if "part" in ways.get(other, {}).get(number, ())]
            if "part" in told and before:
                least = round(factor * max(before), 4)
                found.setdefault(name, {})[number] = {
                    "value": told["part"], "least": least, "reached": told["part"] >= least
                }  # fmt: skip
    return found


def measure_alone(run: Run, number: int, answers: Answers) -> list[dict[str, Any]]:
    """Each server while the other one waits."""
    found = []
    for name, member in zip(SERVERS, run.members, strict=True):
        (told,) = run.window(number, [member])
        if not told["rate"]:
            raise BenchError(f"{name}: no token in {run.seconds:g} s alone")
        figures = {"tokens_per_s": round(told["rate"], 1), "first_ms": ranks(told["first_ms"])}
        found.append(figures | {"other_tokens": compare(answers, name, number, told)})
    return found


def measure_together(run: Run, number: int, answers: Answers, alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Both servers."""
    before = run.moved_bytes()
    told = run.window(number, run.members)
    figures = describe(answers, number, told, alone)
    if before is not None:
        figures["moved_gib"] = round(((run.moved_bytes() or 0) - before) / 2**30, 2)
    return figures


def measure_all(plan: Plan, numbers: Sequence[int], known: Mapping[str, Case], chosen: Sequence[str]) -> dict[str, Any]:
    """`alone`, `ways` and `versions`.  Raises BenchError when a server fails alone."""
    answers: Answers = {}
    alone: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    for name in ["native", *(name for name in chosen if name != "native")]:
        if alone and time.monotonic() > plan.deadline:
            ways[name] = {"skipped": "no time left"}
            continue
        try:
            with servers(known[name], plan, versions) as run:
                for number in numbers if not alone else ():
                    alone[str(number)] = told = measure_alone(run, number, answers)
                    plan.tell(f"alone, {number} requests: {told}")
                for number in numbers if name in chosen else ():
                    ways.setdefault(name, {})[str(number)] = {"failed": "interrupted"}
                    ways[name][str(number)] = figures = measure_together(run, number, answers, alone[str(number)])
                    plan.tell(f"{name}, {number} requests: {figures}")
        except (BenchError, subprocess.TimeoutExpired) as error:
            if len(alone) < len(numbers):
                raise
            plan.tell(f"{name}: {error}")
            found = ways.setdefault(name, {})
            found.update({key: {"failed": str(error)} for key, case in found.items() if "failed" in case})
            if not found:
                found["skipped"] = str(error)
    return {"alone": alone, "ways": ways, "versions": versions}


def server_of(options: argparse.Namespace, device: str) -> str:
    """The server's kind.  Raises BenchError when it is not installed."""
    if device == "driver":
        return "double"
    has_vllm = importlib.util.find_spec("vllm") is not None
    kind: str = options.server or ("vllm" if has_vllm and device == "cuda" else "torch")
    if importlib.util.find_spec(kind) is None:
        raise BenchError(f"{kind} is not installed for {sys.executable}")
    if kind == "vllm" and device == "cpu":
        raise BenchError("vLLM serves on a card alone; leave out --device")
    return kind


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begin = time.monotonic()
    simulate = simulated(options, SMALL_CARD) if options.device != "cpu" else SMALL_CARD
    device = options.device or ("cuda" if simulate is None else "driver")
    kind = server_of(options, device)
    size = options.size_mib or (SIZE_MIB if device == "cuda" else SMALL_MIB)
    capacity = options.capacity_mib or math.ceil(size * 4 / 3)
    known = cases(capacity)
    if unknown := [name for name in options.ways if name not in known]:
        raise BenchError(f"unknown way {unknown[0]!r}; known: {', '.join(known)}")
    where = "cpu" if device == "cpu" else "cuda"
    words = [sys.executable, "-m", "nvshare.bench.workloads.serving", kind, where, str(size), *options.in_flight]
    plan = Plan(lambda name: words, simulate, options.seconds, options.settle, begin + options.budget, step)
    result: dict[str, Any] = {
        "simulated": simulate is not None, "machine": machine(), "server": kind, "device": device, "size_mib": size,
        "capacity_of_beyond_mib": capacity, "seconds": plan.seconds, "settle_s": plan.settle_s,
    }  # fmt: skip
    chosen = [name for name in known if not options.ways or name in options.ways]
    result |= measure_all(plan, [int(number) for number in options.in_flight], known, chosen)
    return result | {"bars": bars(result["ways"]), "took_s": round(time.monotonic() - begin, 1)}


def fault(result: dict[str, Any]) -> str:
    """Wrong tokens.  Those of vLLM depend on the requests that are computed together, also alone."""
    wrong = [
        f"{name} with {number} requests"
        for name, way in result["ways"].items()
        for number, told in way.items()
        if result["server"] != "vllm" and isinstance(told, dict) and told.get("other_tokens")
    ]
    return f"other tokens than alone: {', '.join(wrong)}" if wrong else ""


def show(result: dict[str, Any]) -> None:
    """Text."""
    print(f"{result['machine']['gpu']}: two servers ({result['server']}) of {result['size_mib']} MiB")
    for number, told in result["alone"].items():
        rates = " and ".join(f"{one['tokens_per_s']:.0f}" for one in told)
        print(f"alone, {number} requests: {rates} tokens/s, first token {told[0]['first_ms']} ms")
    for name, way in result["ways"].items():
        for number, told in way.items():
            text = told if number == "skipped" else f"{number} requests: {json.dumps(told)}"
            print(f"{name:12} {text}")
    print(f"bars: {json.dumps(result['bars'])}")


def main() -> int:
    """Command line."""
    parser = parser_for("servers", "Two model servers on one card, by ways of sharing it")
    parser.add_argument("--server", choices=("vllm", "torch"), help="default: vLLM if it is installed")
    parser.add_argument(
        "--in-flight", type=names_of, default=["2", "8", "32"], metavar="NUMBERS", help="(default 2,8,32)"
    )
    parser.add_argument("--ways", type=names_of, default=[], metavar="NAMES", help=f"of {','.join(cases(0))} (all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"length of a window (default {SECONDS:g})")
    parser.add_argument(
        "--settle", type=float, default=SETTLE_S, help=f"before it, where a policy learns (default {SETTLE_S:g})"
    )
    parser.add_argument("--size-mib", type=int, help=f"memory of a server (default {SIZE_MIB}, on a card)")
    parser.add_argument("--capacity-mib", type=int, help="of the card in the way beyond (default 4/3 of a server)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; no way begins later (default 240)")
    parser.add_argument("--device", choices=("cuda", "cpu", "driver"), help="cpu: a smoke test of the server")
    return run_benchmark(parser, measure, show, fault)


if __name__ == "__main__":
    sys.exit(main())
