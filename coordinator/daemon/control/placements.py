"""Answers `nvshare-run --gpu`, and reserves what it has answered until the program uses the GPU.

A reservation counts as a program that keeps its GPU busy.  It ends with its process, when a process of the program uses
the GPU, and after `STARTING_NS`; one that is `alone` lasts as long as its process, since the program may be a shell.
It gives way to other users after `GIVES_WAY_NS`.
From its first CUDA call on a program tells its placement itself, so that nothing here must survive a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.gpu_choice import (
    GIVES_WAY_NS,
    STARTING_NS,
    NoPlaceError,
    Tenant,
    choose,
    named,
    tenants,
)
from nvshare.coordinator.model.placement import Placement, parse_placement
from nvshare.coordinator.system.journal import start_time

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control import api
    from nvshare.coordinator.daemon.control.rights import Rights
    from nvshare.coordinator.daemon.peers import Peer
    from nvshare.coordinator.engine.snapshot import Snapshot
    from nvshare.coordinator.system.devices import Device

MOST_RESERVED: Final = 256
"""Reservations of one user."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    caller: Peer
    started_at: int | None
    """Start time of the process; None: unknown."""
    until_ns: int
    uuids: tuple[str, ...]
    wish: api.Place
    placement: Placement

    def lasts(self, now_ns: int) -> bool:
        if self.started_at is not None and start_time(self.caller.process_id) != self.started_at:
            return False
        return now_ns < self.until_ns or (self.placement.placed_alone and self.started_at is not None)


class Placements:
    """The reservations of one coordinator."""

    def __init__(self, devices: Sequence[Device], rights: Rights) -> None:
        self._devices = devices
        self._rights = rights
        self._reserved: list[_Reservation] = []

    def place(
        self, request: api.Place, caller: Peer, snapshot: Snapshot, find: Callable[[str], str | None]
    ) -> dict[str, Any]:
        """The GPUs for the caller.  `find` gives the UUID of a name.  Raises ControlError."""
        now_ns = snapshot.now_ns  # a process that asks again gives back what it got before
        kept = (each for each in self._reserved if each.caller != caller or not caller.process_id)
        self._reserved = [each for each in kept if each.lasts(now_ns)]
        if sum(each.caller.user_id == caller.user_id for each in self._reserved) >= MOST_RESERVED:
            raise ControlError("busy", f"{MOST_RESERVED} programs of yours were placed and use no GPU yet; end some")
        outer = parse_placement(request.within)
        apart, alone = request.apart or outer.placed_apart, request.alone or outer.placed_alone
        wish = request.model_copy(update={"apart": apart, "alone": alone})
        present = [*tenants(snapshot, lambda client: self._rights.may_name(caller.user_id, client), caller.user_id)]
        present += self._reservations(caller, snapshot)
        capacities = {gpu.uuid: gpu.memory.capacity_bytes for gpu in snapshot.gpus}
        cards = [replace(device, total_bytes=capacities[device.uuid]) for device in self._devices]
        try:
            uuids, why = choose(cards, present, wish, self._among(request, find), outer.placement)
        except NoPlaceError as error:
            remedy = "wait for one with --wait, or wish for less" if error.later else "ask for less"
            text = f"no GPU to place {wish.name} on: {error}; {remedy}"
            raise ControlError("no_place" if error.later else "gpu", text[:2000]) from None
        placement = Placement(outer.placement or secrets.token_hex(4), wish.alone, wish.apart, why)
        started_at = start_time(caller.process_id) if caller.process_id else None
        self._reserved.append(_Reservation(caller, started_at, now_ns + STARTING_NS, uuids, wish, placement))
        return {"uuids": list(uuids), "why": why, "placement": placement.text()}

    def _among(self, request: api.Place, find: Callable[[str], str | None]) -> tuple[str, ...] | None:
        if not request.gpus:
            return self._visible(request.visible, fastest_first=request.fastest_first)
        among = tuple(str(find(name)) for name in request.gpus.split(","))
        if len(set(among)) < len(among):
            raise ControlError("gpu", f"{request.gpus!r} names a GPU twice")
        return among

    def _visible(self, visible: str | None, *, fastest_first: bool) -> tuple[str, ...] | None:
        """The GPUs of CUDA_VISIBLE_DEVICES.  As in CUDA, an entry that names none ends the list."""
        if visible is None:
            return None
        words, found = [word.strip().lower() for word in visible.split(",")], []
        mixed = len({device.name for device in self._devices}) > 1
        if fastest_first and mixed and any(map(str.isdecimal, words)):
            text = f"indices (CUDA_VISIBLE_DEVICES={visible}) are in CUDA's own order on a machine with different GPUs"
            raise ControlError("gpu", f"{text}; set CUDA_DEVICE_ORDER=PCI_BUS_ID too, or use UUIDs")
        for word in words:
            uuids = [
                device.uuid
                for device in self._devices
                if word == str(device.index) or (word[:4] in ("gpu-", "mig-") and device.uuid.lower().startswith(word))
            ]
            if not uuids:
                break
            found.append(uuids[0])
        return tuple(found)

    def _reservations(self, caller: Peer, snapshot: Snapshot) -> Iterator[Tenant]:
        """Programs that do not use the GPU yet."""
        started = {(client.placement.placement, seat.uuid) for client in snapshot.clients for seat in client.seats}
        sees_all = not self._rights.hide_other_users or self._rights.is_operator(caller.user_id)
        for each in self._reserved:
            process_id, user_id = each.caller.process_id, each.caller.user_id
            stays = user_id == caller.user_id or snapshot.now_ns < each.until_ns - STARTING_NS + GIVES_WAY_NS
            who = named(each.wish.name, process_id, user_id, shown=sees_all or user_id == caller.user_id)
            demand = float(snapshot.now_ns < each.until_ns)
            for uuid in each.uuids:
                if stays and (each.placement.placement, uuid) not in started:
                    memory_bytes = each.wish.memory_bytes
                    yield Tenant(uuid, *who, each.wish.job_class, demand, memory_bytes, placement=each.placement)
