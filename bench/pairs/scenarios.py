"""Questions about classes and shares: `--scenario class|limits`.

Each gives the rates alone, the cases by mix and way as in the other mixes, and its own figures in `found`.

Non-goals: judging the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nvshare.bench.pairs.figures import limit_errors
from nvshare.bench.pairs.mixes import WAYS, Job, Mix, Way
from nvshare.bench.pairs.programs import Plan, measure_all

INTERACTIVE = (("NVSHARE_CLASS", "interactive"),)
BEST_EFFORT = (("NVSHARE_CLASS", "best-effort"),)
LIMITS = (0.3, 0.7)

Cases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One question."""

    mixes: tuple[Mix, ...]
    ways: tuple[Way, ...]
    seconds: float
    found: Callable[[str, Cases, Mapping[str, Any]], dict[str, Any]]
    """The figures of one mix, by way, from its name, its cases and the rates alone."""


def beside_best_effort(name: str, cases: Cases, alone: Mapping[str, Any]) -> dict[str, Any]:
    """A server beside a best-effort job: its tail, and what the job keeps."""
    native = cases.get("native", {}).get("latency_ms")
    found = {}
    for way, case in measured(cases):
        found[way] = {
            "p99_over_alone": case.get("p99_over_alone"),
            "server_np": case["np"][0],
            "harvest": case["np"][1],
        }
        if native and case.get("latency_ms"):
            found[way]["p99_over_native"] = round(case["latency_ms"]["p99"] / native["p99"], 3)
    return found


def limited(name: str, cases: Cases, alone: Mapping[str, Any]) -> dict[str, Any]:
    """Two saturating jobs with limits."""
    return {way: limit_errors(case["np"], LIMITS) for way, case in measured(cases)}


def measured(cases: Cases) -> list[tuple[str, Mapping[str, Any]]]:
    """Cases that did not fail."""
    return [(way, case) for way, case in cases.items() if "np" in case]


def _mix(*jobs: Job) -> Mix:
    return Mix("+".join(job.workload for job in jobs), jobs)


def _policy(name: str, *options: str) -> Way:
    return replace(WAYS["default"], name=name, coordinator=options, others=())


SCENARIOS = {
    "class": Scenario(
        tuple(
            _mix(Job("server", INTERACTIVE), Job(name, BEST_EFFORT))
            for name in ("products", "elementwise", "long", "wide")
        ),
        tuple(WAYS.values()), 6.0, beside_best_effort,
    ),
    "limits": Scenario(
        tuple(
            _mix(*(Job(name, (("NVSHARE_SHARE_LIMIT", str(limit)),)) for limit in LIMITS))
            for name in ("products", "graphed", "long", "graphed_long", "wide", "graphed_wide")
        ),
        (WAYS["native"], WAYS["default"], _policy("fair_share", "--policy=fair_share")), 10.0, limited,
    ),
}  # fmt: skip


def measure_scenario(name: str, ways: Sequence[str], pairs: Sequence[str], plan: Plan) -> dict[str, Any]:
    """One scenario; `ways` and `pairs` leave others out."""
    scenario = SCENARIOS[name]
    mixes = [mix for mix in scenario.mixes if not pairs or mix.name in pairs]
    result = measure_all(mixes, [way for way in scenario.ways if not ways or way.name in ways], plan)
    found = {}
    for mix in mixes:
        if all(result["alone"][job.workload].get("rate") for job in mix.jobs):
            found[mix.name] = scenario.found(mix.name, result["pairs"][mix.name], result["alone"])
    result["found"] = found
    return result
