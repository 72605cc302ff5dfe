"""What the coordinator knows of the slots on its node: whose they are, what they may, and what their processes did.

A slot (slot.py) may have several processes; each is a client, and all of a slot's clients are one *group* of
the core, whose memory limit they share.  The connection tells the slot; nothing that a client says does.

Invariants: the number of slots is bounded by what the device plugin made, so figures by slot are bounded too; figures
of clients that are gone stay with their slot until it is allocated anew.

May not go here: files and sockets (kubernetes/slots/watch.py), metrics' names (kubernetes/slots/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.model import events

if TYPE_CHECKING:
    from nvshare.coordinator.engine.snapshot import ClientSnapshot
    from nvshare.coordinator.kubernetes.slots.slot import Slot


_TAKEN_AWAY: Final = ""
"""The slot of clients that are still there after it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over a slot's processes and GPUs.  `leases` to `submissions` are counters."""

    clients: int = 0
    waiting: int = 0
    allocated_bytes: int = 0
    resident_bytes: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    leases: int = 0
    used_ns: int = 0
    waited_ns: int = 0
    submissions: int = 0


@dataclass(frozen=True, slots=True)
class SlotPicture:
    """One slot, frozen, for metrics and `nvshare-ctl`."""

    slot: Slot
    registered: bool
    """A hook has said hello since the slot was allocated."""
    figures: Figures

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        pod = self.slot.pod
        policy = self.slot.policy
        return {
            "slot": self.slot.slot,
            "gpus": list(self.slot.gpus),
            "namespace": pod.namespace if pod else None,
            "pod": pod.name if pod else None,
            "container": pod.container if pod else None,
            "limit_bytes": self.slot.limit_bytes,
            "priority": policy.priority,
            "weight": policy.weight,
            "class": policy.latency_class,
            "gang": policy.gang,
            "registered": self.registered,
            "clients": self.figures.clients,
            "allocated_bytes": self.figures.allocated_bytes,
            "leases": self.figures.leases,
            "used_ns": self.figures.used_ns,
            "waited_ns": self.figures.waited_ns,
        }


@dataclass(slots=True)
class _Record:
    slot: Slot
    registered: bool = False
    clients: dict[int, events.ClientRegistered] = field(default_factory=dict)
    """Client -> what its hook wished for."""
    past: Figures = Figures()


class SlotBook:
    """All slots, by name.  The loop's thread only."""

    def __init__(self) -> None:
        self.first_hello: Callable[[Slot], None] | None = None
        """Told when the first hook of an allocation comes."""
        self._slots: dict[str, _Record] = {}
        self._homes: dict[int, str] = {}  # client -> slot, or _TAKEN_AWAY

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    # --- slots come, change and go ----------------------------------------------------------------------------------

    def put(self, slot: Slot, *, registered: bool = False) -> list[events.Event]:
        """A new slot, or what it says now; the events make its clients hear of it.

        `registered`: a hook came before this coordinator started.
        """
        record = self._slots.get(slot.slot)
        if record is None:
            self._slots[slot.slot] = _Record(slot, registered)
            return []
        before, record.slot = record.slot, slot
        if before.allocation != slot.allocation:  # another container's: nothing of the earlier one is its own
            record.registered = False
            record.past = Figures()
        changes: list[events.Event] = []
        for client, wished in record.clients.items():
            if slot.limit_bytes != before.limit_bytes:
                changes.append(events.LimitSet(client, slot.limit_bytes))
            if slot.policy.priority != before.policy.priority:
                changes.append(events.PrioritySet(client, slot.policy.priority or 0))
            if slot.policy.weight != before.policy.weight:
                changes.append(events.WeightSet(client, slot.policy.weight or 1))
            if slot.policy.gang != before.policy.gang:
                changes.append(events.GangSet(client, _gang(slot, wished)))
        return changes

    def take_away(self, name: str) -> None:
        """The slot's directory is gone.  Clients that are still there keep what they have, and get no further GPU."""
        record = self._slots.pop(name, None)
        for client in record.clients if record is not None else ():
            self._homes[client] = _TAKEN_AWAY

    # --- clients ----------------------------------------------------------------------------------------------------

    def adopt(self, name: str, wish: events.ClientRegistered) -> events.ClientRegistered | None:
        """What a hook asks for, corrected by what its slot says; None when there is no such slot.

        A container chooses its environment, so its priority and weight are the slot's or the default, never the hook's.
        """
        record = self._slots.get(name)
        if record is None:
            return None
        slot = record.slot
        if not record.registered:
            record.registered = True
            if self.first_hello is not None:
                self.first_hello(slot)
        record.clients[wish.client] = wish
        self._homes[wish.client] = name
        return events.ClientRegistered(
            client=wish.client,
            name=wish.name,
            program=wish.program,
            process_id=wish.process_id,
            user_id=wish.user_id,
            priority=slot.policy.priority or 0,
            memory_mode=wish.memory_mode,
            memory_limit_bytes=slot.limit_bytes or wish.memory_limit_bytes,
            group=name,
            weight=slot.policy.weight or 1,
            gang=_gang(slot, wish),
        )

    def allocation(self, name: str) -> str | None:
        """The slot's present one; None when there is no such slot."""
        record = self._slots.get(name)
        return None if record is None else record.slot.allocation

    def refuses(self, client: int, uuid: str) -> str | None:
        """Why this client may not use that GPU; None: it may, or is in no slot."""
        name = self._homes.get(client)
        if name == _TAKEN_AWAY:
            return f"no GPU {uuid}: the slot is gone; its container must be started again"
        if name is None or uuid in self._slots[name].slot.gpus:
            return None
        return f"no GPU {uuid} in slot {name}; it has {', '.join(self._slots[name].slot.gpus)}"

    def leave(self, client: int, last: ClientSnapshot | None) -> None:
        """The client is gone; `last` is what it had done."""
        name = self._homes.pop(client, _TAKEN_AWAY)
        if name == _TAKEN_AWAY:
            return
        record = self._slots[name]
        del record.clients[client]
        if last is not None:
            done = _sum([last])
            past = record.past
            record.past = Figures(
                leases=past.leases + done.leases,
                used_ns=past.used_ns + done.used_ns,
                waited_ns=past.waited_ns + done.waited_ns,
                submissions=past.submissions + done.submissions,
            )

    def has(self, client: int) -> bool:
        """Whether it belongs to a slot."""
        return client in self._homes

    # --- pictures ---------------------------------------------------------------------------------------------------

    def pictures(self, clients: Iterable[ClientSnapshot]) -> list[SlotPicture]:
        """All slots, with the figures of the clients that are there and of those that were."""
        members: dict[str, list[ClientSnapshot]] = {}
        for client in clients:
            name = self._homes.get(client.client)
            if name is not None:
                members.setdefault(name, []).append(client)
        return [
            SlotPicture(record.slot, record.registered, _sum(members.get(name, []), record.past))
            for name, record in sorted(self._slots.items())
        ]


def _gang(slot: Slot, wish: events.ClientRegistered) -> str:
    """What the annotation says; else what the hook wishes, among the processes of this slot alone, since users of
    different pods have the same numbers."""
    wished = wish.gang.partition("/")[2]
    return slot.policy.gang or (f"slot:{slot.slot}/{wished}" if wished else "")


def _sum(clients: list[ClientSnapshot], past: Figures | None = None) -> Figures:
    past = past or Figures()
    seats = [seat for client in clients for seat in client.seats]
    return Figures(
        clients=len(clients),
        waiting=sum(seat.waiting_since_ns is not None for seat in seats),
        allocated_bytes=sum(seat.allocated_bytes for seat in seats),
        resident_bytes=sum(seat.resident_bytes for seat in seats),
        pinned_bytes=sum(seat.pinned_bytes for seat in seats),
        host_bytes=sum(seat.host_bytes for seat in seats),
        leases=past.leases + sum(seat.leases for seat in seats),
        used_ns=past.used_ns + sum(seat.used_ns for seat in seats),
        waited_ns=past.waited_ns + sum(seat.waited_ns for seat in seats),
        submissions=past.submissions + sum(seat.submissions for seat in seats),
    )
