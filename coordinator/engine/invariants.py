"""The invariants of the core, checked after each event.

`cheap` looks at one GPU, at a cost that does not grow with its clients, and runs always.  `Thorough` looks at
everything and remembers since when each client waits; tests run it.  A check changes nothing, and raises
AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.engine import leases
from nvshare.coordinator.gangs import coscheduling, members
from nvshare.coordinator.memory import room, switching
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, OVERDUE, REVOKING, WAITING, WITH_LEASE
from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol.messages import MemoryMode, Sharing


def cheap(gpu: Gpu) -> None:
    """Invariant 1 for this GPU.  Exclusive leases are few, so looking at all of them is quick."""
    holder = gpu.leases.holder
    if gpu.rules.sharing is Sharing.EXCLUSIVE:
        for seat in gpu.leases.by_client.values():
            assert seat is holder or seat.phase is not HOLDING, f"invariant 1: {gpu.uuid} has a second holder"
    assert holder is None or gpu.leases.by_client.get(holder.client.client_id) is holder, (
        f"{gpu.uuid}: the holder has no lease"
    )
    assert gpu.switching.switch is None or gpu.switching.switch.seat.phase is NEXT, (
        f"{gpu.uuid}: the switch has no next client"
    )


@dataclass(slots=True)
class _Wait:
    """Since when, on the GPU's turn clock, a client waits; and the most that its policy has allowed meanwhile."""

    since_ns: int
    epoch: tuple[object, ...]
    bound_ns: int


class Thorough:
    """All invariants.  `slack_ns` is how late a timer may be at the end of each turn."""

    def __init__(self, slack_ns: int = MILLISECOND_NS) -> None:
        self.slack_ns = slack_ns
        self.longest_ns = 0
        self._waits: dict[tuple[str, int], _Wait] = {}
        self._shares: dict[int, int] = {}
        """Of host memory, by client, after the last event."""

    def check(self, node: Node, now_ns: int) -> None:
        """Checks everything, after an event."""
        for gpu in node.gpus.values():
            cheap(gpu)
            self._leases(node, gpu)
            self._memory(gpu)
            self._immovable(node, gpu)
            self._waiting(node, gpu, now_ns)
        self._gangs(node, now_ns)
        self._host(node)
        for client in node.clients.values():
            for seat in client.seats.values():
                assert seat.gpu.seats.get(client.client_id) is seat, "a seat that its GPU does not know"

    def _leases(self, node: Node, gpu: Gpu) -> None:
        ids = [seat.lease.lease_id for seat in gpu.leases.by_client.values() if not seat.lease.stray]
        assert len(ids) == len(set(ids)), f"{gpu.uuid}: one id for two leases"
        assert all(0 < number < gpu.leases.next_lease_id for number in ids), f"{gpu.uuid}: a lease id from the future"
        busy = [
            seat for seat in gpu.leases.by_client.values() if seat.phase in (HOLDING, REVOKING) and not seat.lease.stray
        ]
        if (
            gpu.rules.sharing is Sharing.EXCLUSIVE
            and gpu.leases.holder is not None
            and gpu.leases.holder.phase is HOLDING
        ):
            assert busy == [gpu.leases.holder], f"invariant 1: {gpu.uuid} is granted to {len(busy)} clients"
        for client, seat in gpu.seats.items():
            assert node.clients.get(client) is seat.client, f"invariant 6: gone client {client} has a seat"
            assert (seat.phase in WITH_LEASE) == (client in gpu.leases.by_client), f"{client}: lease and phase differ"
            in_line = seat.phase is WAITING and not seat.client.paused and not seat.room.unschedulable
            assert in_line == (seat in gpu.wait_queue), f"{client}: waiting and the wait queue differ"
            assert (seat.phase is OVERDUE) <= (seat.lease.drain_deadline_ns is None)
        assert set(gpu.leases.by_client) <= set(gpu.seats), f"invariant 6: a gone client has a lease on {gpu.uuid}"
        if len(gpu.wait_queue) and gpu.switching.switch is None and not gpu.recovering and not leases.blocked(gpu):
            # Invariant 10: beside overdue leases only clients wait whose memory does not fit.
            none_fits = not any(switching.fits_beside_overdue(gpu, seat) for seat in gpu.wait_queue.seats())
            idle = gpu.leases.policy_wakes_at_ns is not None or none_fits
            assert idle, f"{gpu.uuid} is free, clients wait, and none is granted"

    def _memory(self, gpu: Gpu) -> None:
        seats = gpu.seats.values()
        assert gpu.memory.resident_bytes == sum(seat.memory.resident_bytes for seat in seats), (
            "invariant 6: sums of memory"
        )
        assert gpu.memory.allocated_bytes == sum(seat.memory.allocated_bytes for seat in seats), (
            "invariant 6: sums of memory"
        )
        assert gpu.memory.host_bytes == sum(seat.memory.host_bytes for seat in seats), "invariant 6: sums of memory"
        assert set(gpu.memory.moving) <= set(gpu.seats), f"invariant 6: a gone client's order is open on {gpu.uuid}"
        for seat in seats:
            order = seat.moves.order
            assert (order is not None) == (seat.client.client_id in gpu.memory.moving), "the GPU's open orders differ"
            if order is not None and not order.evict:
                assert order.credit_bytes <= order.bytes <= gpu.memory.capacity_bytes, f"invariant 4: {order}"

    def _immovable(self, node: Node, gpu: Gpu) -> None:
        """Invariant 5 for clients that lack room: they are named, and no other client is unschedulable."""
        whole, seats = gpu.memory.immovable, gpu.seats.values()
        assert whole.bytes == sum(seat.room.immovable_bytes for seat in seats), "invariant 6: sums of immovable memory"
        assert whole.unschedulable == sum(seat.room.unschedulable for seat in seats), (
            "invariant 6: a gone client is unschedulable"
        )
        swapping = [seat for seat in seats if seat.client.memory_mode is MemoryMode.SWAP]
        assert list(whole.swapping.values()) == swapping, "a seat in mode swap is not checked for room"
        for seat in swapping:
            lacking = room.lacking_bytes(seat)
            assert seat.room.lacking_bytes == lacking, f"{seat.client.client_id} lacks {lacking} bytes of room"
            why = lacking or seat.room.refused
            assert why or not seat.room.unschedulable, f"{seat.client.client_id} is unschedulable, and fits"

    def _host(self, node: Node) -> None:
        """Sums of shares, and the rule by which they grow, stated as it is meant and not as it is computed."""
        asking = [client for client in node.clients.values() if client.host.asked]
        shared = sum(client.host.share_bytes for client in node.clients.values())
        assert shared == node.host.shared_bytes, "invariant 6: sums of host memory"
        owned: dict[str, list[int]] = {}
        for client in asking:
            owned.setdefault(client.owner, []).append(client.host.share_bytes)
        known = {name: (owner.clients, owner.shared_bytes) for name, owner in node.host.owners.items()}
        assert known == {name: (len(of), sum(of)) for name, of in owned.items()}, "invariant 6: owners of host memory"
        left, times = node.host.budget_bytes - shared, node.settings.memory.host_fair_times
        before, self._shares = self._shares, {client.client_id: client.host.share_bytes for client in asking}
        for client in asking:
            has = sum(owned[client.owner])
            # A first question counts whatever the rule says: its memory may be pinned already.
            if client.client_id in before and client.host.share_bytes > before[client.client_id]:
                assert left >= 0, "more host memory is given than there is"
                assert not times or has <= times * left, (
                    f"{client.client_id}: {has} for its owner, {left} bytes are left"
                )
        for command in node.out:
            if isinstance(command, Notify) and command.kind == "refused" and "owner" in command.values:
                client = node.clients[int(command.values["client"] or 0)]
                more = int(command.values["bytes"] or 0) - client.host.share_bytes
                has = sum(owned[client.owner]) + more
                assert more > left or (times and has > times * (left - more)), f"{command}: it is within the rule"

    def _gangs(self, node: Node, now_ns: int) -> None:
        """A gang's leases end together, and no GPU is reserved for a gang that does not want it."""
        assert not node.changed_gpus, "a change is left over"
        for gang in node.gangs.values():
            assert gang.seats, f"{gang.name}: a gang without members"
            assert all(seat.gang_turn.gang is gang and seat.client.gang == gang.name for seat in gang.seats)
            assert all(gpu.gangs.reserved_for is gang for gpu in gang.reserved.values()), f"{gang.name}: reserved twice"
            assert (gang.gathering_since_ns is None) or gang.reserved, f"{gang.name} gathers nothing"
            for gpu in gang.reserved.values():
                wants = members.waits_for_mates(gpu) or coscheduling.next_member(node, gpu, now_ns) is not None
                assert wants, f"{gpu.uuid} is reserved for {gang.name}, and no member waits there"
        for gpu in node.gpus.values():
            assert gpu.gangs.reserved_for is None or gpu.gangs.reserved_for.reserved.get(gpu.uuid) is gpu
        count = sum(client.gang != "" for client in node.clients.values() for _ in client.seats)
        assert count == sum(len(gang.seats) for gang in node.gangs.values()), "a member that its gang does not know"

    def _bound_ns(self, node: Node, gpu: Gpu) -> int | None:
        """The bound that the policy states; with gangs, the one of gangs/coscheduling.py."""
        bound = gpu.policy_guard.wait_bound_ns(len(gpu.seats), gpu.view())
        if bound is None or not node.gangs:
            return bound
        return coscheduling.wait_bound_ns(node, -(-bound // gpu.rules.quantum_ns))

    def _waiting(self, node: Node, gpu: Gpu, now_ns: int) -> None:
        """Invariant 5, on a clock that stands still during drains and moves of memory."""
        clock = gpu.turn_clock_ns(now_ns)
        epoch = (gpu.policy_guard.replaced, gpu.rules.quantum_ns, gpu.rules.sharing, gpu.rules.rank_epoch)
        usual = self._bound_ns(node, gpu)
        here: set[tuple[str, int]] = set()
        for seat in gpu.wait_queue.seats():
            if usual is None or seat.place.demoted or not switching.fits_beside_overdue(gpu, seat):
                continue
            bound = usual if seat.gang_turn.gang is None else usual + coscheduling.deferred_bound_ns(node)
            key = (gpu.uuid, seat.client.client_id)
            here.add(key)
            wait = self._waits.get(key)
            if wait is None or wait.epoch != epoch:
                self._waits[key] = _Wait(clock, epoch, bound)
                continue
            wait.bound_ns = max(wait.bound_ns, bound)
            waited = clock - wait.since_ns
            self.longest_ns = max(self.longest_ns, waited)
            allowed = wait.bound_ns + self.slack_ns * max(1, len(gpu.seats))
            assert waited <= allowed, f"invariant 5: client {key[1]} waited {waited} ns of turns, bound {wait.bound_ns}"
        for key in [key for key in self._waits if key[0] == gpu.uuid and key not in here]:
            del self._waits[key]
