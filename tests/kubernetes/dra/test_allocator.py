"""What a model of the scheduler gives out of our slices, and what the driver reads from it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.dra import claims, slices
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.system.devices import Device
from tests.kubernetes.dra.allocator import Allocator, quantity
from tests.kubernetes.dra.claim_shapes import claim
from tests.kubernetes.dra.test_slices import CARD, PART

SIZES = st.one_of(
    st.integers(0, 90).map("{}Gi".format), st.integers(1, 90_000).map("{}Mi".format), st.integers(0, 1 << 37).map(str)
)
REQUESTS = st.fixed_dictionaries({}, optional={"memory": SIZES, "compute": st.integers(0, 110).map(str)})
DEVICES = st.lists(st.integers(256 << 20, 300 << 30), min_size=1, max_size=4).map(
    lambda sizes: tuple(Device(index, f"GPU-{index}", "card", size) for index, size in enumerate(sizes))
)


@given(DEVICES, st.integers(1, 64), st.lists(st.lists(REQUESTS, min_size=1, max_size=3), max_size=30))
def test_no_card_is_promised_twice(devices: tuple[Device, ...], parts: int, wanted: list[list[dict[str, str]]]) -> None:
    """Limits of the pods of one card would be more than it has, or their guaranteed shares more than all its time."""
    allocator = Allocator(slices.spec("node-1", State(devices), 1, parts))
    memory: dict[str, int] = {}
    percent: dict[str, float] = {}
    for number, requests in enumerate(wanted):
        results = allocator.allocate(*requests)
        if results is None:
            continue
        for share in claims.shares(claim(*results, uid=f"u{number}")):
            asked = requests[int(share.request.removeprefix("gpu-"))]
            assert share.memory_bytes >= quantity(asked.get("memory", "0"))
            for device in share.devices:
                memory[device.name] = memory.get(device.name, 0) + share.memory_bytes
                percent[device.name] = percent.get(device.name, 0) + float(share.words.get("share_request", 0))
    for each in devices:
        name = slices.device_name(each.uuid)
        assert memory.get(name, 0) <= each.total_bytes
        assert percent.get(name, 0) <= 1 + 1e-9


def test_a_pod_without_a_claim_gets_one_part() -> None:
    """`nvshare.com/gpu: 1` would take a whole card, or more pods than parts one card."""
    allocator = Allocator(slices.spec("node-1", State((CARD,)), 1, 4))
    given_out = [allocator.allocate({}) for _ in range(5)]
    assert [results is None for results in given_out] == [False] * 4 + [True]
    sizes = [share.memory_bytes for results in given_out[:4] for share in claims.shares(claim(*(results or [])))]
    assert sizes == [20 << 30] * 4


def test_what_the_scheduler_was_seen_to_do() -> None:
    """The model would differ from the scheduler of Kubernetes 1.36: rounding, several cards, one card for two."""

    def devices(results: list[Any] | None) -> list[str]:
        return [result["device"] for result in results or []]

    allocator = Allocator(slices.spec("node-1", State((CARD, PART)), 1))
    (result,) = allocator.allocate({"memory": "5000Mi", "compute": "30"}) or []
    assert result["consumedCapacity"] == {"memory": str(5120 << 20), "compute": "30"}
    assert len(set(devices(allocator.allocate({"memory": "1Gi"}, {"memory": "1Gi"})))) == 2
    assert len(set(devices(allocator.allocate({"memory": "1Gi"}, {"memory": "1Gi"}, same_device=True)))) == 1
    assert allocator.allocate({"memory": "81Gi"}) is None
    broken = Allocator(slices.spec("node-1", State((CARD,), ((CARD.uuid, "lost"),)), 1))
    assert broken.allocate({"memory": "1Gi"}) is None
