"""The engine with every check on, a manual clock and scripted clients, for tests of the core.

Time moves only by `Harness.advance`, which fires the engine's timer at its deadline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from nvshare.bench.virtual_node.client import Client
from nvshare.bench.virtual_node.clock import Clock
from nvshare.bench.virtual_node.world import Plan, World, core_settings
from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler
from nvshare.coordinator.engine.snapshot import GpuSnapshot, SeatSnapshot
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Settings
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.registry import create

M = TypeVar("M", bound=messages.Message)
GPU = "GPU-0"
SEEDS = int(os.environ.get("NVSHARE_TEST_SEEDS", "1"))
"""How many times the seeds of CI a run of the random worlds takes; the soak takes new ones."""


@dataclass(slots=True, eq=False)
class ScriptedClient(Client):
    """A client controlled by a test, with the messages sent to it."""

    harness: Harness
    process_id: int
    inbox: list[messages.Message] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    pin_answers: list[int] = field(default_factory=list)

    def hears(self, message: messages.Message) -> None:
        """Keeps a message for the test: of a `Target` what is new in it."""
        if isinstance(message, messages.Target):
            last = self.targets.get(message.gpu, messages.Target(message.gpu, 0, 0))
            self.targets[message.gpu] = message
            self.answers += [message.total_bytes] if message.answers != last.answers else []
            self.pin_answers += [message.pins_bytes] if message.answers_pins != last.answers_pins else []
            if message.number == last.number:
                return
        self.inbox.append(message)

    def reserved(self) -> list[int]:
        """The answers to its questions for room, or for host memory, since the last call."""
        found, self.answers = self.answers, []
        return found

    def pins_reserved(self) -> list[int]:
        """The answers to its questions for pins since the last call."""
        found, self.pin_answers = self.pin_answers, []
        return found

    def told(self) -> list[int]:
        """How much memory it was told to have, by each target since the last call."""
        return [target.bytes for target in self.take(messages.Target)]

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

    def lease(self) -> int:
        """Id of the lease granted since the last call; 0 if there is none."""
        grant = self.granted()
        return grant.lease_id if grant else 0

    def attach(self, uuid: str = GPU, **more: Any) -> None:
        """Attaches to the first GPU, or another one."""
        Client.attach(self, uuid, **more)

    def release(self, lease_id: int | None = None, *, gpu: int = 0, **more: Any) -> None:
        """Returns the lease; by default the one in the engine's records."""
        lease = self.seat(gpu).lease_id if lease_id is None else lease_id
        Client.release(self, lease, gpu=gpu, **more)

    def reserve(self, total: int) -> int:
        """Asks for room and returns the resulting reservation."""
        self.ask_room(total)
        (reserved,) = self.reserved()
        assert self.targets[0].answers == self.states[0].asks
        return reserved

    def die(self, *, process_lives: bool = False) -> None:
        """Ends the connection; `process_lives`: the driver has not freed its memory yet."""
        self.end(process_lives=process_lives)
        del self.harness.clients[self.client]

    def seat(self, gpu: int = 0) -> SeatSnapshot:
        """The client's seat as seen by the engine."""
        record = self.harness.scheduler.client_snapshot(self.client, self.harness.clock.now_ns)
        assert record is not None
        (seat,) = (seat for seat in record.seats if seat.gpu == gpu)
        return seat


class Harness:
    """A scheduler with all checks, a clock, and clients."""

    def __init__(self, policies: PolicyFactory, settings: Settings | None = None, /, **values: Any) -> None:
        self.clock = Clock()
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
                    self.clients[command.client].hears(command.message)
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
        resident: int | None = None,
        host: int = 0,
        mode: messages.MemoryMode = messages.MemoryMode.MANAGED,
        process_id: int | None = None,
        **rank: Any,
    ) -> ScriptedClient:
        """Registers a client and attaches it to the first GPU; `resident`, `host`: bytes that it then reports."""
        number = self._next
        self._next += 1
        pid = 1000 + number if process_id is None else process_id
        client = self.clients[number] = ScriptedClient(number, self.handle, self, pid)
        client.register(name or f"c{number}", program="test", process_id=pid, mode=mode, **rank)
        if attach:
            client.attach(wanted=wanted, memory=memory)
        if resident is not None:
            client.report(allocated=resident + host, resident=resident, host=host)
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
        """Lets time pass, from one deadline of the timer to the next, until the condition holds; fails after 100 s."""
        end_ns = self.clock.now_ns + 100 * SECOND_NS
        while not condition():
            assert self.timer_ns is not None, "nothing is due, so the condition does not become true"
            assert self.clock.now_ns < end_ns, "the condition did not become true"
            self.advance(max(0, self.timer_ns - self.clock.now_ns))


def one_gpu(capacity: int = 1 << 30, **settings: Any) -> Harness:
    """A harness with one GPU."""
    harness = Harness(create, **settings)
    harness.gpu(capacity=capacity)
    return harness


def contended(count: int = 2, /, **settings: Any) -> tuple[Any, ...]:
    """A harness with one GPU, and that many scripted clients that want it; the first one holds the lease."""
    harness = one_gpu(**settings)
    return harness, *(harness.client(wanted=True) for _ in range(count))


def play_turn(harness: Harness, drain_ms: float = 0.0) -> int:
    """The holder has its turn until it is revoked, drains, and wants the lease again.  Returns its client."""
    (holder,) = harness.gpu_snapshot().leases.holders
    harness.until(lambda: harness.clients[holder].seat().phase == "revoking")
    harness.milliseconds(drain_ms)
    harness.clients[holder].release(wanted=True)
    return holder


def live(seed: int, plan: Plan, settings: Settings) -> World:
    """Runs a world.  The note of a failure says what runs it again."""
    world = World(seed, plan, create, settings)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"seed {seed}, {plan}, {settings}")
        raise
    return world


def steps(action: Callable[[], object]) -> int:
    """Steps of the interpreter that the action takes: its cost, whatever else the machine does."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
