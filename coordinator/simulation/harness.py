"""A test harness for the engine: a manual clock, scripted clients and a scheduler, without sockets.

Time moves only by `Harness.advance`, which fires the engine's timer at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler
from nvshare.coordinator.engine.snapshot import GpuSnapshot, SeatSnapshot
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, Settings
from nvshare.coordinator.protocol import messages

M = TypeVar("M", bound=messages.Message)
GPU = "GPU-0"


def core_settings(**values: Any) -> Settings:
    """Settings; by default turns of 100 ms, and invariants are checked."""
    usual = {"check_invariants": True, "policy": "round_robin", "sharing": messages.Sharing.EXCLUSIVE}
    return Settings(**{"quantum_ns": 100 * MILLISECOND_NS, **usual, **values})


@dataclass(slots=True)
class FakeClock:
    """A manual clock, in ns."""

    now_ns: int = 1_000_000_000

    def advance(self, by_ns: int) -> int:
        """Moves the clock and returns the new time."""
        assert by_ns >= 0
        self.now_ns += by_ns
        return self.now_ns


@dataclass(slots=True, eq=False)
class ScriptedClient:
    """A client controlled by a test, with the messages sent to it."""

    harness: Harness
    client: int
    process_id: int
    inbox: list[messages.Message] = field(default_factory=list)

    def take(self, kind: type[M]) -> list[M]:
        """Removes and returns the messages of this type."""
        found = [message for message in self.inbox if isinstance(message, kind)]
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return found

    def granted(self) -> messages.Grant | None:
        """The grant since the last call, if any.  Asserts that there is at most one."""
        grants = self.take(messages.Grant)
        assert len(grants) <= 1, grants
        return grants[0] if grants else None

    def attach(
        self, uuid: str = GPU, *, gpu: int = 0, lease_id: int = 0, wanted: bool = False, memory: int = 0
    ) -> None:
        """Attaches to a GPU; `memory` bytes are allocated and resident."""
        self.harness.handle(
            events.Received(self.client, messages.AttachGpu(gpu, uuid, 1 << 30, lease_id, wanted, memory, memory, 0))
        )

    def request(self, gpu: int = 0) -> None:
        """Requests the lease."""
        self.harness.handle(events.Received(self.client, messages.Request(gpu)))

    def release(
        self,
        lease_id: int | None = None,
        *,
        gpu: int = 0,
        idle: bool = False,
        drained: bool = True,
        wanted: bool = False,
        drain_ns: int = 0,
        opened_at_ns: int = 0,
    ) -> None:
        """Releases the lease; by default the one in the engine's records."""
        lease = self.seat(gpu).lease_id if lease_id is None else lease_id
        self.harness.handle(
            events.Received(
                self.client,
                messages.Release(
                    gpu,
                    lease,
                    int(messages.ReleaseReason.IDLE if idle else messages.ReleaseReason.REVOKED),
                    drained,
                    wanted,
                    drain_ns,
                    opened_at_ns,
                    1,
                ),
            )
        )

    def report(self, *, allocated: int, resident: int, pinned: int = 0, host: int = 0) -> None:
        """Reports memory."""
        self.harness.handle(events.Received(self.client, messages.MemoryReport(0, allocated, resident, pinned, host)))

    def reserve(self, total: int, *, sequence: int = 1) -> int:
        """Asks for room and returns the resulting reservation."""
        self.harness.handle(events.Received(self.client, messages.ReserveMemory(0, sequence, total)))
        (answer,) = self.take(messages.MemoryReserved)
        assert answer.sequence == sequence
        return answer.bytes

    def moved(self, order_id: int, size: int, *, finished: bool = True, error: int = 0, gpu: int = 0) -> None:
        """Reports progress of a memory order."""
        self.harness.handle(
            events.Received(self.client, messages.MoveProgress(gpu, order_id, size, 1000, finished, error))
        )

    def die(self, *, process_lives: bool = False) -> None:
        """Ends the connection; `process_lives`: the driver has not freed its memory yet."""
        self.harness.handle(events.ClientGone(self.client, process_lives))
        del self.harness.clients[self.client]

    def seat(self, gpu: int = 0) -> SeatSnapshot:
        """The client's seat as seen by the engine."""
        snapshot = self.harness.scheduler.snapshot(self.harness.clock.now_ns)
        (record,) = (client for client in snapshot.clients if client.client == self.client)
        (seat,) = (seat for seat in record.seats if seat.gpu == gpu)
        return seat


class Harness:
    """A scheduler with all checks, a clock, and clients."""

    def __init__(self, policies: PolicyFactory, settings: Settings | None = None, /, **values: Any) -> None:
        self.clock = FakeClock()
        self.scheduler = Scheduler(policies, settings or core_settings(**values))
        self.clients: dict[int, ScriptedClient] = {}
        self.timer_ns: int | None = None
        self.commands: list[commands.Command] = []
        """All commands since the list was last emptied."""
        self._next = 1

    def handle(self, event: events.Event) -> list[commands.Command]:
        """Passes an event to the engine and carries out its commands."""
        out = self.scheduler.handle(event, self.clock.now_ns)
        for command in out:
            if isinstance(command, commands.SetTimer):
                self.timer_ns = command.deadline_ns
            elif isinstance(command, commands.Send):
                # Every message must fit the wire, whatever led to it.
                messages.encode(command.message)
                if command.client in self.clients:
                    self.clients[command.client].inbox.append(command.message)
        self.commands += out
        return out

    def gpu(self, uuid: str = GPU, capacity: int = 1 << 30, **more: int | None) -> None:
        """Adds a GPU."""
        self.handle(events.GpuAdded(uuid, "Simulated", capacity, capacity, **more))  # type: ignore[arg-type]

    def client(
        self,
        name: str = "",
        *,
        attach: bool = True,
        wanted: bool = False,
        memory: int = 0,
        priority: int = 0,
        mode: messages.MemoryMode = messages.MemoryMode.MANAGED,
        limit: int = 0,
        process_id: int | None = None,
        user_id: int = 0,
        weight: int = 1,
        group: str = "",
        gang: str = "",
    ) -> ScriptedClient:
        """Registers a client and attaches it to the first GPU."""
        number = self._next
        self._next += 1
        pid = 1000 + number if process_id is None else process_id
        client = self.clients[number] = ScriptedClient(self, number, pid)
        named = name or f"c{number}"
        self.handle(
            events.ClientRegistered(
                number,
                messages.Hello(1, named, "test", 0, priority, mode, limit, "", weight, gang),
                pid,
                user_id,
                group,
            )
        )
        if attach:
            client.attach(wanted=wanted, memory=memory)
        return client

    def advance(self, by_ns: int) -> None:
        """Lets time pass; the timer fires at its deadlines."""
        end_ns = self.clock.now_ns + by_ns
        fired = 0
        while self.timer_ns is not None and self.timer_ns <= end_ns:
            self.clock.now_ns = max(self.clock.now_ns, self.timer_ns)
            self.timer_ns = None
            self.handle(events.TimerFired())
            fired += 1
            assert fired < 100_000, "the timer fires again and again"
        self.clock.now_ns = end_ns

    def milliseconds(self, count: float) -> None:
        """`advance` in ms."""
        self.advance(round(count * MILLISECOND_NS))

    def gpu_snapshot(self, uuid: str = GPU) -> GpuSnapshot:
        """The GPU as seen by the engine."""
        snapshot = self.scheduler.snapshot(self.clock.now_ns)
        (gpu,) = (gpu for gpu in snapshot.gpus if gpu.uuid == uuid)
        return gpu

    def notifications(self, kind: str) -> list[dict[str, int | str | bool | float | None]]:
        """The values of all trace events of a kind."""
        return [c.values for c in self.commands if isinstance(c, commands.Notify) and c.kind == kind]

    def logged(self, part: str) -> bool:
        """Whether a log line contains `part`."""
        return any(isinstance(c, commands.Log) and part in c.text for c in self.commands)

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until the condition holds; fails after 100 s."""
        for _ in range(100_000):
            if condition():
                return
            self.advance(MILLISECOND_NS)
        raise AssertionError("the condition did not become true")
