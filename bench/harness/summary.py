"""The figures of a hardware run as a short table: `python bench/harness/summary.py DIRECTORY` (written by hardware.sh).

Non-goals: measuring.  A file that is missing or no JSON is said to be so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def demo(told: dict[str, Any]) -> list[str]:
    """Overlaps, hand-overs."""
    return [f"violations {told['violations']}, hand-overs {told['handovers']}, {told['handover_us']}"]


def gate(told: dict[str, Any]) -> list[str]:
    """Nanoseconds and instructions."""
    launch = told["details"]["empty_kernel"]
    return [
        f"{told['details']['gate']['call']}: {told['baseline_ns']} ns, hooked {told['hooked_ns']} ns, "
        f"added {told['added_ns']} ns, {told['added_instructions']} instructions",
        f"empty kernel: {launch['baseline']['median']:.0f} ns, hooked {launch['hooked']['median']:.0f} ns",
        f"control: {told['details']['ungated_control']['added']['median']:.2f} ns",
    ]


def handover(told: dict[str, Any]) -> list[str]:
    """Percentiles."""
    return [f"{told['handover_us']} us over {told['handovers']} hand-overs; {told['details']['drain_us']} us drains"]


def gangs(told: dict[str, Any]) -> list[str]:
    """Steps of the ranks, and what their rivals have."""
    rates = ", ".join(f"{case} {told[case]['steps_per_s']['median']}" for case in ("apart", "gang"))
    return [
        f"ranks over {told['exchange']}: alone {told['alone']['steps_per_s']} steps/s, {rates}",
        f"rivals beside the gang: {told['rivals_over_half']} of half of their steps alone",
    ]


def pairs(told: dict[str, Any]) -> list[str]:
    """Geometric means over the mixes, and the worst ratio."""
    lines = [f"{way}: {json.dumps(means)}" for way, means in told["geometric_means"].items()]
    ratios = [
        (case["ratio"], way, mix)
        for mix, ways in told["pairs"].items()
        for way, case in ways.items()
        if "ratio" in case
    ]
    return [*lines, *([f"worst ratio: {min(ratios)}"] if ratios else [])]


FILES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "demo.json": demo,
    "gate.json": gate,
    "handover.json": handover,
    "handover3.json": handover,
    "turns.json": pairs,
    "gangs.json": gangs,
    "pairs.json": pairs,
}
WHERE_POSSIBLE = ("gangs.json", "pairs.json")
"""Not measured on every machine."""


def main() -> int:
    """Command line."""
    directory = Path(sys.argv[1])
    print("| file | figures |\n|---|---|")
    for name, lines in FILES.items():
        if name in WHERE_POSSIBLE and not (directory / name).exists():
            continue
        try:
            found = lines(json.loads((directory / name).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = [f"nothing ({type(error).__name__}: {error})"]
        print(f"| {name} | {'<br>'.join(found)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
