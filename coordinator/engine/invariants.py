"""The invariants of the core, checked after each event.

`cheap` looks at one GPU, at a cost that does not grow with its clients, and runs always.  `Thorough` looks at all
records of the GPUs that an event concerns and remembers since when each client waits; tests run it.  A check changes
nothing, and raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nvshare.coordinator.engine.memory import claims, room
from nvshare.coordinator.model.commands import Notify
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, NEXT, OVERDUE, REVOKING, WAITING, WITH_LEASE
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing

LATE_NS: Final = 100_000
"""A timer may be this late at the end of each of the turns of a bound."""
SLACK_NS: Final = MILLISECOND_NS
"""Allowed beside a bound for each client."""


def cheap(gpu: Gpu) -> None:
    """Invariant 1 for this GPU: who holds a lease is in the plan, and in exclusive sharing alone."""
    members = gpu.schedule.members
    if not gpu.schedule.side_by_side:  # these may be many
        unnamed = gpu.leases.running.keys() - members.keys()
        assert not unnamed, f"invariant 1: {gpu.uuid}: clients {unnamed} run, and the plan does not name them"
    exclusive = gpu.settings.sharing is Sharing.EXCLUSIVE
    holders = {seat.client.facts.gang or client for client, seat in gpu.leases.running.items()} if exclusive else ()
    assert len(holders) < 2, f"invariant 1: {gpu.uuid} has a second holder"
    assert gpu.switching.switch is None or gpu.switching.switch.seat.phase is NEXT, (
        f"{gpu.uuid}: the switch has no next client"
    )


@dataclass(slots=True)
class _Wait:
    """Since when, on the GPU's turn clock, a client waits; and the most that its policy has allowed meanwhile."""

    since_ns: int
    epoch: tuple[object, ...]
    bound_ns: int


@dataclass(slots=True)
class _Clock:
    """Time in turns on one GPU, without drains and without time in which no memory came in."""

    turn_clock_ns: int = 0
    """The GPU's turn clock at the last event."""
    own_ns: int = 0
    stands: bool = False
    """A client drains, no memory comes in now, or nobody new is granted."""


class Thorough:
    """All invariants."""

    def __init__(self) -> None:
        self._waits: dict[str, dict[int, _Wait]] = {}
        """Waits by GPU and client."""
        self._clocks: dict[str, _Clock] = {}
        self._shares: dict[int, int] = {}
        """Shares of host memory by client, after the last event."""

    def check(self, node: Node, concerned: Iterable[Gpu], now_ns: int) -> None:
        """Checks everything after an event that concerns these GPUs."""
        for gpu in concerned:
            cheap(gpu)
            assert gpu.leases.running.keys() <= gpu.schedule.members.keys(), f"invariant 1: {gpu.uuid}"
            self._leases(node, gpu)
            self._memory(gpu)
            self._immovable(node, gpu)
        self._advance_clocks(node, now_ns)
        for gpu in node.gpus.values():
            self._waiting(node, gpu)
        self._gangs(node)
        self._host(node)
        for client in node.clients.values():
            for seat in client.seats.values():
                assert seat.gpu.seats.get(client.client_id) is seat, "a seat that its GPU does not know"

    def _leases(self, node: Node, gpu: Gpu) -> None:
        ids = [seat.lease.lease_id for seat in gpu.leases.by_client.values() if not seat.lease.stray]
        assert len(ids) == len(set(ids)), f"{gpu.uuid}: one id for two leases"
        assert all(0 < number < gpu.leases.next_lease_id for number in ids), f"{gpu.uuid}: a lease id from the future"
        for seat in gpu.leases.by_client.values():
            runs = seat.client.client_id in gpu.leases.running
            assert runs == (seat.phase is HOLDING), f"{seat.client.client_id}: running and phase differ"
        for client, seat in gpu.seats.items():
            assert node.clients.get(client) is seat.client, f"invariant 6: gone client {client} has a seat"
            assert (seat.phase in WITH_LEASE) == (client in gpu.leases.by_client), f"{client}: lease and phase differ"
            in_line = seat.phase is WAITING and seat.schedulable
            assert in_line == (seat in gpu.wait_queue), f"{client}: waiting and the wait queue differ"
            assert (seat.phase is OVERDUE) <= (seat.lease.drain_deadline_ns is None)
        assert set(gpu.leases.by_client) <= set(gpu.seats), f"invariant 6: a gone client has a lease on {gpu.uuid}"
        blocked = any(seat.phase is not OVERDUE for seat in gpu.leases.by_client.values())
        if len(gpu.wait_queue) and gpu.switching.switch is None and not gpu.recovering and not blocked:
            # Invariant 10: beside overdue leases only clients wait whose memory does not fit.
            none_fits = not any(claims.fits_beside_overdue(gpu, seat) for seat in gpu.wait_queue.seats())
            idle = gpu.schedule.ask_again_ns is not None or none_fits
            assert idle, f"{gpu.uuid} is free, clients wait, and none is granted"

    def _memory(self, gpu: Gpu) -> None:
        seats = gpu.seats.values()
        assert gpu.memory.resident_bytes == sum(seat.memory.resident_bytes for seat in seats), (
            "invariant 6: sums of memory"
        )
        assert gpu.memory.allocated_bytes == sum(seat.memory.allocated_bytes for seat in seats), (
            "invariant 6: sums of memory"
        )
        claimed = {client: claims.claimed_bytes(seat) for client, seat in gpu.seats.items()}
        assert claimed == {client: seat.memory.claimed_bytes for client, seat in gpu.seats.items()}, "claims of memory"
        assert gpu.memory.claimed_bytes == sum(claimed.values()), "invariant 6: sums of claims"
        needed = [max(claimed[client], seat.memory.allocated_bytes) for client, seat in gpu.seats.items()]
        assert gpu.memory.needed_bytes == sum(needed), "invariant 6: sums of needs"
        assert gpu.memory.host_bytes == sum(seat.memory.host_bytes for seat in seats), "invariant 6: sums of memory"
        assert set(gpu.memory.moving) <= set(gpu.seats), f"invariant 6: memory of a gone client moves on {gpu.uuid}"
        for seat in seats:
            move = seat.moves.move
            assert (move is not None) == (seat.client.client_id in gpu.memory.moving), "the GPU's moves differ"
            told = seat.moves.open.values()
            assert move is not None or not told, "a target that may be obeyed, and no move"
            assert max(told, default=0) <= gpu.memory.capacity_bytes, f"invariant 4: {told}"

    def _immovable(self, node: Node, gpu: Gpu) -> None:
        """Invariant 5 for clients that lack room: they are named, and no other client is unschedulable."""
        whole, seats = gpu.memory.immovable, gpu.seats.values()
        assert whole.bytes == sum(seat.room.immovable_bytes for seat in seats), "invariant 6: sums of immovable memory"
        assert whole.unschedulable == sum(seat.room.unschedulable for seat in seats), (
            "invariant 6: a gone client is unschedulable"
        )
        for seat in room.swapping(gpu):
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
        left, times = node.host_budget_bytes - shared, node.settings.host_fair_times
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

    def _gangs(self, node: Node) -> None:
        """A slot belongs to a gang that wants its GPUs, and every member is known to its gang."""
        assert not node.changed_gpus, "a change is left over"
        for gang in node.gangs.values():
            assert gang.seats, f"{gang.name}: a gang without members"
            assert all(seat.client.facts.gang == gang.name for seat in gang.seats)
            for gpu in gang.gpus.values():
                assert gpu.gang is gang, f"{gpu.uuid}: two slots"
        for gpu in node.gpus.values():
            assert gpu.gang is None or gpu.uuid in gpu.gang.gpus, f"{gpu.uuid}: a slot that is over"
        for name, gang in node.queue.items():
            assert node.gangs.get(name) is gang, f"{name}: a gang without members waits for a slot"
            assert not gang.gpus, f"{name}: waits for a slot and has one"
        count = sum(client.facts.gang != "" for client in node.clients.values() for _ in client.seats)
        assert count == sum(len(gang.seats) for gang in node.gangs.values()), "a member that its gang does not know"

    def _advance_clocks(self, node: Node, now_ns: int) -> None:
        for gpu in node.gpus.values():
            clock, turn_clock_ns = self._clocks.setdefault(gpu.uuid, _Clock()), gpu.turn_clock_ns(now_ns)
            passed_ns, clock.turn_clock_ns = turn_clock_ns - clock.turn_clock_ns, turn_clock_ns
            clock.own_ns += 0 if clock.stands else passed_ns
            recovers = gpu.recovering or gpu.reconnecting(now_ns)
            drains = any(seat.phase is REVOKING for seat in gpu.leases.by_client.values())
            clock.stands = gpu.schedule.held_back or gpu.switching.switch is not None or recovers or drains

    def _waiting(self, node: Node, gpu: Gpu) -> None:
        """Invariant 5, on a clock that stands still while clients drain, and while memory moves or is held back."""
        waits, bound = self._waits.setdefault(gpu.uuid, {}), None
        # Nobody new is granted during recovery.
        if len(gpu.wait_queue) and not gpu.recovering and not node.gangs:
            bound = gpu.policy_guard.wait_bound_ns(len(gpu.seats), gpu.view())
        if bound is None:
            waits.clear()
            return
        read_ns, here = self._clocks[gpu.uuid].own_ns, set[int]()
        epoch = (gpu.policy_guard.replaced, gpu.rules.quantum_ns, gpu.settings.sharing, gpu.rules.rank_epoch)
        for seat in gpu.wait_queue.seats():
            if seat.place.demoted or seat.in_debt or not claims.fits_beside_overdue(gpu, seat):
                continue
            client = seat.client.client_id
            here.add(client)
            wait = waits.get(client)
            if wait is None or wait.epoch != epoch:
                waits[client] = _Wait(read_ns, epoch, bound)
                continue
            wait.bound_ns = max(wait.bound_ns, bound)
            waited = read_ns - wait.since_ns
            turns = max(len(gpu.seats), wait.bound_ns // gpu.rules.quantum_ns)
            allowed = wait.bound_ns + SLACK_NS * max(1, len(gpu.seats)) + LATE_NS * turns
            assert waited <= allowed, f"invariant 5: client {client} waited {waited} ns of turns, bound {wait.bound_ns}"
        for client in waits.keys() - here:
            del waits[client]
