"""A node's ResourceSlice: its GPUs and MIG instances, each with memory and compute that claims share.  Pure.

Invariants: a device's name follows from its UUID, so it survives a renumbering.  Quantities are whole steps, and plain
bytes, which the API server stores as they are.

Non-goals: the API server.
"""

from __future__ import annotations

import re
from typing import Any, Final

from nvshare.coordinator.kubernetes.dra.claims import DRIVER
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.system.devices import Device

STEP_BYTES: Final = 256 << 20
UNHEALTHY: Final = f"{DRIVER}/unhealthy"


def device_name(uuid: str) -> str:
    """`gpu-...` or `mig-...`: at most 63 small letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", uuid.lower())[:63].strip("-")


def uuids(state: State) -> dict[str, str]:
    """GPU by device name."""
    return {device_name(device.uuid): device.uuid for device in state.devices}


def spec(node: str, state: State, slots_per_gpu: int = 1) -> dict[str, Any]:
    """A first slice's `spec`; unhealthy devices have a taint.  A claim without memory gets one of `slots_per_gpu`."""
    health = state.health()
    devices = [_device(each, slots_per_gpu, healthy=health[each.uuid]) for each in state.devices]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}


def _device(device: Device, slots_per_gpu: int, *, healthy: bool) -> dict[str, Any]:
    most = str(device.total_bytes // STEP_BYTES * STEP_BYTES)
    default = str(max(device.total_bytes // STEP_BYTES // slots_per_gpu, 1) * STEP_BYTES)
    steps = {"min": str(STEP_BYTES), "max": most, "step": str(STEP_BYTES)}
    percent = {"min": "0", "max": "100", "step": "1"}
    made: dict[str, Any] = {
        "name": device_name(device.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            "uuid": {"string": device.uuid},
            "productName": {"string": device.name[:64]},
            "mig": {"bool": device.is_mig},
        },
        "capacity": {
            "memory": {"value": most, "requestPolicy": {"default": default, "validRange": steps}},
            "compute": {"value": "100", "requestPolicy": {"default": "0", "validRange": percent}},
        },
    }
    if not healthy:
        made["taints"] = [{"key": UNHEALTHY, "effect": "NoSchedule"}]
    return made
