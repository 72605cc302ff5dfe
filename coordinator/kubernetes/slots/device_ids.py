"""Ids of the kubelet's devices: slots of GPUs, each `<UUID>::<number>`.  Pure.

Invariants: ids have at most 63 characters and stay the same across restarts.  An error names the request's field.

Non-goals: gRPC, files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Preference = Literal["spread", "pack"]
MAX_ID: Final = 63
MAX_SLOTS_PER_GPU: Final = 1000


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
