"""The node: everything that the core knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvshare.coordinator.model.client import Client
from nvshare.coordinator.model.commands import Command, Notify
from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.protocol.messages import UNBOUNDED


@dataclass(slots=True, eq=False)
class HostOwner:
    """All clients of one user or slot that ask for host memory.  It goes with the last of them."""

    clients: int = 0
    shared_bytes: int = 0
    """The sum of their shares."""
    refused: int = 0


@dataclass(slots=True, eq=False)
class HostBudget:
    """Pinned host memory of the node.  Changed by engine/memory/host_budget.py."""

    shared_bytes: int = 0
    """The sum of the clients' shares."""
    owners: dict[str, HostOwner] = field(default_factory=dict)
    """By name; owners without clients are removed."""
    reconnected_at_ns: int = 0
    """By this time hooks of an earlier coordinator have connected again and reported what they have."""
    departed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By process: the share of a connection that ended, and until when it is remembered."""
    refused: int = 0


@dataclass(slots=True, eq=False)
class Node:
    """Everything that the core knows, and the commands of the present event."""

    settings: Settings
    clients: dict[int, Client] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    out: list[Command] = field(default_factory=list)
    host: HostBudget = field(default_factory=HostBudget)
    gangs: dict[str, Gang] = field(default_factory=dict)
    queue: dict[str, Gang] = field(default_factory=dict)
    """Gangs that wait for their slots, in order."""
    changed_gpus: dict[str, Gpu] = field(default_factory=dict)
    """Those that the present event concerns: `concern` adds them, and the scheduler acts on them."""
    parking: dict[int, Client] = field(default_factory=dict)
    """Clients that are to be parked and still need something; see engine/parking/parking.py."""
    cannot_park: str = ""
    """Why no client can be parked; "": some may be."""
    own_park_times: set[int] = field(default_factory=set)
    """Clients with a time of their own after which they are parked."""
    stopped: dict[int, Client] = field(default_factory=dict)
    """Clients whose process is stopped; see engine/stopped.py."""
    gang_turns: int = 0
    gang_gathered_ns: int = 0

    def concern(self, gpu: Gpu) -> None:
        """Something has changed that the mechanisms must act on."""
        self.changed_gpus[gpu.uuid] = gpu

    def notify(self, kind: str, **values: int | str | bool | float | None) -> None:
        """Publishes a trace event."""
        self.out.append(Notify(kind, values))

    @property
    def host_budget_bytes(self) -> int:
        """Pinned host memory that all clients may have together.  Shares that are given stay."""
        return self.settings.host_budget_bytes or UNBOUNDED
