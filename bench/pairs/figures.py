"""The arithmetic of shared progress: normalised progress, its sums, and one way of sharing against the others.

Normalised progress (`np`) of a program is its rate in the mix over its rate alone without the hook in the same run.
`stp` is the sum over the mix, `ratio` the `stp` of a way over the best `stp` of the ways that it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvshare.bench.pairs.mixes import MODELS, WAYS, Mix, Way

DIGITS = 4


def progress(rates: Sequence[float], alone: Sequence[float]) -> dict[str, Any]:
    """`np` of each program, `stp` and `min_np`."""
    shares = [rate / one for rate, one in zip(rates, alone, strict=True)]
    return {
        "np": [round(share, DIGITS) for share in shares],
        "stp": round(sum(shares), DIGITS),
        "min_np": round(min(shares), DIGITS),
    }


def describe(mix: Mix, answers: Sequence[Mapping[str, Any]], alone: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one mix under one way, from what its programs answered.

    A server that catches up with requests from before the window has no more progress than alone.
    """
    before = [float(alone[job.workload]["rate"]) for job in mix.jobs]
    rates = [float(answer["rate"]) for answer in answers]
    counted = [
        min(rate, one) if job.workload == "server" else rate
        for job, rate, one in zip(mix.jobs, rates, before, strict=True)
    ]
    found = progress(counted, before)
    found["rates"] = [round(rate, 2) for rate in rates]
    for job, answer in zip(mix.jobs, answers, strict=True):
        if job.workload == "server":
            found["latency_ms"] = rounded(answer.get("latency_ms"))
            quiet = alone["server"].get("latency_ms")
            if found["latency_ms"] and quiet:
                found["p99_over_alone"] = round(found["latency_ms"]["p99"] / quiet["p99"], 3)
            break
    return found


def rounded(latency_ms: Mapping[str, float] | None) -> dict[str, float] | None:
    """Microseconds are enough; None: no request was answered."""
    return None if latency_ms is None else {name: round(value, 3) for name, value in latency_ms.items()}


def compare(cases: dict[str, dict[str, Any]], ways: Iterable[Way]) -> None:
    """Adds `best_of_others`, `best_way`, `ratio` and, with a server, `p99_ratio` to the cases of one mix, by way."""
    for way in ways:
        case = cases.get(way.name, {})
        measured = [other for other in way.others if "stp" in cases.get(other, {})]
        if "stp" not in case or not measured:
            continue
        best = max(measured, key=lambda other: float(cases[other]["stp"]))
        case["best_way"], case["best_of_others"] = best, cases[best]["stp"]
        case["ratio"] = round(case["stp"] / cases[best]["stp"], DIGITS)
        theirs = cases[best].get("latency_ms")
        if case.get("latency_ms") and theirs:
            case["p99_ratio"] = round(case["latency_ms"]["p99"] / theirs["p99"], 3)


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logarithms = [math.log(value) for value in values]
    return round(math.exp(sum(logarithms) / len(logarithms)), DIGITS) if logarithms else None


def geometric_means(pairs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Over all mixes, by way: of `stp`, of `ratio`, and of the `stp` over the card's own slicing, of mixes of
    trainings and decoders alone too."""
    found: dict[str, dict[str, float | None]] = {}
    for name in WAYS:
        cases = {mix: ways[name] for mix, ways in pairs.items() if "stp" in ways.get(name, {})}
        if not cases:
            continue
        over_native = {
            mix: case["stp"] / pairs[mix]["native"]["stp"]
            for mix, case in cases.items()
            if "stp" in pairs[mix].get("native", {})
        }
        found[name] = {
            "stp": geometric_mean(case["stp"] for case in cases.values()),
            "ratio": geometric_mean(case["ratio"] for case in cases.values() if "ratio" in case),
            "over_native": geometric_mean(over_native.values()),
            "over_native_models": geometric_mean(
                ratio for mix, ratio in over_native.items() if MODELS.issuperset(mix.split("+"))
            ),
        }
    return found


def limit_errors(shares: Sequence[float], due: Sequence[float]) -> dict[str, Any]:
    """Deviation of normalised progress from the due shares, in points of the GPU's time, and the lost time."""
    total = sum(shares)
    return {
        "share_points": [round(100 * share / total, 2) for share in shares],
        "share_error_points": round(
            max(abs(100 * share / total - 100 * d) for share, d in zip(shares, due, strict=True)), 2
        ),
        "over_limit_points": round(max(100 * (share - d) for share, d in zip(shares, due, strict=True)), 2),
        "loss": round(1 - total / sum(due), DIGITS),
    }
