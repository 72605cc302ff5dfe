"""The arithmetic of the day: figures of one way, and how ours compare with the bars.

Bars: the time to the first token is at most what the server's bytes take by the link and 0.3 s, and at most 1 s; a
reload takes at least 5 times as long; the training has 0.85 of what the others leave (by time, or its share in
proportion if that is more); images and tokens together are at least 1.3 times those under `reload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvshare.bench.day.ways import NAMES, Plan, Record
from nvshare.bench.harness.fixture import percentile

TTFT_MARGIN_S, TTFT_MOST_S, OVER_RELOAD, TRAINING_SHARE, WORK_OVER_RELOAD = 0.3, 1.0, 5.0, 0.85, 1.3


def describe(
    plan: Plan, records: Mapping[str, Record], begin: float, moved: int | None, alone: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The keys of one way."""
    end = begin + plan.seconds
    failed = {name: record.failed for name, record in records.items() if record.failed}
    inside = {name: [told for _, told in record.done if told["end"] <= end] for name, record in records.items()}
    server, training = records["server"], records["training"]
    waits = [told["first"] - arrival for arrival, told in server.done] + server.missed
    ends = {name: [told["end"] - arrival for arrival, told in records[name].done] for name in ("images", "notebook")}
    served = {"server": sum(told["count"] for told in inside["server"]) / plan.seconds}
    served |= {name: len(inside[name]) / plan.seconds for name in ("images", "notebook")}
    busy = {name: rate / alone[name]["rate"] for name, rate in served.items()}
    last = [told["end"] for record in records.values() for _, told in record.done]
    missed = sum(len(record.missed) for record in records.values())
    rate = training.steps / max(plan.seconds, training.stepped_s if training.stepped_s > plan.seconds else 0.0)
    return {
        "oom": [name for name, why in failed.items() if "memory" in why.lower()],
        "failed": failed,
        "ttft_s": _ranks(waits), "image_s": _ranks(ends["images"]), "cell_s": _ranks(ends["notebook"]),
        "requests": len(waits), "unserved": missed,
        "tokens_per_s": round(served["server"], 2), "images_per_min": round(60 * served["images"], 2),
        "cells": len(records["notebook"].done), "training_share": round(rate / alone["training"]["rate"], 4),
        "left_for_training": round(max(1 / len(NAMES), 1 - sum(busy.values())), 4),
        "work": round(busy["server"] + busy["images"], 4),
        "moved_gib": None if moved is None else round(moved / 2**30, 2),
        "makespan_s": None if missed or failed or not last else round(max(last) - begin, 2),
    }  # fmt: skip


def bars(ways: Mapping[str, Mapping[str, Any]], server_gib: float, link_gib_s: float) -> dict[str, dict[str, Any]]:
    """For each of our ways the figures, their bars, and whether they are reached."""
    found: dict[str, dict[str, Any]] = {}
    reload = ways.get("reload", {})
    for name, way in ways.items():
        if not name.startswith("nvshare") or "ttft_s" not in way:
            continue
        most = min(TTFT_MOST_S, server_gib / link_gib_s + TTFT_MARGIN_S)
        ttft = (way["ttft_s"] or {}).get("p99")
        judged = {"failures": _bar(len(way["failed"]) + way["unserved"], most=0)}
        judged["ttft_p99_s"] = _bar(ttft, most=most)
        judged["training_of_left"] = _bar(way["training_share"] / way["left_for_training"], least=TRAINING_SHARE)
        if reload.get("ttft_s"):
            judged["reload_ttft_over_ours"] = _bar(ttft and reload["ttft_s"]["p99"] / ttft, least=OVER_RELOAD)
            judged["work_over_reload"] = _bar(
                way["work"] / reload["work"] if reload["work"] else None, least=WORK_OVER_RELOAD
            )
        found[name] = judged
    return found


def _ranks(seconds: list[float]) -> dict[str, float] | None:
    return {f"p{rank}": round(percentile(seconds, rank / 100), 3) for rank in (50, 99)} if seconds else None


def _bar(value: float | None, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    reached = value is not None and (least is None or value >= least) and (most is None or value <= most)
    bar = {"least": least} if least is not None else {"most": round(most or 0.0, 3)}
    return {"value": None if value is None else round(value, 3), **bar, "reached": reached}
