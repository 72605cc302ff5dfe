"""A picture of the progress that each mix makes under each way; needs the extra `plots`.

Non-goals: measuring.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvshare.coordinator.cli.trace.plot import picture

COLOURS = ("#bdbdbd", "#92c5de", "#2166ac", "#fddbc7", "#b2182b", "#1b7837")


def draw(result: Mapping[str, Any], out: Path) -> None:
    """A group of bars for each mix, a bar for each way, divided by programs."""
    mixes = list(result["pairs"])
    ways = list(dict.fromkeys(way for cases in result["pairs"].values() for way, case in cases.items() if "np" in case))
    width = 0.8 / max(1, len(ways))
    with picture(out, 1.5 + 1.1 * len(mixes), 4.2) as axes:
        for number, way in enumerate(ways):
            colour = COLOURS[number % len(COLOURS)]
            axes.bar(0, 0, color=colour, label=way)
            for place, name in enumerate(mixes):
                left, bottom = place - 0.4 + (number + 0.5) * width, 0.0
                for share in result["pairs"][name].get(way, {}).get("np", ()):
                    axes.bar(left, share, width, bottom=bottom, color=colour, edgecolor="white", linewidth=0.6)
                    bottom += share
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(mixes)), [name.replace("+", " +\n") for name in mixes], fontsize=8)
        axes.set_ylabel("normalised progress, summed")
        axes.set_title(str(result["machine"]["gpu"]), fontsize=10, pad=26)
        axes.legend(fontsize=8, ncols=len(ways) or 1, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
