"""Seeded worlds with new seeds, on all cores: `python -m nvshare.bench.soak --minutes 60 --json`.

A world (virtual_node/world.py) has everything of a coordinator but its sockets.  Its seed says what happens in it
and also how it is made: GPUs, processes, memory, policy, and which troubles meet (`draw`).  Every invariant is checked
after each event, on the GPUs that it concerns.  A failure does not end the run: each is printed when it occurs, with
the command that runs its world again, and in the end the exit code is 1.

Non-goals: real processes (bench/chaos.py), real time.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nvshare.bench.harness.command import parser_for, run_benchmark
from nvshare.bench.virtual_node.nonsense import NONSENSE, with_nonsense
from nvshare.bench.virtual_node.world import Plan, World, core_settings
from nvshare.coordinator.engine.scheduler import OverdueAction
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Sharing
from nvshare.coordinator.protocol.messages import UNBOUNDED
from nvshare.scheduler_policies.registry import BUILT_IN, create

SHOWN_FAILURES = 20
T = TypeVar("T")


class _Chance(random.Random):
    def some(self, share: float, *values: T) -> T | int:
        """One of the values in this share of all cases, else 0."""
        return self.choice(values) if self.random() < share else 0


def draw_plan(chance: _Chance, *, peaceful: bool) -> Plan:
    """Draws the troubles of a world.  Peaceful: nothing but the coordinator can keep a process from
    working."""
    some = chance.some
    memory_bytes = some(0.7, 300, 600, 900, 1500)
    swap = chance.choice((0.0, 0.5, 0.8, 1.0, 1.0)) if memory_bytes else 0.0
    device = chance.choice((0.0, 0.0, 0.1, 0.3)) if memory_bytes else 0.0
    plan: dict[str, Any] = {
        "gpus": chance.choice((1, 1, 2, 2, 3, 4)),
        "processes": chance.randint(2, 10),
        "duration_ns": chance.choice((2, 4, 8)) * SECOND_NS,
        "memory_bytes": memory_bytes,
        "swap_share": swap,
        "device_share": min(1.0 - swap, device),
        "gangs": some(0.3, 1, 2, 4),
        "users": chance.choice((1, 1, 2, 4)),
        "profile_share": some(0.4, 0.3, 1.0),
    }
    if peaceful:
        return Plan(**{**plan, "memory_bytes": min(memory_bytes, 900), "swap_share": 1.0, "device_share": 0.0})
    crash_every_ns = some(0.4, 400 * MILLISECOND_NS, 2 * SECOND_NS)
    return Plan(
        **plan,
        hang_chance=some(0.3, 0.01, 0.1),
        death_chance=some(0.3, 0.01, 0.05),
        drop_chance=some(0.3, 0.01, 0.05),
        crash_every_ns=crash_every_ns,
        torn_journal=bool(crash_every_ns and some(0.7, 1)),
        damage_chance=some(0.3, 0.5) if crash_every_ns else 0.0,
        admin_every_ns=some(0.3, 50 * MILLISECOND_NS, 200 * MILLISECOND_NS),
        short_move_chance=some(0.2, 0.02, 0.1),
        pin_chance=some(0.2, 0.1, 0.4),
        old_share=some(0.5, 0.5),
        stop_chance=some(0.2, 0.02),
        hostiles=some(0.4, 1, 2, 3),
        slot_share=some(0.25, 0.3, 0.8),
        hidden_share=some(0.2, 0.3, 1.0),
        pids=some(0.3, 24),
    )


def _draw_sharing(chance: _Chance) -> Sharing:
    return chance.choices(list(Sharing), [0.4, 0.15, 0.45])[0]


def draw(seed: int) -> World:
    """The world of this seed."""
    chance = _Chance(seed)
    peaceful = chance.random() < 0.15
    plan = draw_plan(chance, peaceful=peaceful)
    policy = chance.choice(sorted(BUILT_IN if peaceful or chance.random() < 0.75 else NONSENSE))
    quantum_ns = chance.choice((None, None, 100 * MILLISECOND_NS, 20 * MILLISECOND_NS, 2 * MILLISECOND_NS))
    if peaceful:
        sharing = chance.choice((Sharing.EXCLUSIVE, Sharing.AUTO))
        settings = core_settings(policy=policy, quantum_ns=quantum_ns, sharing=sharing)
        return World(seed, plan, create, settings)
    settings = core_settings(
        policy=policy,
        quantum_ns=quantum_ns,
        sharing=_draw_sharing(chance),
        overdue_action=chance.choice(list(OverdueAction)),
        drain_deadline_ns=chance.choice((50 * MILLISECOND_NS, SECOND_NS)),
        # A model that pins also allocates without a lease, and then it has no share of the host's memory.
        host_budget_bytes=UNBOUNDED if plan.pin_chance else chance.choice((UNBOUNDED, 1_500, 4_000)),
        host_fair_times=chance.choice((0, 1, 8)),
    )
    plan = replace(plan, exit_ns=chance.some(0.3, 300 * MILLISECOND_NS, SECOND_NS))
    return World(seed, plan, with_nonsense(create, seed), settings)


def kinds(world: World) -> list[str]:
    """The category of a world in the summary."""
    plan = world.plan
    troubles = {
        "memory": plan.memory_bytes, "hostile": plan.hostiles, "restarts": plan.crash_every_ns,
        "torn journal": plan.torn_journal, "slots": plan.slot_share, "gangs": plan.gangs,
        "operator": plan.admin_every_ns, "slow ends": plan.exit_ns, "nonsense": world.settings.policy in NONSENSE,
        "profiles": plan.profile_share, "shared turns": world.settings.sharing is not Sharing.EXCLUSIVE,
        "work": world.bounds.checks_work, "waits": world.bounds.checks_waits,
    }  # fmt: skip
    return [name for name, there in troubles.items() if there]


@dataclass(slots=True)
class Report:
    """Summary of many worlds."""

    worlds: int = 0
    events: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The highest figure, and the seed of its world."""
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """One more world."""
        world = draw(seed)
        try:
            world.run()
        except Exception as error:
            cause = error.__cause__ or error
            message = f"{type(cause).__name__}: {cause}".partition("\n")[0][:300]
            self.failures.append(
                {"seed": seed, "command": f"python -m nvshare.bench.soak --replay {seed}", "message": message}
            )
        self.worlds += 1
        self.events += world.handled
        self.by_kind.update(kinds(world))
        for name, value in world.bounds.figures().items():
            if value > self.worst.get(name, (0, 0))[0]:
                self.worst[name] = (value, seed)

    def add(self, other: Report) -> None:
        """The worlds of another process."""
        self.worlds += other.worlds
        self.events += other.events
        self.by_kind.update(other.by_kind)
        self.failures += other.failures
        for name, found in other.worst.items():
            self.worst[name] = max(self.worst.get(name, (0.0, 0)), found)

    def plain(self, seconds: float) -> dict[str, Any]:
        """The report as values for JSON."""
        return {
            "worlds": self.worlds,
            "events": self.events,
            "seconds": round(seconds, 1),
            "by_kind": dict(sorted(self.by_kind.items())),
            "worst": {name: {"value": value, "seed": seed} for name, (value, seed) in sorted(self.worst.items())},
            "failures": self.failures[:SHOWN_FAILURES],
            "failed": len(self.failures),
        }


def _new_seeds() -> Iterator[int]:
    while True:
        yield int.from_bytes(os.urandom(6), "big")


def _work(ends_at: float) -> Report:
    """Runs worlds with new seeds in a child until `ends_at`."""
    logging.disable(logging.CRITICAL)
    gc.set_threshold(50_000)  # a world makes much garbage, little of it in cycles
    report = Report()
    for seed in _new_seeds():
        if time.monotonic() >= ends_at:
            break
        before = len(report.failures)
        report.run(seed)
        for failure in report.failures[before:SHOWN_FAILURES]:
            print(f"{failure['command']}\n    {failure['message']}", file=sys.stderr, flush=True)
    return report


def soak(minutes: float, processes: int) -> Report:
    """On so many cores."""
    ends_at, whole = time.monotonic() + minutes * 60, Report()
    with ProcessPoolExecutor(processes) as pool:
        for report in pool.map(_work, [ends_at] * processes):
            whole.add(report)
    return whole


def replay(seed: int, shown: int) -> dict[str, Any]:
    """One world, with the last events before its failure."""
    world = draw(seed)
    print(f"{world.plan}\n{world.settings}")
    try:
        world.run()
    except Exception:
        if world.scheduler is not None:
            print("\n".join(world.scheduler.event_log.describe(shown)))
        print(f"after {world.handled} events, {world.now_ns / SECOND_NS:.6f} s")
        raise
    print(f"clean: {world.handled} events, {world.checks.grants} grants, {world.crashes} restarts")
    return {"replayed": seed}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.replay is not None:
        return replay(options.replay, options.events)
    began = time.monotonic()
    report = soak(options.minutes, options.processes)
    return report.plain(time.monotonic() - began)


def _show(result: dict[str, Any]) -> None:
    if "worlds" in result:
        print("{worlds} worlds, {events} events in {seconds} s, {failed} failures".format(**result))


def main() -> int:
    """Command line."""
    parser = parser_for("soak", "seeded worlds with new seeds", simulate=False)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this world again and show its last events")
    parser.add_argument("--events", type=int, default=60, help="how many events a replay shows")
    return run_benchmark(parser, _measure, _show, lambda result: "failures" if result.get("failed") else "")


if __name__ == "__main__":
    sys.exit(main())
