"""A client of the engine: what its hook says.  No other module of the virtual node makes events of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.scheduler_policies.api import JobClass


@dataclass(slots=True, eq=False)
class Client:
    """One connection.  `gpu` is the client's own ordinal of a GPU."""

    client: int
    give: Callable[[events.Event], object]
    """Passes an event to the engine."""

    def register(
        self,
        name: str,
        *,
        program: str = "job",
        process_id: int | None = None,
        user_id: int = 0,
        priority: int = 0,
        mode: MemoryMode = MemoryMode.SWAP,
        limit: int = 0,
        group: str = "",
        weight: int = 1,
        gang: str = "",
    ) -> None:
        """Says hello."""
        pid = self.client if process_id is None else process_id
        rank = (user_id, priority, mode, limit, group, weight, gang)
        self.give(events.ClientRegistered(self.client, name, program, pid, *rank))

    def profile(self, job_class: JobClass, deadline_ns: int | None) -> None:
        """Says what the program is."""
        self.give(events.Profiled(self.client, job_class, 0.0, 1.0, deadline_ns, False))

    def attach(self, uuid: str, *, gpu: int = 0, lease_id: int = 0, wanted: bool = False, memory: int = 0) -> None:
        """Attaches to a GPU; `memory` bytes are allocated and resident."""
        self.give(events.GpuAttached(self.client, gpu, uuid, lease_id, wanted, memory, memory))

    def request(self, gpu: int = 0) -> None:
        """Requests the lease."""
        self.give(events.Requested(self.client, gpu))

    def release(
        self,
        lease_id: int,
        *,
        gpu: int = 0,
        idle: bool = False,
        drained: bool = True,
        wanted: bool = False,
        drain_ns: int = 0,
        opened_at_ns: int = 0,
    ) -> None:
        """Returns the lease."""
        self.give(events.Released(self.client, gpu, lease_id, idle, drained, wanted, drain_ns, opened_at_ns, 1))

    def progress(self, lease_id: int, at_ns: int, work: int, busy_ns: int, watched_ns: int, gpu: int = 0) -> None:
        """Reports work since the start."""
        self.give(events.Progressed(self.client, gpu, lease_id, at_ns, work, busy_ns, watched_ns, steps=0))

    def report(self, *, allocated: int, resident: int, pinned: int = 0, host: int = 0) -> None:
        """Reports memory."""
        self.give(events.MemoryReported(self.client, 0, allocated, resident, pinned, host))

    def ask_room(self, total: int, sequence: int) -> None:
        """Asks for room for all of its memory."""
        self.give(events.ReservationAsked(self.client, 0, sequence, total))

    def moved(
        self,
        order_id: int,
        size: int,
        *,
        finished: bool = True,
        error: int = 0,
        gpu: int = 0,
        elapsed_ns: int = 1000,
    ) -> None:
        """Reports progress of a memory order."""
        self.give(events.MoveProgressed(self.client, gpu, order_id, size, elapsed_ns, finished, error))

    def end(self, *, process_lives: bool = False) -> None:
        """Ends the connection; `process_lives`: the driver has not freed its memory yet."""
        self.give(events.ClientGone(self.client, process_lives))
