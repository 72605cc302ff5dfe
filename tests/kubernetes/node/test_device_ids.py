"""Devices, messages and options of the device plugin: pure parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.cluster.options import Containers, OptionError, Options, socket_name
from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.slots import device_ids
from nvshare.coordinator.kubernetes.slots.device_ids import RequestError, SlotId

A, B, C = (f"GPU-{letter * 8}-0000-4000-8000-000000000000" for letter in "abc")
MIG = "MIG-11111111-2222-3333-4444-555555555555"


def options(plugin_dir: Path = Path("/n"), **changes: Any) -> Options:
    """Valid ones, changed."""
    return Options(Containers(Path("/n"), Path("/n"), **changes), plugin_dir, Path("/n"), Path("/n"))


def test_ids_fit_the_kubelet_and_come_back() -> None:
    """Else the kubelet refuses the whole list, or an allocation is taken for another slot."""
    for uuid in (A, MIG):
        for device_id in device_ids.slot_ids([uuid], 1000):
            assert len(device_id) <= 63
            slot = device_ids.parse(device_id)
            assert slot is not None
            assert str(slot) == device_id
    for wrong in ("", "::1", A, f"{A}::", f"{A}::x", f"{A}::-1", f"{A}::²", f"{A}::{'9' * 5000}"):
        assert device_ids.parse(wrong) is None


def test_slots_of_one_gpu_are_refused_unless_allowed() -> None:
    """Else a container pays for slots that bring it nothing, and nobody tells it."""
    known = {A: True, B: False}
    both = [f"{A}::1", f"{A}::0"]
    with pytest.raises(RequestError, match=r"^field: 2 slots of the same GPU GPU-aaaaaaaa.*--allow-several-slots$"):
        device_ids.check_slots("field", both, known, allow_several=False)
    assert device_ids.check_slots("field", both, known, allow_several=True) == [SlotId(A, 0), SlotId(A, 1)]
    for ids, text in (([], "is empty"), ([f"{B}::0"], "not healthy"), ([f"{C}::0"], "no such GPU; it has")):
        with pytest.raises(RequestError, match=text):
            device_ids.check_slots("field", ids, known, allow_several=True)


free_slots = st.lists(
    st.builds(SlotId, st.sampled_from([A, B, C]), st.integers(0, 4)).map(str), unique=True, max_size=15
)


@given(free_slots, st.integers(0, 6), st.sampled_from(["spread", "pack"]), st.booleans(), st.data())
def test_advice_is_complete_and_avoids_a_gpu_twice(
    free: list[str], size: int, preference: Any, distinct: bool, data: st.DataObject
) -> None:
    """Else the kubelet chooses for itself, at random, and Allocate refuses what it chose."""
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=size)) if free else []
    chosen = device_ids.preferred(free, must, size, preference, distinct=distinct)
    assert len(chosen) == len(set(chosen)) == min(size, len(free))
    assert set(must) <= set(chosen) <= set(free)
    counts = Counter(device_id.partition("::")[0] for device_id in chosen)
    musts = Counter(device_id.partition("::")[0] for device_id in must)
    gpus = {device_id.partition("::")[0] for device_id in free}
    if distinct and size <= len(gpus) and max(musts.values(), default=0) <= 1:
        assert max(counts.values(), default=0) <= 1


def test_spread_takes_the_emptiest_and_pack_the_fullest() -> None:
    """Else the option does the opposite of its name."""
    free = [f"{A}::0", f"{B}::0", f"{B}::1", f"{B}::2", f"{C}::0", f"{C}::1"]
    assert device_ids.preferred(free, [], 1, "spread", distinct=True) == [f"{B}::0"]
    assert device_ids.preferred(free, [], 1, "pack", distinct=True) == [f"{A}::0"]
    assert device_ids.preferred(free, [f"{B}::1"], 2, "spread", distinct=True) == [f"{B}::1", f"{C}::0"]
    assert device_ids.preferred(free, [], 4, "pack", distinct=False) == [f"{A}::0", f"{C}::0", f"{C}::1", f"{B}::0"]


GOLDEN = [
    (
        m.RegisterRequest(
            version="v1beta1", endpoint="a.sock", resource_name="x/y",
            options=m.DevicePluginOptions(get_preferred_allocation_available=True),
        ),
        b"\x0a\x07v1beta1\x12\x06a.sock\x1a\x03x/y\x22\x02\x10\x01",
    ),
    (m.DevicePluginOptions(pre_start_required=True), b"\x08\x01"),
    (m.ListAndWatchResponse(devices=[m.Device(ID="d", health="Healthy")]), b"\x0a\x0c\x0a\x01d\x12\x07Healthy"),
    (m.AllocateRequest(container_requests=[{"devices_ids": ["a", "b"]}]), b"\x0a\x06\x0a\x01a\x0a\x01b"),
    (
        m.ContainerAllocateResponse(
            envs={"K": "V"},
            mounts=[m.Mount(container_path="/c", host_path="/h", read_only=True)],
            annotations={"k": "v"},
        ),
        b"\x0a\x06\x0a\x01K\x12\x01V\x12\x0a\x0a\x02/c\x12\x02/h\x18\x01\x22\x06\x0a\x01k\x12\x01v",
    ),
    (
        m.PreferredAllocationRequest(
            container_requests=[
                {"available_deviceIDs": ["a"], "must_include_deviceIDs": ["b"], "allocation_size": 2},
            ]
        ),
        b"\x0a\x08\x0a\x01a\x12\x01b\x18\x02",
    ),
    (
        m.PreferredAllocationResponse(container_responses=[m.ContainerPreferredAllocationResponse(deviceIDs=["a"])]),
        b"\x0a\x03\x0a\x01a",
    ),
    (
        m.ListPodResourcesResponse(
            pod_resources=[
                {
                    "name": "p", "namespace": "n",
                    "containers": [{"name": "c", "devices": [{"resource_name": "r", "device_ids": ["i"]}]}],
                }
            ]
        ),
        b"\x0a\x13\x0a\x01p\x12\x01n\x1a\x0b\x0a\x01c\x12\x06\x0a\x01r\x12\x01i",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "data"), GOLDEN, ids=lambda each: type(each).__name__)
def test_messages_are_the_kubelets(message: Any, data: bytes) -> None:
    """Else no kubelet understands the plugin: both ends of our own tests would share the mistake."""
    assert message.SerializeToString() == data
    assert type(message).FromString(data) == message


def test_unknown_fields_are_skipped() -> None:
    """Else a newer kubelet (topology, CDI devices, CPU ids) breaks the plugin."""
    newer = b"\x0a\x05\x0a\x01d\x12\x00" + b"\x1a\x04\x0a\x02\x08\x01" + b"\x50\x07"
    assert m.ListAndWatchResponse.FromString(newer).devices[0].ID == "d"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cdi_kind": "gpu"}, "--cdi-kind: 'gpu' is no kind; write VENDOR/CLASS"),
        ({"memory": "fast"}, "--memory: 'fast' is none of auto, swap, managed, device"),
        ({"plugin_dir": Path("/" + "d" * 100)}, "--plugin-dir: .* longer than a socket path"),
    ],
)
def test_options_that_cannot_be_name_themselves(changes: dict[str, Any], text: str) -> None:
    """Else the DaemonSet crashes and its values say nothing."""
    with pytest.raises(OptionError, match=text):
        options(**changes)
    assert socket_name(options().resource) == "nvshare.com_gpu.sock"
