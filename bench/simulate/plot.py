"""A picture of the figures of each policy; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

_PANELS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("mean completion time, s", ("jct_s", "mean")),
    ("95th percentile, s", ("jct_s", "p95")),
    ("finish-time fairness rho, p95", ("rho", "p95")),
    ("Jain's index between users", ("jain_users",)),
    ("utilisation", ("utilisation",)),
)


def draw(result: Mapping[str, Any], out: Path) -> None:
    """A panel of bars for each figure, a bar for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["policies"])
    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(3.0 * len(_PANELS), 0.6 + 0.4 * len(names)), sharey=True)
    for axes, (title, keys) in zip(panels, _PANELS, strict=True):
        axes.barh(names, [reduce(getitem, keys, result["policies"][name]) for name in names], color="#2166ac")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(f"simulated: {result['jobs']} jobs on {result['gpus']} GPUs", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
