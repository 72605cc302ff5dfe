"""A picture of the day: a panel of bars for each figure, a bar for each way; needs the extra `plots`.

Non-goals: measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("first token, p99 (s, log)", lambda way: (way["ttft_s"] or {}).get("p99")),
    ("tokens/s", lambda way: way["tokens_per_s"]),
    ("images/min", lambda way: way["images_per_min"]),
    ("training, of alone", lambda way: way["training_share"]),
)


def draw(result: Mapping[str, Any], out: Path) -> None:
    """Ways with what went out of memory in their label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = {name: way for name, way in result["ways"].items() if "tokens_per_s" in way}
    labels = [name + "".join(f"\n{one}: out of memory" for one in way["oom"]) for name, way in ways.items()]
    size = (3.0 * len(PANELS), 0.8 + 0.55 * len(labels))
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=size, sharey=True)
    for axes, (title, value) in zip(panels, PANELS, strict=True):
        axes.barh(labels, [value(way) or 0.0 for way in ways.values()], color="#2166ac")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if any((way["ttft_s"] or {}).get("p99") for way in ways.values()):
        panels[0].set_xscale("log")
    panels[0].invert_yaxis()
    gib = result["capacity_mib"] / 1024
    figure.suptitle(f"{result['machine']['gpu']}, {gib:g} GiB of it, {result['demand_gib']} GiB wanted", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
