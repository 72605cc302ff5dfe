"""What a claim promises."""

from __future__ import annotations

from typing import Any

import pytest

from nvshare.coordinator.kubernetes.dra.claims import ClaimError, pod, shares
from tests.kubernetes.dra.claim_shapes import claim, parameters, result

INTERACTIVE: dict[str, Any] = {"class": "interactive"}
BATCH: dict[str, Any] = {"class": "batch", "weight": 2}


def test_consumed_capacity_becomes_limit_and_request() -> None:
    """A share would hold another size than the scheduler has counted."""
    (share,) = shares(claim(result("gpu-a", memory="5120Mi", compute="30")))
    assert (share.memory_bytes, share.words) == (5 << 30, {"share_request": "0.3"})


def test_devices_of_a_request_share_one_slot_and_other_drivers_are_left_alone() -> None:
    """A container of two cards would reach one of them, or claims of other drivers would fail."""
    other = {**result("nic"), "driver": "net.example.com"}
    (share,) = shares(claim(result("gpu-a"), result("gpu-b", share="b2"), other))
    assert [device.name for device in share.devices] == ["gpu-a", "gpu-b"]


def test_parameters_of_the_claim_follow_those_of_its_class() -> None:
    """A class would override the claim, or a request would have the parameters of another."""
    config = (
        parameters((), **BATCH),
        parameters(("main",), **INTERACTIVE, memoryMode="swap", parkAfter="10m"),
        parameters(("other",), gang="g"),
    )
    (share,) = shares(claim(result("gpu-a", request="main/small", compute="0"), config=config))
    assert share.words == {"class": "interactive", "weight": "2", "memory": "swap", "park_after": "10m"}


def test_only_a_claim_of_one_pod_names_it() -> None:
    """A slot that pods share would be shown as the first one's."""
    assert pod(claim(result("gpu-a"), pods=("one",), owner="one")) == "one"
    assert pod(claim(result("gpu-a"), pods=("one",))) == ""
    assert pod(claim(result("gpu-a"), owner="one")) == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"weihgt": 2}, "parameters.weihgt: there is no such parameter; known are class, weight"),
        ({"weight": 0}, "parameters.weight: '0' is not allowed"),
        ({"weight": True}, "parameters.weight: write a text or a whole number"),
        ({"kind": "Shares"}, "kind: Share"),
        ({"parkAfter": "soon"}, "parameters.parkAfter: 'soon' is not allowed"),
    ],
)
def test_a_mistake_in_parameters_names_its_field(given: dict[str, Any], text: str) -> None:
    """A pod would run with other settings than its author wrote."""
    with pytest.raises(ClaimError, match=text):
        shares(claim(result("gpu-a"), config=(parameters(**given),)))


@pytest.mark.parametrize("memory", ["0", "-1", "lots", "2Ei", "1e30"])
def test_an_impossible_size_is_refused(memory: str) -> None:
    """A slot without a limit would be made of it."""
    with pytest.raises(ClaimError, match="memory"):
        shares(claim(result("gpu-a", memory=memory)))


def test_an_api_server_without_the_gate_is_named() -> None:
    """Claims would run without a limit."""
    whole = result("gpu-a")
    del whole["consumedCapacity"]
    with pytest.raises(ClaimError, match="DRAConsumableCapacity"):
        shares(claim(whole))


@pytest.mark.parametrize("broken", [{}, {"status": {}}, {"status": {"allocation": {"devices": {"results": [1]}}}}])
def test_a_claim_of_another_shape_is_refused(broken: Any) -> None:
    """The driver would fail with an internal error."""
    with pytest.raises(ClaimError):
        shares(broken)
