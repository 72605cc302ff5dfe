"""What a model of the scheduler gives out of our slices, and what the driver reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.dra import claims, slices
from nvshare.coordinator.kubernetes.dra.claims import ClaimError
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.system.devices import Device
from tests.kubernetes.dra.allocator import Allocator, quantity
from tests.kubernetes.dra.claim_shapes import claim, wanted
from tests.kubernetes.dra.test_slices import CARD

RECORDED = json.loads(Path(__file__).with_name("allocations.json").read_text(encoding="utf-8"))["scenarios"]
SIZES = st.one_of(
    st.integers(0, 90).map("{}Gi".format), st.integers(1, 90_000).map("{}Mi".format), st.integers(0, 1 << 37).map(str)
)
REQUESTS = st.fixed_dictionaries({}, optional={"memory": SIZES, "compute": st.integers(0, 110).map(str)})
DEVICES = st.lists(st.integers(256 << 20, 300 << 30), min_size=1, max_size=4).map(
    lambda sizes: tuple(Device(index, f"GPU-{index}", "card", size) for index, size in enumerate(sizes))
)


@given(DEVICES, st.integers(1, 64), st.lists(st.lists(REQUESTS, min_size=1, max_size=3), max_size=30))
def test_no_card_is_promised_twice(devices: tuple[Device, ...], parts: int, asked: list[list[dict[str, str]]]) -> None:
    """Limits of the pods of one card would be more than it has, or their guaranteed shares more than all its time."""
    allocator = Allocator(slices.spec("node-1", State(devices), parts))
    memory: dict[str, int] = {}
    percent: dict[str, float] = {}
    for number, requests in enumerate(asked):
        results = allocator.allocate(wanted(*requests))
        if results is None:
            continue
        for share in claims.shares(claim(*results, uid=f"u{number}")):
            wish = requests[int(share.request.removeprefix("gpu-"))]
            assert share.memory_bytes >= quantity(wish.get("memory", "0"))
            for device in share.devices:
                memory[device.name] = memory.get(device.name, 0) + share.memory_bytes
                percent[device.name] = percent.get(device.name, 0) + float(share.words.get("share_request", 0))
    for each in devices:
        name = slices.device_name(each.uuid)
        assert memory.get(name, 0) <= each.total_bytes
        assert percent.get(name, 0) <= 1 + 1e-9


def test_a_pod_without_a_claim_gets_one_part() -> None:
    """`nvshare.com/gpu: 1` would take a whole card, or more pods than parts one card."""
    allocator = Allocator(slices.spec("node-1", State((CARD,)), 4))
    given_out = [allocator.allocate(wanted({})) for _ in range(5)]
    assert [results is None for results in given_out] == [False] * 4 + [True]
    sizes = [share.memory_bytes for results in given_out[:4] for share in claims.shares(claim(*(results or [])))]
    assert sizes == [20 << 30] * 4


def test_what_was_recorded_is_what_is_published() -> None:
    """The recorded allocations would be of other slices than ours, and say nothing of them."""
    card = Device(0, "GPU-a", "NVIDIA H100", 80 << 30)
    (alone,) = (scenario for scenario in RECORDED if scenario["name"] == "alone")
    assert slices.spec("node-1", State((card,)), 4) == alone["spec"]


@pytest.mark.parametrize("scenario", RECORDED, ids=lambda scenario: scenario["name"])
def test_the_model_does_what_the_scheduler_did(scenario: Any) -> None:
    """The model would show what no cluster does: other cards, other sizes, a claim that is given or waits."""
    allocator = Allocator(scenario["spec"])
    given_out: dict[str, Any] = {}
    for step in scenario["claims"]:
        if "removed" in step:
            allocator.free(given_out[step["removed"]])
            continue
        given_out[step["name"]] = results = allocator.allocate(step["devices"])
        assert plain(results) == plain(step["results"]), step["name"]


def plain(results: list[Any] | None) -> Any:
    """Without what is drawn at random, or written in several forms."""
    return results and [
        (each["request"], each["device"], {name: quantity(text) for name, text in each["consumedCapacity"].items()})
        for each in results
    ]


@pytest.mark.parametrize("scenario", RECORDED, ids=lambda scenario: scenario["name"])
def test_shares_are_what_the_scheduler_counted(scenario: Any) -> None:
    """A slot would hold more or less than the scheduler has promised."""
    for step in scenario["claims"]:
        results = step.get("results") or []
        different = {str(each["consumedCapacity"]) for each in results if each["request"] == "gpu"}
        if len(different) > 1:
            with pytest.raises(ClaimError, match="name the memory"):
                claims.shares(claim(*results))
            continue
        found = [
            (share.request, device.name, share.memory_bytes, round(100 * float(share.words.get("share_request", 0))))
            for share in claims.shares(claim(*results))
            for device in share.devices
        ]
        assert found == [(*where, consumed["memory"], consumed["compute"]) for *where, consumed in plain(results) or []]
