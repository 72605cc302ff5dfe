"""How hundreds of nodes behave, computed from the rendered chart and from what the exporters really export.

`python -m tests.chart.scale` prints the tables of docs/reference/kubernetes-tested.md; test_scale.py compares them.

Invariants: nothing is measured here and no cluster is asked; what is assumed stands below as a
constant with its reason.

Non-goals: what is recommended because of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.api import WATCH_S
from tests.chart import exporter
from tests.chart.conftest import Rendered, render

NODES: Final = (10, 100, 500, 1000)
SHAPES: Final = ((1, 4), (8, 4), (8, 10))
"""GPUs of a node, slots of a GPU."""
SCRAPE_S: Final = 30
"""The chart's interval."""
GAP_S: Final = (15.0, 45.0)
"""Assumed: from a coordinator's end to the next one's readiness, with an image pull of 10 to 40 s and the rest as the
tests of the node's pod see it."""
POD_WRITES: Final = 9
"""Assumed for one pod that is replaced: delete, create, bind, and six patches of status by the kubelet."""
NODE_WRITES: Final = 2
"""Assumed: the extended resource goes to 0 when the plugin leaves, and comes back."""


def series() -> Iterator[tuple[str, int, int, int, int]]:
    """Shape; series of its coordinator and plugin; kilobytes a scrape; samples a second of 100 such nodes."""
    plugin = exporter.scrape_plugin()
    for gpus, slots in SHAPES:
        text = exporter.scrape(gpus, slots)
        total = exporter.count(text) + exporter.count(plugin)
        size = len(text) + len(plugin)
        name = f"{gpus} GPU{'s' if gpus > 1 else ''}, {slots} slots each"
        yield name, exporter.count(text), exporter.count(plugin), round(size / 1024), round(total * 100 / SCRAPE_S)


def _pod(rendered: Rendered) -> dict[str, Any]:
    return dict(rendered.one("DaemonSet")["spec"]["template"]["spec"])


def watches(*, annotations: bool) -> tuple[int, int]:
    """Long-lived watches of one node: the kubelet's for what the pod mounts, and our own."""
    rendered = render({"podAnnotations": {"watch": annotations}})
    pod = _pod(rendered)
    kubelets = sum("configMap" in volume or "secret" in volume for volume in pod["volumes"])
    if pod["automountServiceAccountToken"]:
        kubelets += 1  # the cluster's CA is a ConfigMap in the projected token volume
    ours = sum("--watch-pods" in container["args"] for container in pod["containers"])
    return kubelets, ours


def writes() -> int:
    """Writes to the API server for one node's upgrade: pod, node, and three events a container and one for its end."""
    pod = _pod(render())
    started = len(pod["initContainers"]) + len(pod["containers"])
    events = 3 * started + len(pod["containers"]) + 3  # and: scheduled, created by, deleted by the DaemonSet
    return POD_WRITES + NODE_WRITES + events


def upgrade(nodes: int, unavailable: int) -> tuple[float, float]:
    """A rolling update with the mean gap: minutes, writes a second."""
    total_s = math.ceil(nodes / unavailable) * sum(GAP_S) / 2
    return total_s / 60, nodes * writes() / total_s


def tables() -> str:
    """Markdown, as docs/reference/kubernetes-tested.md has it."""
    lines = [
        "| node | series of its coordinator | of its device plugin | KiB a scrape | samples a second, 100 nodes |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {own} | {plugin} | {kib} | {rate} |" for name, own, plugin, kib, rate in series()]
    plain, watching = watches(annotations=False), watches(annotations=True)
    lines += [
        "",
        "| nodes | watches by kubelets | by us | with `podAnnotations.watch`: kubelets | us | requests a second |",
        "|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        rate = nodes * watching[1] / (1.5 * WATCH_S)  # ended after once to twice that
        counts = [nodes * each for each in (*plain, *watching)]
        lines.append(f"| {nodes} | {' | '.join(map(str, counts))} | {rate:.2f} |")
    lines += [
        "",
        "| nodes | `maxUnavailable` | upgrade takes | API writes a second | nodes without coordinator, at most |",
        "|---|---|---|---|---|",
    ]
    for nodes in NODES:
        for text, unavailable in (("1", 1), ("10%", math.ceil(nodes / 10))):
            minutes, rate = upgrade(nodes, unavailable)
            lines.append(f"| {nodes} | {text} | {minutes:.0f} min | {rate:.1f} | {unavailable} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
