"""A client of the engine: what its hook says.  No other module of the virtual node makes events of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nvshare.coordinator.model import events
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, ReleaseReason
from nvshare.scheduler_policies.api import JobClass, Rank


@dataclass(slots=True, eq=False)
class Client:
    """One connection.  `gpu` is the client's own ordinal of a GPU."""

    client: int
    give: Callable[[events.Event], object]
    """Passes an event to the engine."""
    facts: Facts = field(init=False, default_factory=Facts)
    states: dict[int, messages.State] = field(init=False, default_factory=dict)
    """By ordinal: what it said last."""
    targets: dict[int, messages.Target] = field(init=False, default_factory=dict)
    """By ordinal: what it was told last."""

    def say(self, message: messages.Message) -> None:
        """Sends a message."""
        self.give(events.Received(self.client, message))

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
        placement: str = "",
    ) -> None:
        """Says hello."""
        pid = self.client if process_id is None else process_id
        hello = messages.Hello(messages.PROTOCOL_VERSION, name, program, mode, limit, placement)
        self.give(events.ClientRegistered(self.client, hello, pid, user_id, group))
        self.facts = Facts(Rank(priority, weight), limit_bytes=limit, gang=gang)
        if self.facts != Facts():
            self.give(events.Settled(self.client, self.facts))

    def profile(self, job_class: JobClass, deadline_ns: int | None) -> None:
        """Says what the program is."""
        self.facts = self.facts.having(job_class=job_class, deadline_ns=deadline_ns)
        self.give(events.Settled(self.client, self.facts))

    def attach(self, uuid: str, *, gpu: int = 0, lease_id: int = 0, wanted: bool = False, memory: int = 0) -> None:
        """Attaches to a GPU; `memory` bytes are allocated and resident."""
        self.states[gpu] = messages.State(gpu, 0, memory, memory, 0, 0)
        self.targets.pop(gpu, None)
        self.say(messages.AttachGpu(gpu, uuid, lease_id, wanted, memory, memory, 0))

    def request(self, gpu: int = 0) -> None:
        """Requests the lease."""
        self.say(messages.Request(gpu))

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
        why = ReleaseReason.IDLE if idle else ReleaseReason.REVOKED
        self.say(messages.Release(gpu, lease_id, int(why), drained, wanted, drain_ns, opened_at_ns, 1))

    def progress(self, lease_id: int, at_ns: int, work: int, busy_ns: int, watched_ns: int, gpu: int = 0) -> None:
        """Reports work since the start."""
        self.say(messages.Progress(gpu, lease_id, at_ns, work, busy_ns, watched_ns, 0))

    def report(self, *, allocated: int, resident: int, pinned: int = 0, host: int = 0) -> None:
        """Says what it has; with its target it is where it was."""
        self.state(allocated_bytes=allocated, resident_bytes=resident, pinned_bytes=pinned, host_bytes=host)

    def state(self, gpu: int = 0, **changed: Any) -> None:
        """Says what has changed, beside what it said last."""
        last = self.states.get(gpu, messages.State(gpu, 0, 0, 0, 0, 0))
        self.states[gpu] = replace(last, **changed)
        self.say(self.states[gpu])

    def comes_to(self, resident: int, *, gpu: int = 0, at_rest: bool = True, error: int = 0) -> None:
        """Has moved on its way to the newest target, and is at rest there or further on."""
        last, target = self.states[gpu], self.targets.get(gpu)
        moved = resident - last.resident_bytes
        self.state(
            gpu,
            target=target.number if target is not None else 0,
            resident_bytes=resident,
            host_bytes=max(0, last.host_bytes - moved),
            moved_out_bytes=last.moved_out_bytes + max(0, -moved),
            moved_in_bytes=last.moved_in_bytes + max(0, moved),
            moving_ns=last.moving_ns + 1000,
            at_rest=at_rest,
            error=error,
        )

    def obeys(self, gpu: int = 0) -> None:
        """Has come to its newest target."""
        self.comes_to(self.targets[gpu].bytes, gpu=gpu)

    def ask_room(self, total: int, *, lacking: int = 0, gpu: int = 0) -> None:
        """Asks for room for all of its memory."""
        asks = self.states[gpu].asks + 1
        self.state(gpu, asks=asks, total_bytes=total, lacking_bytes=lacking)

    def ask_pins(self, total: int, gpu: int = 0) -> None:
        """Asks to keep this much of its memory immovable."""
        self.state(gpu, asks_pins=self.states[gpu].asks_pins + 1, pins_bytes=total)

    def ask_host(self, total: int) -> None:
        """Asks for a share of the node's host memory."""
        asks = self.states[messages.HOST].asks + 1 if messages.HOST in self.states else 1
        self.state(messages.HOST, asks=asks, total_bytes=total)

    def end(self, *, process_lives: bool = False) -> None:
        """Ends the connection; `process_lives`: the driver has not freed its memory yet."""
        self.give(events.ClientGone(self.client, process_lives))
