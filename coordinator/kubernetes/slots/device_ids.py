"""Ids of the kubelet's devices: slots of GPUs, and units of GPU memory.  Pure.

A slot's id is `<UUID>::<number>`.  A memory unit's id is a number without a GPU: the kubelet chooses a container's
units without knowing its slot.

Invariants: ids have at most 63 characters and stay the same across restarts.  An error names the request's field.

Non-goals: gRPC, files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Preference = Literal["spread", "pack"]
MAX_ID: Final = 63
MAX_SLOTS_PER_GPU: Final = 1000
MAX_UNITS_PER_CONTAINER: Final = 32_768
"""Since Kubernetes 1.36 a pod's status lists each device in 47 bytes, and the kubelet may send 3 MiB: a pod with 67 000
units runs but stays Pending.  The bound is half of that, because a pod may have several containers."""
_MEMORY_NAME: Final = re.compile(r".*-(?P<count>[1-9][0-9]*)?(?P<unit>mib|gib)")


class RequestError(Exception):
    """The kubelet's request is invalid; the text names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class SlotId:
    """One slot of one GPU."""

    uuid: str
    number: int

    def __str__(self) -> str:
        return f"{self.uuid}::{self.number}"


def parse(device_id: str) -> SlotId | None:
    """The slot of a device id; None if it is no slot's id."""
    uuid, mark, number = device_id.rpartition("::")
    if not mark or not uuid or not number.isdecimal() or not number.isascii() or len(device_id) > MAX_ID:
        return None
    return SlotId(uuid, int(number))


def slot_ids(uuids: Iterable[str], slots_per_gpu: int) -> list[str]:
    """Ids of all slots, GPU by GPU."""
    return [str(SlotId(uuid, number)) for uuid in uuids for number in range(slots_per_gpu)]


def check_slots(
    field: str, device_ids: Sequence[str], known: Mapping[str, bool], *, allow_several: bool
) -> list[SlotId]:
    """The slots of one container, sorted.  `known`: GPU -> whether it is healthy.  Raises RequestError."""
    if not device_ids:
        raise RequestError(f"{field}: is empty; a container needs at least one slot")
    found: set[SlotId] = set()
    for device_id in device_ids:
        slot = parse(device_id)
        if slot is None:
            raise RequestError(f"{field}: {device_id!r:.80} is no slot; the format is <GPU's UUID>::<number>")
        if slot.uuid not in known:
            raise RequestError(f"{field}: {device_id}: this node has no such GPU; it has {', '.join(known) or 'none'}")
        if not known[slot.uuid]:
            raise RequestError(f"{field}: {device_id}: this GPU is not healthy; see the device plugin's log")
        if slot in found:
            raise RequestError(f"{field}: {device_id} is named twice")
        found.add(slot)
    counts = Counter(slot.uuid for slot in found)
    uuid, most = counts.most_common(1)[0]
    if most > 1 and not allow_several:
        raise RequestError(
            f"{field}: {most} slots of the same GPU {uuid} give a container no more than one does; request one slot "
            "for each GPU that it needs (at most the node's GPUs), or start nvshare-device-plugin with "
            "--allow-several-slots"
        )
    return sorted(found, key=lambda slot: (slot.uuid, slot.number))


def preferred(
    available: Sequence[str], must_include: Sequence[str], size: int, preference: Preference, *, distinct: bool
) -> list[str]:
    """The slots that a container should get.

    `spread` takes slots of the GPUs with the most free slots, `pack` of those with the fewest.  `distinct`: a second
    slot of a GPU only if there are too few GPUs; Allocate then refuses with the reason.
    """
    chosen = list(dict.fromkeys(must_include))[:size]
    free: dict[str, list[SlotId]] = {}
    for device_id in available:
        slot = parse(device_id)
        if slot is not None and device_id not in chosen:
            free.setdefault(slot.uuid, []).append(slot)
    for slots in free.values():
        slots.sort(key=lambda slot: slot.number, reverse=True)
    taken = Counter(slot.uuid for slot in map(parse, chosen) if slot is not None)
    while len(chosen) < size and free:
        sign = -1 if preference == "spread" else 1
        uuid = min(free, key=lambda each: (taken[each] if distinct else 0, sign * len(free[each]), each))
        chosen.append(str(free[uuid].pop()))
        taken[uuid] += 1
        if not free[uuid]:
            del free[uuid]
    return chosen


def memory_unit_bytes(resource: str) -> int:
    """Size of one unit, by the resource's name.  Raises ValueError."""
    match = _MEMORY_NAME.fullmatch(resource)
    if match is None:
        raise ValueError(
            f"{resource!r} does not name its unit; end it with -mib, -256mib or -gib, "
            "such as nvshare.com/gpu-memory-256mib"
        )
    return int(match["count"] or 1) << (20 if match["unit"] == "mib" else 30)


def memory_ids(count: int) -> list[str]:
    """Ids of all memory units; short, because a node may have a hundred thousand."""
    return [str(number) for number in range(count)]


def check_memory(field: str, device_ids: Sequence[str], count: int) -> int:
    """The number of units of one container.  Raises RequestError."""
    for device_id in device_ids:
        if not (device_id.isascii() and device_id.isdecimal() and int(device_id[:MAX_ID]) < count):
            raise RequestError(f"{field}: {device_id!r:.80} is no unit of memory; they are 0 to {count - 1}")
    if len(set(device_ids)) != len(device_ids) or not device_ids:
        raise RequestError(f"{field}: is empty, or names a unit twice")
    if len(device_ids) > MAX_UNITS_PER_CONTAINER:
        raise RequestError(
            f"{field}: {len(device_ids)} units exceed the {MAX_UNITS_PER_CONTAINER} of one container, because "
            "Kubernetes lists each unit in the pod's status; start nvshare-device-plugin with a coarser "
            "--memory-resource, such as nvshare.com/gpu-memory-256mib"
        )
    return len(device_ids)
