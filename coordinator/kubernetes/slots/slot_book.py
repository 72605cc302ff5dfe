"""The coordinator's record of its node's slots: settings, clients, and statistics.

A slot (slot.py) may have several processes.  Each is a client, and the clients of a slot form one *group* of the core
with a common memory limit.  The connection alone determines a client's slot.

Invariants: the device plugin bounds the number of slots, and so the statistics.  Statistics of disconnected clients
stay with their slot until its next allocation.

Non-goals: files and sockets (kubernetes/slots/watch.py), metric names (kubernetes/slots/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.kubernetes.slots.slot import SlotPolicy
from nvshare.coordinator.model import events
from nvshare.scheduler_policies.api import JobClass

if TYPE_CHECKING:
    from nvshare.coordinator.engine.snapshot import ClientSnapshot
    from nvshare.coordinator.kubernetes.slots.slot import Slot


_REMOVED: Final = ""
"""The slot name of clients that outlived their slot."""


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

    def plain(self) -> dict[str, Any]:
        """The slot as JSON."""
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
            "class": policy.job_class,
            "share_request": policy.share_request,
            "share_limit": policy.share_limit,
            "gang": policy.gang,
            "registered": self.registered,
            "refused": self.refused,
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
    """Client -> its hook's registration."""
    profiles: dict[int, events.Profiled] = field(default_factory=dict)
    """Client -> what its hook says of it."""
    past: Figures = Figures()
    refused: int = 0


class SlotBook:
    """All slots, by name.  Belongs to the loop's thread."""

    def __init__(self, first_registration: Callable[[Slot], None] = lambda _: None) -> None:
        """`first_registration` is called when the first hook of an allocation registers."""
        self._first_registration = first_registration
        self._slots: dict[str, _Record] = {}
        self._slot_of: dict[int, str] = {}  # client -> slot, or _REMOVED

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    # --- slots ------------------------------------------------------------------------------------------------------

    def put(self, slot: Slot, *, registered: bool = False) -> list[events.Set]:
        """Adds or updates a slot; the events apply the changes to its clients.

        `registered`: a hook registered with an earlier coordinator.
        """
        record = self._slots.get(slot.slot)
        if record is None:
            self._slots[slot.slot] = _Record(slot, registered)
            return []
        before, record.slot = record.slot, slot
        if before.allocation != slot.allocation:  # the next container starts afresh
            record.registered = False
            record.past = Figures()
            record.refused = 0
        changes: list[events.Set] = []
        for client, registration in record.clients.items():
            if slot.limit_bytes != before.limit_bytes:
                changes.append(events.Set("limit", slot.limit_bytes, client=client))
            if slot.policy.priority != before.policy.priority:
                changes.append(events.Set("priority", slot.policy.priority or 0, client=client))
            if slot.policy.weight != before.policy.weight:
                changes.append(events.Set("weight", slot.policy.weight or 1, client=client))
            if slot.policy.gang != before.policy.gang:
                changes.append(events.Set("gang", _gang(slot, registration), client=client))
            own = record.profiles[client]
            old, new = _capped(before.policy, own), _capped(slot.policy, own)
            if new.job_class != old.job_class:
                changes.append(events.Set("class", new.job_class.name.lower(), client=client))
            if (new.share_request, new.share_limit) != (old.share_request, old.share_limit):
                changes.append(events.Set("share_limit", new.share_limit, client=client))
                changes.append(events.Set("share_request", new.share_request, client=client))
        return changes

    def remove(self, name: str) -> None:
        """Removes a slot.  Its connected clients keep their GPUs and may attach no others."""
        record = self._slots.pop(name, None)
        for client in record.clients if record is not None else ():
            self._slot_of[client] = _REMOVED

    # --- clients ----------------------------------------------------------------------------------------------------

    def register(self, name: str, wish: events.ClientRegistered) -> events.ClientRegistered | None:
        """The hook's registration with the slot's settings; None for an unknown slot.

        A container controls its environment, so priority and weight are the slot's or the default, never the hook's.
        """
        record = self._slots.get(name)
        if record is None:
            return None
        slot = record.slot
        if not record.registered:
            record.registered = True
            self._first_registration(slot)
        record.clients[wish.client] = wish
        record.profiles[wish.client] = events.Profiled(wish.client, JobClass.BATCH, 0.0, 1.0, None, spatial=False)
        self._slot_of[wish.client] = name
        hello = replace(
            wish.hello,
            priority=slot.policy.priority or 0,
            weight=slot.policy.weight or 1,
            gang=_gang(slot, wish),
            memory_limit_bytes=slot.limit_bytes or wish.hello.memory_limit_bytes,
        )
        return replace(wish, hello=hello, group=name)

    def first_profile(self, client: int) -> events.Profiled | None:
        """The profile by the slot alone; None if the slot sets nothing, or for a client without a slot."""
        name = self._slot_of.get(client, _REMOVED)
        if name == _REMOVED:
            return None
        own = self._slots[name].profiles[client]
        capped = _capped(self._slots[name].slot.policy, own)
        return None if capped == own else capped

    def profiled(self, own: events.Profiled) -> events.Profiled:
        """A program's profile within its slot's class and shares; unchanged without a slot."""
        name = self._slot_of.get(own.client)
        if name is None:
            return own
        if name == _REMOVED:
            return _capped(SlotPolicy(), own)
        self._slots[name].profiles[own.client] = own
        return _capped(self._slots[name].slot.policy, own)

    def allocation(self, name: str) -> str | None:
        """The slot's present allocation; None for an unknown slot."""
        record = self._slots.get(name)
        return None if record is None else record.slot.allocation

    def refuses(self, client: int, uuid: str) -> str | None:
        """Why this client may not use that GPU; None if it may or has no slot.  Counts what it refuses."""
        name = self._slot_of.get(client)
        if name == _REMOVED:
            return f"no GPU {uuid}: the slot was removed; restart the container"
        if name is None or uuid in self._slots[name].slot.gpus:
            return None
        self._slots[name].refused += 1
        return f"no GPU {uuid} in slot {name}; it has {', '.join(self._slots[name].slot.gpus)}"

    def leave(self, client: int, last: ClientSnapshot | None) -> None:
        """Removes a client and adds its statistics to the slot; `last`: its final snapshot."""
        name = self._slot_of.pop(client, _REMOVED)
        if name == _REMOVED:
            return
        record = self._slots[name]
        del record.clients[client], record.profiles[client]
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
        """Whether the client belongs to a slot."""
        return client in self._slot_of

    # --- snapshots --------------------------------------------------------------------------------------------------

    def snapshots(self, clients: Iterable[ClientSnapshot]) -> list[SlotSnapshot]:
        """All slots, with the statistics of present and past clients."""
        members: dict[str, list[ClientSnapshot]] = {}
        for client in clients:
            name = self._slot_of.get(client.client)
            if name is not None:
                members.setdefault(name, []).append(client)
        return [
            SlotSnapshot(record.slot, record.registered, _sum(members.get(name, []), record.past), record.refused)
            for name, record in sorted(self._slots.items())
        ]


def _gang(slot: Slot, wish: events.ClientRegistered) -> str:
    """The annotation's gang; else the hook's, limited to this slot, because users of different pods share user ids."""
    registration = wish.hello.gang.partition("/")[2]
    return slot.policy.gang or (f"slot:{slot.slot}/{registration}" if registration else "")


def _capped(policy: SlotPolicy, own: events.Profiled) -> events.Profiled:
    """A container controls its environment, so class and shares are the slot's or the default.

    The environment only lowers them: the class to best-effort, the share limit to a smaller one.
    """
    job_class = JobClass[(policy.job_class or "batch").replace("-", "_").upper()]
    if own.job_class is JobClass.BEST_EFFORT:
        job_class = JobClass.BEST_EFFORT
    most = min(1.0 if policy.share_limit is None else policy.share_limit, own.share_limit)
    request = min(policy.share_request or 0.0, most)
    return replace(own, job_class=job_class, share_request=request, share_limit=most)


def _sum(clients: list[ClientSnapshot], past: Figures | None = None) -> Figures:
    past = past or Figures()
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
