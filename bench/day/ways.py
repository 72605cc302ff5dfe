"""The day under one way of sharing: its programs, the work that comes to them, and what they answered.

Each program has a thread here that hands it its work at its time, and waits.  Under `reload` one broker does, which
ends the resident program and starts the one that is wanted.  Its programs keep nothing from life to life, and
the training saves nothing: that favours it.

The window begins after each program has worked once beside the others; a cold day begins as soon as they are there.

Invariants: work comes at the same times under all ways; a wait has a limit; a program that dies costs its own work
only.

Non-goals: the arithmetic (figures.py).
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from nvshare.bench.harness.fixture import BenchError
from nvshare.bench.harness.worker_group import Member
from nvshare.bench.pairs.mixes import Way
from nvshare.bench.pairs.programs import Plan as PairsPlan
from nvshare.bench.pairs.programs import Programs, check_clients, sharing

GAPS_S = {"server": 4.0, "images": 8.0, "notebook": 15.0}
"""Mean time between requests, images and cells, on a card."""
CLASSES = {"server": "interactive", "notebook": "interactive", "images": "batch", "training": "batch"}
NAMES = ("server", "images", "notebook", "training")
READY_S, CHUNK_S = 150.0, 0.5
"""A start beside others; the longest time that a broker trains before it looks for requests."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of all ways."""

    simulate: str | None
    seconds: float
    drain_s: float
    """After the window, for the work that came in it."""
    capacity_mib: int
    sizes_mib: dict[str, int]
    deadline: float
    tell: Callable[[str], None]
    seed: int = 1
    load: float = 1.0
    """Work that comes, over that of `GAPS_S`."""
    cold: bool = False
    """No program has been evicted yet."""

    def command(self, name: str) -> list[str]:
        """A program of the day, or the ballast."""
        size = self.sizes_mib.get(name, self.capacity_mib)
        where = "cuda" if self.simulate is None else "driver"
        return [sys.executable, "-m", "nvshare.bench.workloads.day_job", name, where, str(size)]

    def arrivals(self, name: str) -> list[float]:
        """Seconds from the begin of the window to each piece of work: a Poisson process."""
        chance, gap_s = random.Random(f"{self.seed} {name}"), GAPS_S[name]
        gap_s *= (1.0 if self.simulate is None else self.seconds / 60) / self.load
        found = [min(self.seconds / 4, chance.expovariate(1 / gap_s))]
        while (moment := found[-1] + chance.expovariate(1 / gap_s)) < self.seconds:
            found.append(moment)
        return found


def ways_of(capacity_mib: int) -> dict[str, Way]:
    """The ways in the order of measuring.  Contexts take of a card what the coordinator leaves them by default."""
    capacity = ("--capacity", f"{capacity_mib - max(capacity_mib // 32, 1)}MiB")
    turns = ("--sharing=exclusive", "--policy=round_robin", "--quantum=30s")
    ways = (
        Way("none"), Way("reload"), Way("turns30", (*turns, *capacity)), Way("nvshare", capacity),
        Way("nvshare_mps", (*capacity, "--mps"), own_mps=True),
    )  # fmt: skip
    return {way.name: way for way in ways}


@dataclass(slots=True)
class Record:
    """What became of a program's work.  `done`: (arrival, answer) by the monotonic clock."""

    about: dict[str, Any] = field(default_factory=dict)
    done: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    """How long work has waited in vain."""
    steps: int = 0
    stepped_s: float = 0.0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the programs of a way run."""

    plan: Plan
    way: Way
    programs: Programs
    """The coordinator's place, and what every program has in its environment."""

    def start(self, name: str) -> Member:
        """A program, not waited for."""
        hooked = self.way.coordinator is not None
        extra = dict(self.programs.variables)
        if hooked:
            extra["NVSHARE_MEMORY"] = "swap"
            if self.way.name.startswith("nvshare"):
                extra["NVSHARE_CLASS"] = CLASSES[name]
        return Member(
            self.programs.stand, self.plan.command(name), hooked=hooked, name=name, extra=extra,
            own_group=True,
        )  # fmt: skip

    def moved_bytes(self) -> int | None:
        """Evicted and restored so far; None without a coordinator."""
        if self.way.coordinator is None:
            return None
        gpus = self.programs.stand.control("status")["gpus"]
        return sum(int(gpu["evicted_bytes"]) + int(gpu["restored_bytes"]) for gpu in gpus)


@contextmanager
def place(plan: Plan, way: Way, *, full: bool = False) -> Iterator[Place]:
    """The means of a way; without a hook and unless `full`, a ballast leaves the capacity of the card."""
    pairs_plan = PairsPlan(plan.command, plan.simulate, plan.seconds, 0.0, plan.deadline)
    with sharing(way, pairs_plan) as programs, ExitStack() as stack:
        there = Place(plan, way, programs)
        if way.coordinator is None and not full:
            ballast = there.start("ballast")
            stack.callback(ballast.close)
            ballast.answer(READY_S)
        yield there


def alone(plan: Plan) -> dict[str, dict[str, Any]]:
    """Rates of each program by itself on the whole card: `count` a second of units, and the time to the first part."""
    found = {}
    with place(plan, Way("alone"), full=True) as there, ExitStack() as stack:
        members = {name: there.start(name) for name in NAMES}
        for member in members.values():
            stack.callback(member.close)
        about = {name: member.answer(READY_S) for name, member in members.items()}
        for name, member in members.items():
            begin, count = time.monotonic(), 0
            firsts: list[float] = []
            until = begin + min(4.0, plan.seconds / 4)
            if name == "training":  # as in the day, without a request for each step
                count = member.ask(f"steps {until:.6f}", READY_S)["count"]
            while time.monotonic() < until or not firsts:
                asked = time.monotonic()
                told = member.ask(f"unit {count}", READY_S)
                count += 1 if name != "server" else told["count"]
                firsts.append(told["first"] - asked)
            found[name] = {"rate": count / (time.monotonic() - begin), "first_s": min(firsts), **about[name]}
            found[name].pop("ready")
            plan.tell(f"alone {name}: {found[name]}")
    return found


def day(there: Place) -> tuple[dict[str, Record], float, int | None]:
    """The records, when the window began, and the bytes that were moved since."""
    records = {name: Record() for name in NAMES}
    if there.way.name == "reload":
        begin = time.monotonic()
        _broker(there, begin, records)
        return records, begin, None
    with ExitStack() as stack:
        members: dict[str, Member] = {}
        for name in NAMES:
            members[name] = there.start(name)
            stack.callback(members[name].close)
            if there.way.coordinator is None:  # whoever comes later finds less memory
                _ready(members[name], records[name])
        for name, member in members.items():
            if not records[name].about and not records[name].failed:
                _ready(member, records[name])
        for name in GAPS_S:
            if records[name].failed:
                whole_s = there.plan.seconds + there.plan.drain_s
                records[name].missed = [whole_s - moment for moment in there.plan.arrivals(name)]
        check_clients(there.programs)
        for name, member in members.items():  # the first eviction of each makes its pinned host memory
            if not there.plan.cold and not records[name].failed:
                _ready(member, records[name], "unit 0")
        before, begin = there.moved_bytes(), time.monotonic()
        threads = [
            threading.Thread(target=_drive, args=(there.plan, name, member, begin, records[name]))
            for name, member in members.items()
            if not records[name].failed
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = there.moved_bytes()
    return records, begin, None if after is None or before is None else after - before


def _ready(member: Member, record: Record, first: str = "") -> None:
    """Waits for its start, or until its first work is done."""
    try:
        told = member.ask(first, READY_S) if first else member.answer(READY_S)
        record.about = record.about or told
    except BenchError as error:
        record.failed = str(error)


def _drive(plan: Plan, name: str, member: Member, begin: float, record: Record) -> None:
    """Hands a program its work."""
    end = begin + plan.seconds
    limit = end + plan.drain_s
    work = [begin + moment for moment in plan.arrivals(name)] if name in GAPS_S else []
    try:
        if name == "training":
            _train(member, begin, end, limit, record)
        for number, arrival in enumerate(work):
            time.sleep(max(0.0, arrival - time.monotonic()))
            record.done.append((arrival, member.ask(f"unit {number}", max(0.1, limit - time.monotonic()))))
    except BenchError as error:
        if time.monotonic() < limit:
            record.failed = str(error)
    record.missed += [limit - arrival for arrival in work[len(record.done) :]]


def _train(member: Member, since: float, until: float, limit: float, record: Record) -> None:
    told = member.ask(f"steps {until:.6f}", max(0.1, limit - time.monotonic()))
    record.steps += told["count"]
    record.stepped_s += told["end"] - since


def _broker(there: Place, begin: float, records: dict[str, Record]) -> None:
    """At most one program at a time: the resident one as long as it has work, then the one that has waited longest."""
    plan, end = there.plan, begin + there.plan.seconds
    limit = end + plan.drain_s
    waiting = {name: list(enumerate(begin + moment for moment in plan.arrivals(name))) for name in GAPS_S}
    resident, member = "", None
    try:
        while (now := time.monotonic()) < limit and (now < end or any(waiting.values())):
            due = {name: work[0][1] for name, work in waiting.items() if work and work[0][1] <= now}
            name = resident if resident in due else min(due, key=lambda one: due[one], default="training")
            if name == "training" and now >= end:
                time.sleep(0.01)
                continue
            if name != resident or member is None:
                if member is not None:
                    member.close()
                resident, member = name, there.start(name)
                records[name].about = member.answer(READY_S)
                continue  # others may have come meanwhile, and the training need not begin
            if name == "training":
                coming = min((work[0][1] for work in waiting.values() if work), default=end)
                _train(member, now, max(now, min(coming, now + CHUNK_S, end)), limit, records[name])
            else:
                number, arrival = waiting[name].pop(0)
                records[name].done.append((arrival, member.ask(f"unit {number}", READY_S)))
    except BenchError as error:
        records[resident].failed = str(error)
    finally:
        if member is not None:
            member.kill()
    for name, work in waiting.items():
        records[name].missed += [limit - arrival for _, arrival in work]
