"""The picture of the whole core, and of the gangs and owners of host memory in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nvshare.coordinator.engine.snapshot.clients import ClientSnapshot, paged_out, take_client
from nvshare.coordinator.engine.snapshot.gpus import GpuSnapshot, take_gpu
from nvshare.coordinator.memory import host_budget
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.node import Node


@dataclass(frozen=True, slots=True)
class GangSnapshot:
    """One gang.  `turns` and `gathered_ns` are counters."""

    name: str
    clients: tuple[int, ...]
    gpus: tuple[str, ...]
    state: str
    """`running`: in its turn.  `gathering`: its GPUs are being freed.  `due`: its turn has come, its GPUs have not.
    Else `idle`."""
    turns: int
    gathered_ns: int
    """Time for which its GPUs were reserved until all were free."""


@dataclass(frozen=True, slots=True)
class HostOwnerSnapshot:
    """All clients of one user or slot that ask for host memory.  `refused` is a counter while it has clients."""

    owner: str
    """`user 1000`, or `slot NAME`."""
    clients: int
    shared_bytes: int
    spare_bytes: int
    """Host memory that it could be given beyond that now."""
    refused: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at `now_ns`."""

    now_ns: int
    host_budget_bytes: int
    host_shared_bytes: int
    gpus: tuple[GpuSnapshot, ...]
    clients: tuple[ClientSnapshot, ...]
    gangs: tuple[GangSnapshot, ...] = ()
    gang_turns: int = 0
    gang_gathered_ns: int = 0
    """Counters, over all gangs since the start."""
    host_owners: tuple[HostOwnerSnapshot, ...] = ()
    host_refused: int = 0
    """A counter."""


def _gang(node: Node, gang: Gang) -> GangSnapshot:
    state = "due" if gang.name in node.queue else "idle"
    if gang.gpus:
        state = "gathering" if gang.together_ns is None else "running"
    return GangSnapshot(
        name=gang.name,
        clients=tuple(dict.fromkeys(seat.client.client_id for seat in gang.seats)),
        gpus=tuple(dict.fromkeys(seat.gpu.uuid for seat in gang.seats)),
        state=state,
        turns=gang.turns,
        gathered_ns=gang.gathered_ns,
    )


def take(node: Node, now_ns: int) -> Snapshot:
    """The whole core at this time."""
    host, paged = node.host, functools.cache(paged_out)
    return Snapshot(
        now_ns=now_ns,
        host_budget_bytes=node.host_budget_bytes,
        host_shared_bytes=host.shared_bytes,
        gpus=tuple(take_gpu(gpu, paged(gpu), now_ns) for gpu in node.gpus.values()),
        clients=tuple(take_client(client, now_ns, paged) for client in node.clients.values()),
        gangs=tuple(_gang(node, gang) for gang in node.gangs.values()),
        gang_turns=node.gang_turns,
        gang_gathered_ns=node.gang_gathered_ns,
        host_owners=tuple(
            HostOwnerSnapshot(name, of.clients, of.shared_bytes, host_budget.spare_bytes(node, name), of.refused)
            for name, of in host.owners.items()
        ),
        host_refused=host.refused,
    )
