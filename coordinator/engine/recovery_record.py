"""What the journal must say of a GPU, so that the next coordinator knows for whom to wait.

Invariants: whoever may be at work on the GPU when this coordinator dies is covered: a sole holder by its process,
several by `MANY_HOLDERS`, and during recovery those for whom this coordinator waits itself.  Overdue and stray leases
beside a holder are not: they are told to stop already, and their claim makes them stray again.  Nothing is written
twice.  A lease that ends is written with the grant that follows: each write delays the hand-over.

May not go here: the file (system/journal.py).
"""

from __future__ import annotations

from nvshare.coordinator.model.commands import MANY_HOLDERS, RecordLease
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.protocol.messages import Sharing


def _process_to_wait_for(gpu: Gpu) -> int:
    leases = gpu.leases.by_client
    if gpu.recovery.expected_holder is not None:
        others = any(not seat.lease.stray for seat in leases.values())
        return MANY_HOLDERS if others else gpu.recovery.expected_holder
    if not leases:
        return 0
    if gpu.rules.sharing is Sharing.CONCURRENT:
        return MANY_HOLDERS
    if gpu.leases.holder is not None:
        return gpu.leases.holder.client.identity.process_id
    if len(leases) > 1:
        return MANY_HOLDERS
    return next(iter(leases.values())).client.identity.process_id


def record(node: Node, gpu: Gpu) -> None:
    """Write it if it has changed.  Called before a grant is sent, and whenever leases, sharing or recovery end."""
    entry = (gpu.leases.next_lease_id - 1, _process_to_wait_for(gpu))
    if entry != gpu.recovery.recorded:
        gpu.recovery.recorded = entry
        node.out.append(RecordLease(gpu.uuid, *entry))
