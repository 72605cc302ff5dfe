"""Memory of a gang's members: two GPUs on which more is allocated than fits, moved at a steady rate, no chance at all.

On the first GPU the gang and one other take turns, on the second one the gang and two others.  There the policy has
each of them in its order, while the gang comes with each of its turns on the first GPU, twice as often.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nvshare.coordinator.model.settings import MILLISECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.harness import Harness, ScriptedClient
from nvshare.coordinator.simulation.programs.side import Move
from nvshare.scheduler_policies.registry import create

A, B = "GPU-0", "GPU-1"
CAPACITY, SIZE, PER_MS = 1000, 450, 10
QUANTUM_MS = 200


@dataclass(slots=True)
class Member:
    """A client that always wants its GPU, and what it has there."""

    client: ScriptedClient
    resident: int = 0
    move: Move | None = None

    def report(self) -> None:
        """Figures."""
        self.client.report(allocated=SIZE, resident=self.resident, host=SIZE - self.resident)

    def step(self) -> None:
        """A millisecond: obey, and move as much as the link takes."""
        for revoke in self.client.take(messages.Revoke):
            self.client.release(revoke.lease_id, wanted=True)
        for out in self.client.take(messages.Evict):
            self.move = Move(True, out.order_id, out.bytes, out.bytes)
        for back in self.client.take(messages.Restore):
            self.move = Move(False, back.order_id, back.bytes, back.credit_bytes)
        for more in self.client.take(messages.MoveCredit):
            if self.move is not None and self.move.order_id == more.order_id:
                self.move.credit = more.credit_bytes
        if self.client.take(messages.Grant):
            self.move = None
        if self.move is not None:
            self._move(self.move)

    def _move(self, move: Move) -> None:
        there = self.resident if move.evict else SIZE - self.resident
        size = min(PER_MS, move.credit - move.moved, there)
        self.resident += -size if move.evict else size
        move.moved += size
        finished = move.moved >= move.size or there == size
        if finished:
            self.move = None
        if size or finished:
            self.report()
            self.client.moved(move.order_id, move.moved, finished=finished)


def live(milliseconds: int, policy: str) -> Harness:
    """The world described above."""
    harness = Harness(create, policy=policy, quantum_ns=QUANTUM_MS * MILLISECOND_NS)
    members = []
    for uuid in (A, B):
        harness.gpu(uuid, capacity=CAPACITY)
    for uuid, gang in ((A, "pair"), (A, ""), (B, "pair"), (B, ""), (B, "")):
        client = harness.client(attach=False, gang=gang, mode=messages.MemoryMode.SWAP)
        client.attach(uuid)
        member = Member(client, SIZE if harness.gpu_snapshot(uuid).memory.resident_bytes + SIZE <= CAPACITY else 0)
        member.report()
        client.request()
        members.append(member)
    for _ in range(milliseconds):
        harness.milliseconds(1)
        for member in members:
            member.step()
        for uuid in (A, B):
            assert harness.gpu_snapshot(uuid).memory.resident_bytes <= CAPACITY, "invariant 4"
    return harness


@pytest.mark.parametrize("policy", ["round_robin", "fair_share"])
def test_memory_of_a_gang_moves(policy: str) -> None:
    """Broken: a gang would wait for memory at most of its turns, or nothing of it would move while others compute."""
    harness = live(10_000, policy)
    snapshot = harness.scheduler.snapshot(harness.clock.now_ns)
    moves = harness.gpu_snapshot(B).moves
    assert snapshot.gang_turns >= 12
    assert moves.restored_bytes > 12 * SIZE
    assert moves.hidden_move_ns > moves.exposed_move_ns, f"{moves}, {snapshot.gang_turns} turns"
    for client in snapshot.clients:
        for seat in client.seats:
            assert seat.statistics.leases >= 10, f"client {client.client} starves"
