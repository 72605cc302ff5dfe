"""Mixes under ways of sharing: rates alone first, then each way with its own programs.

Non-goals: which mixes and ways there are (mixes.py), the arithmetic (figures.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from nvshare.bench.harness.fixture import BenchError, Fixture
from nvshare.bench.pairs.figures import compare, describe, rounded
from nvshare.bench.pairs.mixes import WAYS, Mix, Way, needed, without_variables
from nvshare.bench.pairs.programs import Plan, Programs, check_clients, sharing


def measure_all(mixes: Sequence[Mix], ways: Sequence[Way], plan: Plan) -> dict[str, Any]:
    """`alone` by workload, `ways` with what each said or why it was left out, `pairs` by mix and way."""
    result: dict[str, Any] = {"alone": {}, "ways": {}, "pairs": {one.name: {} for one in mixes}, "versions": {}}
    plain = without_variables(mixes)
    with sharing(WAYS["native"], plan) as programs:
        programs.start(needed(plain))
        result["alone"] = alone(programs, plain)
        result["versions"] = programs.versions
        if any(way.name == "native" for way in ways):
            result["ways"]["native"] = _run_way(programs, plain, result)
    for way in (way for way in ways if way.name != "native"):
        try:
            with sharing(way, plan) as programs:
                own = plain if way.coordinator is None else mixes
                programs.start(needed(own))
                check_clients(programs)
                result["ways"][way.name] = _run_way(programs, own, result)
        except (BenchError, subprocess.TimeoutExpired) as error:
            plan.tell(f"{way.name}: {error}")
            result["ways"][way.name] = {"skipped": str(error)}
    for cases in result["pairs"].values():
        compare(cases, ways)
    return result


def alone(programs: Programs, mixes: Sequence[Mix]) -> dict[str, dict[str, Any]]:
    """Each program by itself without the hook: the mean of a workload's programs, and what each had."""
    found: dict[str, dict[str, Any]] = {}
    for job, count in needed(mixes).items():
        try:
            answers = [programs.run_alone(job, number) for number in range(count)]
        except BenchError as error:
            programs.plan.tell(f"alone: {error}")
            found[job.workload] = {"failed": str(error)}
            continue
        rates = [float(answer["rate"]) for answer in answers]
        found[job.workload] = {"rate": mean(rates), "rates": [round(rate, 2) for rate in rates]}
        if "latency_ms" in answers[0]:
            found[job.workload]["latency_ms"] = rounded(answers[0]["latency_ms"])
        programs.plan.tell(f"alone {job.workload}: {found[job.workload]}")
    return found


def _run_way(programs: Programs, mixes: Sequence[Mix], result: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the figures of one way; its record."""
    name = programs.way.name
    hooked = programs.way.coordinator is not None
    explains = hooked and explain(programs.stand) is not None
    for one in mixes:
        case = _run_mix(programs, one, result["alone"], explains=explains)
        result["pairs"][one.name][name] = case
        programs.plan.tell(f"{name} {one.name}: {case}")
    return {"explains": explains} if hooked else {}


def _run_mix(
    programs: Programs, one: Mix, before: Mapping[str, Mapping[str, Any]], *, explains: bool
) -> dict[str, Any]:
    for job in one.jobs:
        if not before[job.workload].get("rate"):
            return {"failed": f"{job.workload} alone: {before[job.workload].get('failed', 'no step')}"}
    if time.monotonic() > programs.plan.deadline:
        return {"failed": "no time left"}
    try:
        answers, said = programs.run(one, (lambda: explain(programs.stand)) if explains else None)
    except (BenchError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    case = describe(one, answers, before)
    return case | ({"explain": said} if said is not None else {})


def explain(stand: Fixture) -> Any:
    """Output of `nvshare-ctl explain`; None where there is no such command."""
    try:
        return stand.control("explain")
    except (BenchError, subprocess.TimeoutExpired):
        return None
