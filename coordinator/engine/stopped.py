"""Programs that are stopped by SIGSTOP or a debugger, while others wait.

Once a second the shell looks at the processes that others wait for (`watched`).

Rules:
- A stopped client is not schedulable, and its memory is not waited for.
- While others wait its lease is revoked.  If it is still stopped at the next look, its drain is overdue: others run
  beside it.  With an `overdue_action`, which may end it, `drain_deadline` stands.
- A stopped holder of an earlier coordinator's lease may still have its gate open: the recovery begins anew when it
  continues.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from nvshare.coordinator.engine import reconcile
from nvshare.coordinator.model.client import Client
from nvshare.coordinator.model.commands import Log
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, REVOKING
from nvshare.coordinator.model.settings import OverdueAction

NEAR: Final = 16
"""So many waiting clients of a GPU are looked at, in turn order."""


def wants_looks(node: Node) -> bool:
    """Something is to be done once a second.  O(GPUs)."""
    return bool(node.stopped) or any(gpu.is_waited_for or gpu.recovering for gpu in node.gpus.values())


def watched(node: Node) -> set[int]:
    """The processes to look at: earlier holders, and those of `_clients`."""
    holders = {gpu.recovery.expected_holder or 0 for gpu in node.gpus.values()}
    return holders.union(client.identity.process_id for client in _clients(node))


def _clients(node: Node) -> list[Client]:
    """Stopped clients, and those that others wait for or that come next."""
    found = dict(node.stopped)
    for gpu in (gpu for gpu in node.gpus.values() if gpu.is_waited_for):
        switch, near = gpu.switching.switch, gpu.wait_queue.seats()[:NEAR]
        seats = [*gpu.leases.by_client.values(), *gpu.memory.moving.values(), *near, *([switch.seat] if switch else [])]
        found |= {seat.client.client_id: seat.client for seat in seats}
    return list(found.values())


def look(node: Node, stopped: Collection[int], now_ns: int) -> None:
    """These processes of `watched` are stopped, the others are not."""
    for gpu in node.gpus.values():
        recovery, holder = gpu.recovery, gpu.recovery.expected_holder
        had, recovery.holder_stopped = recovery.holder_stopped, holder in stopped
        if recovery.holder_stopped and not had:
            text = f"{gpu.uuid}: process {holder}, which holds its lease, is stopped; nothing is granted until it goes"
            node.out.append(Log(logging.WARNING, f"{text} on (kill -CONT) or ends"))
        if holder is not None and (had or recovery.holder_stopped):
            recovery.deadline_ns = now_ns + node.settings.recovery_ns
            node.concern(gpu)
    for client in _clients(node):
        was, client.stopped = client.stopped, client.identity.process_id in stopped
        node.stopped.pop(client.client_id, None)
        if client.stopped:
            node.stopped[client.client_id] = client
        for seat in client.seats.values() if was or client.stopped else ():
            node.concern(seat.gpu)
            seat.gpu.schedule.stale, move = True, seat.moves.move
            if not client.stopped:
                reconcile.readmit(seat, now_ns)
                if move is not None:
                    move.stalled, move.heard_ns = False, now_ns
            elif seat.phase is not HOLDING or seat.gpu.is_waited_for:
                reconcile.withdraw(node, seat, "stopped", now_ns)
                if was and seat.phase is REVOKING and node.settings.overdue_action is OverdueAction.NOTHING:
                    seat.lease.drain_deadline_ns = now_ns
