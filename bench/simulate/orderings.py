"""Results that papers report of their policies, checked for ours in small mixes on one GPU, by seed.

Each question gives the figures on which the answer rests.  Nothing here is a figure of a card.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from nvshare.bench.simulate.figures import figures, jct_s
from nvshare.bench.simulate.jobs import GIB
from nvshare.bench.virtual_node.node import SHARED_REPORT_NS, Job, VirtualNode
from nvshare.coordinator.model.settings import SECOND_NS, Settings

CAPACITY: Final = 80 * GIB
HOUR_S: Final = 3600.0


def outcome(
    policy: str,
    jobs: Sequence[Job],
    *,
    quantum_s: float = 1.0,
    users_first: bool = True,
    report_ns: int = SHARED_REPORT_NS,
) -> VirtualNode:
    """A finished run on one GPU."""
    share_by = "user" if users_first else "program"
    settings = Settings(policy=policy, quantum_ns=round(quantum_s * SECOND_NS), share_by=share_by)
    world = VirtualNode(jobs, 1, CAPACITY, settings, shared_report_ns=report_ns)
    world.segments = []
    world.run()
    return world


def job(name: str, work_s: float, **more: Any) -> Job:
    """A saturating job of one GPU that arrives at `at_s`; other fields as in `Job`."""
    at_s = more.pop("at_s", 0.0)
    return Job(name, round(at_s * SECOND_NS), round(work_s * SECOND_NS), memory_bytes=GIB, **more)


def heavy_tailed(seed: int = 1) -> list[Job]:
    """Saturating jobs of seconds to an hour that keep the GPU busy for 0.8 of two hours."""
    chance, span_s = random.Random(seed), 2 * HOUR_S
    lengths = [min(HOUR_S, chance.lognormvariate(0.0, 2.0)) for _ in range(60)]
    factor = 0.8 * span_s / sum(lengths)
    return [job(f"j{n}", length * factor, at_s=chance.uniform(0, span_s)) for n, length in enumerate(lengths)]


def tiresias() -> dict[str, Any]:
    """Least attained service: a lower mean completion time than turns, or one after the other (Tiresias)."""
    jobs, mean = heavy_tailed(), {}
    for name, policy, quantum_s in (
        ("least_attained", "least_attained", 1.0),
        ("round_robin", "round_robin", 1.0),
        ("in_order", "round_robin", HOUR_S),
    ):
        mean[name] = figures(outcome(policy, jobs, quantum_s=quantum_s))["jct_s"]["mean"]
    return _found(mean["least_attained"] < min(mean["round_robin"], mean["in_order"]), mean_jct_s=mean)


def gandiva() -> dict[str, Any]:
    """Packing of light jobs: a shorter makespan and a better used GPU than exclusive turns (Gandiva)."""
    chance = random.Random(2)
    jobs = [job(f"j{n}", chance.uniform(100, 300), busy=chance.uniform(0.1, 0.4)) for n in range(16)]
    found = {name: figures(outcome(name, jobs)) for name in ("auto", "round_robin")}
    makespan = {name: of["makespan_s"] for name, of in found.items()}
    used = {name: of["utilisation"] for name, of in found.items()}
    holds = makespan["auto"] < makespan["round_robin"] and used["auto"] > used["round_robin"]
    return _found(holds, makespan_s=makespan, utilisation=used)


def themis() -> dict[str, Any]:
    """Fair shares: a user with one job is not outnumbered by a user with seven (Themis, Gandiva-fair)."""
    jobs = [*(job(f"many{n}", 100.0, user=1) for n in range(7)), job("one", 100.0, user=2)]
    worlds = {
        "fair_share": outcome("fair_share", jobs),
        "turns_of_programs": outcome("round_robin", jobs, users_first=False),
        "round_robin": outcome("round_robin", jobs),
    }
    index = {name: figures(world)["jain_users"] for name, world in worlds.items()}
    lone = {name: round(jct_s(world.tasks[-1]), 1) for name, world in worlds.items()}
    holds = index["fair_share"] > index["turns_of_programs"] and lone["fair_share"] < lone["turns_of_programs"]
    return _found(holds, jain_users=index, jct_of_one_s=lone)


def gandiva_fair() -> dict[str, Any]:
    """Fair shares by time, not by turns: a user whose turns are short gets as much as the others (Gandiva-fair)."""
    short = job("short", 300.0, user=1, burst_ns=2 * SECOND_NS, think_ns=SECOND_NS // 100)
    jobs = [short, *(job(f"long{user}", 900.0, user=user) for user in (2, 3))]
    found = {name: figures(outcome(name, jobs, quantum_s=10.0)) for name in ("fair_share", "round_robin")}
    index = {name: of["jain_users"] for name, of in found.items()}
    rho = {name: of["rho"]["most"] for name, of in found.items()}
    holds = index["fair_share"] > index["round_robin"] and rho["fair_share"] < rho["round_robin"]
    return _found(holds, jain_users=index, largest_rho=rho)


def deadlines() -> dict[str, Any]:
    """Earliest deadline first meets all deadlines of a feasible mix; turns do not (Liu, Layland)."""
    chance, jobs, at_s = random.Random(3), [], 0.0
    for n in range(60):
        length_s = chance.uniform(20, 200)
        at_s += length_s / 0.85
        deadline_ns = round(length_s * chance.uniform(1.5, 8.0) * SECOND_NS)
        jobs.append(job(f"j{n}", length_s, at_s=at_s, deadline_ns=deadline_ns))
    met = {name: figures(outcome(name, jobs))["deadlines"]["met"] for name in ("edf", "round_robin")}
    return _found(met["edf"] > met["round_robin"], deadlines_met_of_60=met)


def priorities() -> dict[str, Any]:
    """Jobs of the highest priority end sooner than in turns."""
    jobs = [replace(one, priority=10 if n % 5 == 0 else 0) for n, one in enumerate(heavy_tailed(4))]
    found = {name: figures(outcome(name, jobs)) for name in ("priority", "round_robin")}
    high = {name: of["highest_priority"]["mean"] for name, of in found.items()}
    return _found(high["priority"] < high["round_robin"], mean_jct_of_the_highest_s=high)


def _found(holds: bool, **of: Any) -> dict[str, Any]:
    return {"holds": holds, "figures": of}


ORDERINGS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "tiresias": tiresias,
    "gandiva": gandiva,
    "themis": themis,
    "gandiva_fair": gandiva_fair,
    "deadlines": deadlines,
    "priorities": priorities,
}


def run_orderings() -> dict[str, dict[str, Any]]:
    """All of them."""
    return {name: ask() for name, ask in ORDERINGS.items()}
