"""A picture of the figures of each policy; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nvshare.bench.pairs.plot import check_plots

_PANELS: Final = (
    ("mean completion time, s", lambda of: of["jct_s"]["mean"]),
    ("95th percentile, s", lambda of: of["jct_s"]["p95"]),
    ("finish-time fairness rho, p95", lambda of: of["rho"]["p95"]),
    ("Jain's index between users", lambda of: of["jain_users"]),
    ("utilisation", lambda of: of["utilisation"]),
)


def draw(result: Mapping[str, Any], out: Path) -> None:
    """A panel of bars for each figure, a bar for each policy."""
    check_plots()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["policies"])
    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(3.0 * len(_PANELS), 0.6 + 0.4 * len(names)), sharey=True)
    for axes, (title, value) in zip(panels, _PANELS, strict=True):
        axes.barh(names, [value(result["policies"][name]) for name in names], color="#2166ac")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(f"simulated: {result['jobs']} jobs on {result['gpus']} GPUs", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
