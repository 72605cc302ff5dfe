"""The coordinator's record of its node's slots: settings, clients, and statistics.

A slot (slot.py) may have several processes.  Each is a client, and the clients of a slot form one *group* of the core
with a common memory limit.  The connection alone determines a client's slot.

Invariants: the device plugin bounds the number of slots, and so the statistics.  Statistics of disconnected clients
stay with their slot until its next allocation.

Non-goals: files and sockets (kubernetes/slots/watch.py), metric names (kubernetes/slots/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nvshare.coordinator.model import profile

if TYPE_CHECKING:
    from nvshare.coordinator.engine.snapshot import ClientSnapshot
    from nvshare.coordinator.kubernetes.slots.slot import Slot
    from nvshare.coordinator.model.profile import Facts


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over a slot's processes and GPUs.  The last four are counters."""

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
class SlotSnapshot:
    """A snapshot of one slot, for metrics and `nvshare-ctl`."""

    slot: Slot
    registered: bool
    """A hook has registered since the slot's allocation."""
    figures: Figures
    refused: int = 0
    """Attempts of its programs to use a GPU outside of it."""
    removed: bool = False
    """Programs of it are left over."""

    def plain(self) -> dict[str, Any]:
        """The slot as JSON."""
        pod = self.slot.pod
        return {
            "slot": self.slot.slot,
            "allocation": self.slot.allocation,
            "removed": self.removed,
            "gpus": list(self.slot.gpus),
            "namespace": pod.namespace if pod else None,
            "pod": pod.name if pod else None,
            "container": pod.container if pod else None,
            "limit_bytes": self.slot.limit_bytes,
            **{row.word: row.plain(self.slot.policy.get(row.word)) for row in profile.of_slots()},
            "registered": self.registered,
            "hook_missing": self.slot.hook_missing,
            "refused": self.refused,
            **asdict(self.figures),
        }


@dataclass(slots=True)
class _Record:
    slot: Slot
    registered: bool = False
    clients: set[int] = field(default_factory=set)
    past: Figures = Figures()
    refused: int = 0
    removed: bool = False


class SlotBook:
    """All slots, by name.  Belongs to the loop's thread."""

    def __init__(self, first_registration: Callable[[Slot], None] = lambda _: None) -> None:
        """`first_registration` is called when the first hook of an allocation registers."""
        self._first_registration = first_registration
        self._slots: dict[str, _Record] = {}
        self._slot_of: dict[int, _Record] = {}  # by client, also of a slot that was removed

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    # --- slots ------------------------------------------------------------------------------------------------------

    def put(self, slot: Slot, *, registered: bool = False) -> list[int]:
        """Adds or updates a slot; returns its clients, if something of theirs has changed.

        `registered`: a hook registered with an earlier coordinator.
        """
        record = self._slots.get(slot.slot)
        if record is None or record.slot.allocation != slot.allocation:  # the next container starts afresh
            self.remove(slot.slot)
            self._slots[slot.slot] = _Record(slot, registered)
            return []
        before, record.slot = record.slot, slot
        same = (slot.policy, slot.limit_bytes) == (before.policy, before.limit_bytes)
        return [] if same else sorted(record.clients)

    def remove(self, name: str) -> None:
        """Removes a slot.  Its connected clients keep their GPUs and may attach no others."""
        record = self._slots.pop(name, None)
        if record is not None:
            record.removed = True

    # --- clients ----------------------------------------------------------------------------------------------------

    def register(self, name: str, client: int) -> bool:
        """A hook registers in a slot; false for an unknown slot."""
        record = self._slots.get(name)
        if record is None:
            return False
        if not record.registered:
            record.registered = True
            self._first_registration(record.slot)
        record.clients.add(client)
        self._slot_of[client] = record
        return True

    def within(self, client: int, own: Facts) -> Facts:
        """A program's facts within its slot's; unchanged without a slot.

        A container controls its environment, so all that takes from others is the slot's or the default.  The program
        only lowers it: the class to best-effort, the share limit to a smaller one.  Its gang is one of this slot,
        because users of different pods share user ids.  Its own time until it is parked comes before the slot's.
        """
        record = self._slot_of.get(client)
        if record is None:
            return own
        slot, gang = record.slot, own.gang.partition("/")[2]
        own = own.having(gang=f"slot:{slot.slot}/{gang}" if gang else "")
        found = own.within(slot.policy)
        return found.having(
            limit_bytes=slot.limit_bytes or own.limit_bytes,
            share_request=min(found.rank.share_request, found.rank.share_limit),
        )

    def allocation(self, name: str) -> str | None:
        """The slot's present allocation; None for an unknown slot."""
        record = self._slots.get(name)
        return None if record is None else record.slot.allocation

    def refuses(self, client: int, uuid: str) -> str | None:
        """Why this client may not use that GPU; None if it may or has no slot.  Counts what it refuses."""
        record = self._slot_of.get(client)
        if record is None:
            return None
        if record.removed:
            return f"no GPU {uuid}: the slot was removed; restart the container"
        if uuid in record.slot.gpus:
            return None
        record.refused += 1
        return f"no GPU {uuid} in slot {record.slot.slot}; it has {', '.join(record.slot.gpus)}"

    def leave(self, client: int, last: ClientSnapshot | None) -> None:
        """Removes a client and adds its statistics to the slot; `last`: its final snapshot."""
        record = self._slot_of.pop(client)
        record.clients.remove(client)
        if last is not None:
            record.past = _sum([last], record.past)

    def slot(self, client: int) -> Slot | None:
        """The client's slot, if it has one."""
        record = self._slot_of.get(client)
        return None if record is None else record.slot

    def has(self, client: int) -> bool:
        """Whether the client belongs to a slot."""
        return client in self._slot_of

    # --- snapshots --------------------------------------------------------------------------------------------------

    def snapshots(self, clients: Iterable[ClientSnapshot]) -> list[SlotSnapshot]:
        """All slots, with the statistics of present and past clients, and removed ones that have clients."""
        members: dict[int, list[ClientSnapshot]] = {}
        for client in clients:
            if (record := self._slot_of.get(client.client)) is not None:
                members.setdefault(id(record), []).append(client)
        records = {id(record): record for record in (*self._slots.values(), *self._slot_of.values())}
        return [
            SlotSnapshot(of.slot, of.registered, _sum(members.get(key, []), of.past), of.refused, of.removed)
            for key, of in sorted(records.items(), key=lambda item: (item[1].slot.slot, item[1].removed))
        ]


def _sum(clients: list[ClientSnapshot], past: Figures) -> Figures:
    """With the counters of clients that have left."""
    seats = [seat for client in clients for seat in client.seats]
    return Figures(
        clients=len(clients),
        waiting=sum(seat.turn.waiting_since_ns is not None for seat in seats),
        allocated_bytes=sum(seat.memory.allocated_bytes for seat in seats),
        resident_bytes=sum(seat.memory.resident_bytes for seat in seats),
        pinned_bytes=sum(seat.memory.pinned_bytes for seat in seats),
        host_bytes=sum(seat.memory.host_bytes for seat in seats),
        leases=past.leases + sum(seat.statistics.leases for seat in seats),
        used_ns=past.used_ns + sum(seat.statistics.used_ns for seat in seats),
        waited_ns=past.waited_ns + sum(seat.statistics.waited_ns for seat in seats),
        submissions=past.submissions + sum(seat.statistics.submissions for seat in seats),
    )
