"""The core: `handle(event, now_ns) -> commands` is the only thing that changes it.

Rules:
- No clock, socket, thread or randomness: the same events at the same times lead to the same commands, so a log of
  events replays.
- A client that breaks the protocol (an ordinal that it has not attached, a lease that it does not have, a second
  hello, a target that it was not told) causes `RemoteProtocolError`, before anything has changed.  The shell then
  disconnects that client and reports `ClientGone`.
- A request that is correct and cannot be met (an unknown GPU, too many clients) is answered with `Rejected`.  After
  `Rejected(final)` to a hello the client is not registered.
- A mistake of the core raises `InvariantError` with the event log.
- There is one timer, for the earliest deadline of all GPUs.  It is set only while a deadline exists.

Non-goals: plans (planning.py), leases (leases.py, reconcile.py), memory (memory/), commands of the operator
(operator_commands.py).  docs/explanation/architecture.md has a table of the mechanisms and their entrances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from nvshare.coordinator.engine import invariants, leases, operator_commands, progress, reconcile, recovery, stopped
from nvshare.coordinator.engine.event_log import EventLog, InvariantError, freeze, thaw
from nvshare.coordinator.engine.gangs import slots
from nvshare.coordinator.engine.memory import admission, checks, claims, host_budget, moves, pinning
from nvshare.coordinator.engine.memory.quantum import automatic_quantum_ns
from nvshare.coordinator.engine.parking import migration, parking
from nvshare.coordinator.engine.policy_guard import PolicyFactory, PolicyGuard
from nvshare.coordinator.engine.snapshot import (
    ClientSnapshot,
    RefusalSnapshot,
    Snapshot,
    WaitSnapshot,
    take,
    take_client,
    take_refusal,
    take_wait,
)
from nvshare.coordinator.model import events
from nvshare.coordinator.model.client import Client, Identity
from nvshare.coordinator.model.commands import Command, ParkingOver, Send, SetTimer
from nvshare.coordinator.model.gpu import Gpu, GpuLeases, GpuRules, Recovery
from nvshare.coordinator.model.memory import GpuMemory
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.placement import parse_placement
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.model.seat import Seat
from nvshare.coordinator.model.settings import RECONNECT_NS, OverdueAction, Settings
from nvshare.coordinator.protocol.messages import (
    HOST,
    AttachGpu,
    MemoryMode,
    Message,
    ParkAnswer,
    Progress,
    Rejected,
    Rejection,
    Release,
    RemoteProtocolError,
    Request,
    State,
    Welcome,
)

MOST_ROUNDS: Final = 100
"""More than slots need at one moment: each GPU joins or leaves one a few times."""

__all__ = ["InvariantError", "OverdueAction", "PolicyFactory", "Scheduler", "Settings"]


class Scheduler:
    """The core's state and its entry points.  `policy_factory(name, uuid)` makes policies; it knows `round_robin`.

    `cannot_park`: why this machine parks no program; "": it may.
    """

    def __init__(
        self, policy_factory: PolicyFactory, settings: Settings | None = None, *, cannot_park: str = ""
    ) -> None:
        self._factory = policy_factory
        self._node = Node(settings or Settings(), cannot_park=cannot_park)
        self._event_log = EventLog(self._node.settings.event_log_length)
        self._thorough = invariants.Thorough() if self._node.settings.check_invariants else None
        self._now_ns = 0
        self._deadlines: dict[str, int | None] = {}
        self._timer_ns: int | None = None
        self._begin_log_part()
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            events.GpuAdded: self._gpu_added,
            events.ClientRegistered: self._registered,
            events.Received: self._received,
            events.ClientGone: self._gone,
            events.ProcessEnded: self._process_ended,
            events.MemoryChecked: lambda event, now: checks.checked(self._node, event, now),
            events.TimerFired: self._timer_fired,
            events.Settled: self._settled,
            events.Saved: lambda event, now: parking.saved(self._node, event, now),
            events.Restored: lambda event, now: migration.restored(self._node, event, now),
            events.Look: self._look,
            events.Set: lambda event, now: operator_commands.set_value(self._node, event, now),
        }

    @property
    def settings(self) -> Settings:
        """The settings of the node as they are now."""
        return self._node.settings

    @property
    def wants_looks(self) -> bool:
        """Whether `events.Look` is due each second."""
        return self._node.settings.rebalance or parking.wants_looks(self._node) or stopped.wants_looks(self._node)

    @property
    def watched(self) -> set[int]:
        """The processes that `events.Look` is to tell of."""
        return stopped.watched(self._node)

    @property
    def event_log(self) -> EventLog:
        """The last events and their commands."""
        return self._event_log

    def _begin_log_part(self) -> None:
        """Begins a part of the log.  The copy of the state costs about 40 us a client, hence the length of a part."""
        node = self._node
        node.out = []
        state = freeze((node, self._deadlines, self._timer_ns, self._now_ns, self._thorough))
        self._event_log.begin(self._now_ns, state, at_least=8 * len(node.clients))

    def load(self, state: bytes) -> None:
        """Takes over a state from an event log, settings included, for a replay.

        A policy of another package begins afresh.  Raises ValueError for what is no state.
        """
        self._node, self._deadlines, self._timer_ns, self._now_ns, self._thorough = thaw(state)
        for gpu in self._node.gpus.values():
            gpu.policy_guard.loaded(self._factory)
        self._event_log = EventLog(self._node.settings.event_log_length)
        self._begin_log_part()

    def client_snapshot(self, client: int, now_ns: int) -> ClientSnapshot | None:
        """One client; None when it is not registered."""
        found = self._node.clients.get(client)
        return None if found is None else take_client(found, max(now_ns, self._now_ns))

    def wait_snapshot(self, client: int, ordinal: int) -> WaitSnapshot | None:
        """Why a client waits for a GPU; None when it does not.  Raises RemoteProtocolError for a GPU not attached."""
        return take_wait(self._node, self._seat(self._client(client), ordinal))

    def refusal_snapshot(self, client: int, uuid: str) -> RefusalSnapshot:
        """Why a client gets no more memory on this GPU."""
        return take_refusal(self._node, self._node.clients[client], uuid)

    def snapshot(self, now_ns: int) -> Snapshot:
        """A frozen picture; O(clients)."""
        return take(self._node, max(now_ns, self._now_ns))

    def handle(self, event: events.Event, now_ns: int) -> list[Command]:
        """Handles one event; returns commands in the order in which the shell must carry them out.

        A time before the last one counts as the last one.  Raises RemoteProtocolError when a client broke the protocol,
        with nothing changed, and InvariantError for a mistake of the core.
        """
        node = self._node
        if self._event_log.full:
            self._begin_log_part()
        self._now_ns = now_ns = max(now_ns, self._now_ns)
        out: list[Command] = []
        node.out = out
        try:
            self._handlers[type(event)](event, now_ns)
            if node.parking:
                parking.advance(node, now_ns)
            gpus = self._advance_all(now_ns)
            for gpu in gpus.values():
                gpu.leases.free_since_ns = None  # no lease followed at once: no hand-over to measure
                leases.record(node, gpu)
                self._deadlines[gpu.uuid] = reconcile.deadline_ns(node, gpu, now_ns)
                invariants.cheap(gpu)
            self._set_timer(out, fired=type(event) is events.TimerFired)
            self._event_log.record(now_ns, event, out)
            if self._thorough is not None:
                self._thorough.check(node, gpus.values(), now_ns)
        except RemoteProtocolError as error:
            self._event_log.record(now_ns, event, error)
            raise
        except Exception as error:
            self._event_log.record(now_ns, event, error)
            raise InvariantError(f"{type(error).__name__}: {error}", self._event_log) from error
        return out

    def _advance_all(self, now_ns: int) -> dict[str, Gpu]:
        """Acts on the GPUs that the event concerns, until it concerns no more.  Returns them."""
        node, seen = self._node, dict[str, Gpu]()
        for _ in range(MOST_ROUNDS):
            if node.gangs:  # first of all, or a plan would still follow a slot that has ended
                slots.advance(node, now_ns)
            changed, node.changed_gpus = node.changed_gpus, {}
            if not changed:
                return seen
            seen.update(changed)
            for gpu in changed.values():
                self._advance(gpu, now_ns)
        raise AssertionError("the slots of gangs do not come to rest")

    def _advance(self, gpu: Gpu, now_ns: int) -> None:
        pinning.update(self._node, gpu, now_ns)
        reconcile.advance(self._node, gpu, now_ns)
        while gpu.memory.immovable.stale:  # a question for room was answered: others have more or less of it
            pinning.update(self._node, gpu, now_ns)
            reconcile.advance(self._node, gpu, now_ns)

    def _set_timer(self, out: list[Command], *, fired: bool) -> None:
        due = [deadline for deadline in self._deadlines.values() if deadline is not None]
        timer_ns = min(due) if due else None
        if timer_ns != self._timer_ns or (fired and timer_ns is not None):
            self._timer_ns = timer_ns
            out.append(SetTimer(timer_ns))

    # --- the shell's own events ---------------------------------------------------------------------------------------

    def _gpu_added(self, event: events.GpuAdded, now_ns: int) -> None:
        settings = self._node.settings
        assert event.uuid not in self._node.gpus, f"{event.uuid} was added already"
        next_lease_id = max(1, event.next_lease_id)
        gpu = Gpu(
            uuid=event.uuid,
            name=event.name,
            settings=settings,
            policy_guard=PolicyGuard(
                event.uuid, settings.policy, self._factory(settings.policy, event.uuid), self._factory
            ),
            rules=GpuRules(),
            recovery=Recovery(
                expected_holder=event.expected_holder,
                deadline_ns=now_ns + settings.recovery_ns,
                reconnected_at_ns=now_ns + RECONNECT_NS if event.next_lease_id > 1 else 0,
                survivors=event.expected_holder is not None,
                recorded=(next_lease_id - 1, event.expected_holder or 0),
            ),
            leases=GpuLeases(next_lease_id),
            memory=GpuMemory(event.total_bytes, event.capacity_bytes, event.integrated),
        )
        gpu.rules.quantum_ns = settings.quantum_ns or automatic_quantum_ns(gpu)
        self._node.gpus[event.uuid] = gpu
        self._node.host.reconnected_at_ns = now_ns + RECONNECT_NS
        self._node.notify(
            "gpu",
            uuid=gpu.uuid,
            name=gpu.name,
            capacity_bytes=gpu.memory.capacity_bytes,
            quantum_ns=gpu.rules.quantum_ns,
            automatic=settings.quantum_ns is None,
            policy=gpu.policy_guard.name,
        )
        self._node.concern(gpu)

    def _timer_fired(self, event: events.TimerFired, now_ns: int) -> None:
        for uuid, deadline in self._deadlines.items():
            if deadline is not None and deadline <= now_ns:
                self._node.concern(self._node.gpus[uuid])

    def _look(self, event: events.Look, now_ns: int) -> None:
        stopped.look(self._node, event.stopped, now_ns)
        parking.look(self._node, now_ns)
        migration.look(self._node, now_ns)

    # --- clients' events ----------------------------------------------------------------------------------------------

    def _registered(self, event: events.ClientRegistered, now_ns: int) -> None:
        node = self._node
        if event.client in node.clients:
            raise RemoteProtocolError("a second hello on one connection")
        if len(node.clients) >= node.settings.max_clients:
            text = f"{len(node.clients)} clients are connected, and no more are allowed (max_clients)"
            node.out.append(Send(event.client, Rejected(int(Rejection.TOO_MANY_CLIENTS), True, text)))
            return
        hello = event.hello
        client = node.clients[event.client] = Client(
            client_id=event.client,
            identity=Identity(
                hello.name, hello.program, event.process_id, event.user_id, event.group, event.allocation
            ),
            memory_mode=MemoryMode(hello.memory_mode),
            memory_auto=hello.memory_auto,
            registered_at_ns=now_ns,
            facts=Facts(),
            time_owner="",
            placement=parse_placement(hello.placement),
        )
        client.time_owner = client.owner if node.settings.users_first else ""
        node.out.append(Send(event.client, Welcome(event.client)))
        node.notify(
            "registered",
            client=event.client,
            name=hello.name,
            program=hello.program,
            process=event.process_id,
            user=event.user_id,
        )

    def _received(self, event: events.Received, now_ns: int) -> None:
        client, message = self._client(event.client), event.message
        if type(message) is State and message.gpu == HOST:
            host_budget.ask(self._node, client, message, now_ns)
        elif (handle := _OF_SEAT.get(type(message))) is not None:
            seat = self._seat(client, message.gpu)  # type: ignore[attr-defined]
            handle(self._node, seat, message, now_ns)
            if type(message) is not Progress:
                self._node.concern(seat.gpu)
        else:
            _OF_CLIENT[type(message)](self._node, client, message, now_ns)

    def _settled(self, event: events.Settled, now_ns: int) -> None:
        operator_commands.settle(self._node, self._client(event.client), event.facts, now_ns)

    def _gone(self, event: events.ClientGone, now_ns: int) -> None:
        client = self._node.clients.pop(event.client, None)
        if client is None:  # never registered, or refused
            return
        for seat in client.seats.values():
            size = seat.memory.claimed_bytes if event.process_lives else 0
            exported = seat.memory.pinned_bytes if client.memory_mode is MemoryMode.SWAP else 0
            leases.client_left(self._node, seat.gpu, seat, now_ns)
            claims.outlive_client(self._node, seat, size, exported, now_ns)
        host_budget.client_left(self._node, client, now_ns)
        self._node.parking.pop(event.client, None)
        self._node.out.append(ParkingOver(event.client))
        self._node.stopped.pop(event.client, None)
        self._node.own_park_times.discard(event.client)
        self._node.notify("gone", client=event.client, name=client.identity.name)
        for gpu in [seat.gpu for seat in client.seats.values()]:
            self._node.concern(gpu)
            if not gpu.seats:
                self._node.notify("free", uuid=gpu.uuid)

    def _process_ended(self, event: events.ProcessEnded, now_ns: int) -> None:
        for gpu in self._node.gpus.values():
            expected = gpu.recovery.expected_holder == event.process_id
            if expected:
                gpu.recovery.expected_holder = None
            if checks.process_ended(self._node, gpu, event.process_id) or expected:
                self._node.concern(gpu)

    def _client(self, client: int) -> Client:
        record = self._node.clients.get(client)
        if record is None:
            raise RemoteProtocolError("speaks before it said hello")
        return record

    def _seat(self, client: Client, ordinal: int) -> Seat:
        seat = client.seats.get(ordinal)
        if seat is None:
            raise RemoteProtocolError(f"GPU {ordinal} is not attached")
        return seat


def _attach(node: Node, client: Client, message: AttachGpu, now_ns: int) -> None:
    recovery.attach(node, client, message, now_ns)
    if message.wanted:
        parking.requested(node, client)


def _request(node: Node, seat: Seat, now_ns: int) -> None:
    leases.request(node, seat, now_ns)
    parking.requested(node, seat.client)


def _state(node: Node, seat: Seat, message: State, now_ns: int) -> None:
    moves.heard(node, seat, message, now_ns)
    seat.memory.released_bytes, seat.memory.prepared_bytes = message.released_bytes, message.prepared_bytes
    checks.reported(node, seat)
    if message.linked and not seat.client.linked:
        seat.client.linked = True
        operator_commands.settle(node, seat.client, seat.client.facts, now_ns)
    asked, pins_asked = seat.moves.asked
    seat.moves.asked = message.asks, message.asks_pins
    if message.asks_pins != pins_asked:
        pinning.ask(node, seat, message.pins_bytes, now_ns)
    if message.asks != asked:
        admission.ask(node, seat, message, now_ns)
    elif asked and message.total_bytes < seat.memory.reserved_bytes and seat.memory.growth is None:
        admission.give_back(seat, message.total_bytes)


_OF_SEAT: Final[dict[type[Message], Callable[[Node, Seat, Any, int], None]]] = {
    Request: lambda node, seat, _, now_ns: _request(node, seat, now_ns),
    Release: leases.release,
    Progress: progress.report,
    State: _state,
}
"""Messages about a GPU that the client has attached, and that they concern.  A report of progress may not."""
_OF_CLIENT: Final[dict[type[Message], Callable[[Node, Client, Any, int], None]]] = {
    AttachGpu: _attach,
    ParkAnswer: parking.answered,
}
AS_THEY_COME: Final[tuple[type[Message], ...]] = (*_OF_SEAT, ParkAnswer)
"""Messages that the shell passes on without a look."""
