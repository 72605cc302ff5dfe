"""Memory of a gang's members: two GPUs on which more is allocated than fits, in virtual time.

On the second GPU the gang and one other take turns, on the first one the gang and two others.  There the policy has
each of them in its order, while the gang comes with each of its turns on the second GPU, twice as often.
"""

from __future__ import annotations

from functools import partial

import pytest

from nvshare.bench.virtual_node.link import Link
from nvshare.bench.virtual_node.node import FOREVER_NS, Job, VirtualNode
from nvshare.bench.virtual_node.world import core_settings
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS

GIB = 1 << 30
CAPACITY, SIZE = 420 * GIB // 100, 189 * GIB // 100
"""45 ms for each move while the other direction is at work, and room for two."""


@pytest.mark.parametrize("policy", ["round_robin", "fair_share"])
def test_memory_of_a_gang_moves(policy: str) -> None:
    """Broken: a gang would wait for memory at most of its turns, or nothing of it would move while others compute."""
    jobs = [Job("pair", 0, FOREVER_NS, memory_bytes=SIZE, gpus=2)]
    jobs += [Job(f"other{n}", 0, FOREVER_NS, memory_bytes=SIZE) for n in range(3)]
    settings = core_settings(policy=policy, quantum_ns=200 * MILLISECOND_NS)
    node = VirtualNode(jobs, 2, CAPACITY, settings, link=partial(Link, piece_bytes=64 << 20))
    node.run_until(node.now_ns + 10 * SECOND_NS)
    snapshot = node.scheduler.snapshot(node.now_ns)
    moves = next(gpu.moves for gpu in snapshot.gpus if gpu.clients == 3)
    assert snapshot.gang_turns >= 12
    assert moves.restored_bytes > 12 * SIZE
    assert moves.hidden_move_ns > moves.exposed_move_ns, f"{moves}, {snapshot.gang_turns} turns"
    for client in snapshot.clients:
        for seat in client.seats:
            assert seat.statistics.leases >= 10, f"client {client.client} starves"
