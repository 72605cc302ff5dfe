"""The numbers about large clusters in docs/reference/kubernetes-tested.md are those of the chart and of the exporters.

Non-goals: how they are computed (scale.py).
"""

from __future__ import annotations

from nvshare.coordinator.units import parse_duration
from tests.chart import exporter, scale
from tests.chart.conftest import render
from tests.conftest import ROOT


def test_the_document_has_these_numbers() -> None:
    """A platform team sizes its Prometheus by them; print them anew with `python -m tests.chart.scale`."""
    text = (ROOT / "docs" / "reference" / "kubernetes-tested.md").read_text(encoding="utf-8")
    assert scale.tables() in text
    assert scale.watches(annotations=False)[1] == 0, "what is not asked for costs the API server nothing"


def test_series_grow_with_slots_and_gpus_only() -> None:
    """A label without a bound (a pod's name that stays after the pod, a user's text) would grow with time."""

    def cost(gpus: int, slots: int) -> int:
        return exporter.count(exporter.scrape(gpus, slots))

    per_slot = cost(1, 3) - cost(1, 2)
    per_gpu = cost(2, 2) - cost(1, 2)
    assert cost(1, 10) == cost(1, 2) + 8 * per_slot
    assert cost(8, 10) == cost(1, 2) + 7 * per_gpu + 8 * 8 * per_slot
    assert per_slot < 60


def test_an_upgrade_is_shorter_than_the_patience_of_jobs() -> None:
    """Jobs that give up waiting for the coordinator while it is only replaced would collide on the GPU."""
    for container in render().one("DaemonSet")["spec"]["template"]["spec"]["containers"]:
        for argument in container["args"]:
            if argument.startswith("--loss-timeout="):
                assert parse_duration(argument.partition("=")[2]) > 2 * scale.GAP_S[1] * 1_000_000_000
                return
    raise AssertionError("the chart says no time-out")
