"""The dispatcher: turns messages into events, and commands into messages, journal records and log lines.

Invariants: a peer's first message is an acceptable `Hello`.  A protocol error, and any other exception that a message
causes outside of the core, ends its connection and nothing else.
The engine learns of each registered client's end exactly once.  Commands are carried out in their order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.daemon.control import explanations
from nvshare.coordinator.daemon.peers import printable
from nvshare.coordinator.engine.event_log import InvariantError
from nvshare.coordinator.engine.scheduler import AS_THEY_COME
from nvshare.coordinator.model import commands, events, profile
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, RemoteProtocolError
from nvshare.coordinator.system.processes import end_process
from nvshare.coordinator.system.users import known_name

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control.live_settings import LiveSettings
    from nvshare.coordinator.daemon.control.rights import Rights
    from nvshare.coordinator.daemon.peers import EventSink, LeaseJournal, Outbox, Peer
    from nvshare.coordinator.engine.scheduler import Scheduler
    from nvshare.coordinator.engine.snapshot import ClientSnapshot
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook

log: Final = logging.getLogger("nvshare")

_SAME_VERSION: Final = "install the same nvshare version for hook and coordinator, and start the program again"
MOST_TOLD: Final = 8
"""Mistakes in a program's profile of which it is told."""

Observe = Callable[[str, Mapping[str, Any]], None]


@dataclass(slots=True)
class _Client:
    process_id: int
    own: Facts
    """By its own words, within its user's rights."""


class Dispatcher:
    """Feeds the scheduler with events and carries out its commands."""

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        journal: LeaseJournal,
        rights: Rights,
        *,
        max_clients: int,
        slots: SlotBook | None = None,
        live: LiveSettings | None = None,
        watch_end: Callable[[int], bool] = lambda _: False,
        check_memory: Callable[[str], None] | None = None,
        park: Callable[[commands.DriverCall], None] | None = None,
        end_process: Callable[[int], None] | None = None,
        events_to: EventSink | None = None,
        observers: Sequence[Observe] = (),
        left: Callable[[ClientSnapshot, int], None] = lambda *_: None,
    ) -> None:
        """`slots`: those of the clients; None without Kubernetes.  `live`: the operator's live settings.

        `watch_end` has `ProcessEnded` follow; false: the process has ended, or cannot be watched.  `check_memory` has
        `MemoryChecked` follow, and `park` has `Saved` or `Restored`.  `end_process` replaces SIGKILL in simulations.
        `events_to` and `observers` get the trace events, for readers and for metrics.  `left` gets each client's
        last snapshot.
        """
        self.scheduler = scheduler
        self.slots = slots
        self.deadline_ns: int | None = None
        self.awake_until_ns = 0
        """Around a handover: the loop polls for the next message until this time."""
        self._outbox = outbox
        self._journal = journal
        self._rights = rights
        self._live = live
        self._watch_end = watch_end
        self._check_card = check_memory
        self._call_driver = park
        self._max_clients = max_clients
        self._end_process = end_process or _kill_process
        self._events_to = events_to
        self._observers = observers
        self._left = left
        self._clients: dict[int, _Client] = {}  # by connection
        self._sequence = 0
        self._notes: list[tuple[int, commands.Notify]] = []
        self._now_ns = 0

    def __len__(self) -> int:
        """Registered clients."""
        return len(self._clients)

    # --- in ---------------------------------------------------------------------------------------------------------

    def frame(self, connection: int, frame: bytes, now_ns: int) -> None:
        """One frame from a peer."""
        try:
            message = messages.decode(frame, messages.TO_COORDINATOR)
            if isinstance(message, AS_THEY_COME) and connection in self._clients:
                self.event(events.Received(connection, message), now_ns)
            else:
                self._handle_other(connection, message, now_ns)
        except RemoteProtocolError as error:
            code, text = messages.Rejection.MALFORMED, str(error)
            if connection not in self._clients:
                code = messages.Rejection.PROTOCOL_VERSION
                text = f"{_SAME_VERSION} (protocol {messages.PROTOCOL_VERSION}): {error}"
            self._breach(connection, code, text, now_ns)
        except InvariantError:  # the core's state cannot be trusted any more
            raise
        except Exception as error:
            self.failed(connection, error, now_ns)

    def failed(self, connection: int, error: Exception, now_ns: int) -> None:
        """A mistake of ours in handling a message: it costs this peer its connection, and no one else."""
        log.error("a message of connection %d failed", connection, exc_info=error)
        self._breach(connection, messages.Rejection.MALFORMED, "internal error; see the coordinator's log", now_ns)

    def _handle_other(self, connection: int, message: messages.Message | int, now_ns: int) -> None:
        known = connection in self._clients
        if isinstance(message, int):
            text = f"message type {message} is unknown to protocol {messages.PROTOCOL_VERSION}"
            self._reject(connection, messages.Rejection.UNKNOWN_MESSAGE, text)
        elif isinstance(message, messages.Hello) and not known:
            self._hello(connection, message, now_ns)
        elif known and isinstance(message, messages.AttachGpu):
            self._attach(connection, message, now_ns)
        elif known and isinstance(message, messages.ExplainWait):
            self._explain_wait(connection, message.gpu)
        elif known and isinstance(message, messages.Goodbye):
            self.gone(connection, now_ns)
        else:
            raise RemoteProtocolError("a second Hello" if known else f"{type(message).__name__} before Hello")

    def gone(self, connection: int, now_ns: int) -> None:
        """Handles the end of a connection."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        process_id = client.process_id
        last = self.scheduler.client_snapshot(connection, now_ns)
        if last is not None:
            self._left(last, now_ns)
        if self.slots is not None and self.slots.has(connection):
            self.slots.leave(connection, last)
        self.event(events.ClientGone(connection, process_id > 0 and self._watch_end(process_id)), now_ns)
        if self._live is not None:
            self._live.gone(connection)
        self._journal.forget(process_id)

    def event(self, event: events.Event, now_ns: int) -> None:
        """Passes an event to the scheduler.  Raises RemoteProtocolError for an event that its client must not cause."""
        self._now_ns = now_ns
        failure: Exception | None = None
        for command in self.scheduler.handle(event, now_ns):
            try:
                self._carry_out[type(command)](self, command)
            except Exception as error:  # the other commands are still due
                failure = error
        if failure is not None:
            raise failure

    def _hello(self, connection: int, hello: messages.Hello, now_ns: int) -> None:
        if len(self._clients) >= self._max_clients:
            text = f"all {self._max_clients} clients are connected; raise max_clients"
            self._breach(connection, messages.Rejection.TOO_MANY_CLIENTS, text, now_ns)
            return
        if hello.memory_mode not in MemoryMode.__members__.values():
            raise RemoteProtocolError(f"memory mode {hello.memory_mode}")
        peer = self._outbox.peer(connection)
        if peer is None:
            return
        registered = events.ClientRegistered(
            connection,
            replace(
                hello,
                name=printable(hello.name or hello.program),
                program=printable(hello.program),
            ),
            # The kernel reports 0 for a process in a foreign PID namespace.  The journal's 0 means no process, and
            # two such processes must stay distinct: each gets a negative id of its own.
            peer.process_id or -1 - connection,
            peer.user_id,
            peer.slot,
            (self.slots.allocation(peer.slot) or "") if self.slots is not None else "",
        )
        if peer.slot and (self.slots is None or not self.slots.register(peer.slot, connection)):
            text = f"slot {peer.slot} is gone; restart the container"
            self._breach(connection, messages.Rejection.NOT_ALLOWED, text, now_ns)
            return
        self._outbox.greeted(connection)
        known_name(peer.user_id)  # looked up before a program that waits asks for it
        process_id = registered.process_id
        own, told = self._own(peer, hello, now_ns)
        self._clients[connection] = _Client(process_id, own)
        self._journal.forget(process_id)  # an earlier process may have had this id
        self.event(registered, now_ns)
        if self._live is not None:
            self._live.registered(registered)
        self.settle(connection, now_ns)
        for text in told[:MOST_TOLD]:
            self._reject(connection, messages.Rejection.NOT_ALLOWED, text)

    # --- facts of programs --------------------------------------------------------------------------------------------

    def facts(self, connection: int) -> Facts:
        """What holds for a client: its own words within its user's rights, its slot's over them, live settings over
        both."""
        facts = self._clients[connection].own
        if self.slots is not None:
            facts = self.slots.within(connection, facts)
        return facts if self._live is None else self._live.over(connection, facts)

    def settle(self, connection: int, now_ns: int) -> None:
        """Something that `facts` is made of has changed: the program has said it, its slot, or a live setting."""
        self.event(events.Settled(connection, self.facts(connection)), now_ns)

    def _own(self, peer: Peer, hello: messages.Hello, now_ns: int) -> tuple[Facts, list[str]]:
        """What a program says of itself, within its user's rights, and what to say of it."""
        values, mistakes = profile.read(profile.of_text(hello.profile))
        told = [f"NVSHARE_{word.upper()}: {why}; ignored" for word, why in mistakes.items()]
        if not peer.slot:  # a slot has its own; see slot_book.py
            told += self._rights.lower(peer.user_id, values)
        values |= {"limit_bytes": hello.memory_limit_bytes, "spatial": hello.spatial}
        if values.get("gang"):  # gangs of different users are different, even with equal names
            values["gang"] = f"user:{peer.user_id}/{printable(values['gang'])}"
        if "deadline_ns" in values:
            values["deadline_ns"] += now_ns
        return Facts().having(**values), told

    def _attach(self, connection: int, message: messages.AttachGpu, now_ns: int) -> None:
        why = None if self.slots is None else self.slots.refuses(connection, message.uuid)
        if why is not None:  # the slot lacks that GPU
            self._reject(connection, messages.Rejection.FORBIDDEN_GPU, why, message.gpu)
            return
        self.event(events.Received(connection, message), now_ns)

    def _explain_wait(self, connection: int, gpu: int) -> None:
        wait = self.scheduler.wait_snapshot(connection, gpu)
        if wait is not None:
            text = _short(explanations.wait(wait, hide_names=self._rights.hide_other_users))
            self._outbox.send(connection, messages.encode(messages.WaitExplained(gpu, wait.index, text)))

    # --- refusing ---------------------------------------------------------------------------------------------------

    def _reject(self, connection: int, code: messages.Rejection, text: str, ordinal: int = 0) -> None:
        self._outbox.send(connection, messages.encode(messages.Rejected(int(code), False, _short(text), ordinal)))

    def _breach(self, connection: int, code: messages.Rejection, text: str, now_ns: int) -> None:
        text = _short(text)
        self._outbox.refuse(connection, messages.encode(messages.Rejected(int(code), True, text)), text)
        self.gone(connection, now_ns)

    # --- out --------------------------------------------------------------------------------------------------------

    def _send(self, command: commands.Send) -> None:
        message = command.message
        self._outbox.send(command.client, messages.encode(message))
        if type(message) is messages.Standby:
            self.awake_until_ns = self._now_ns + message.within_ns
        elif type(message) is messages.Grant:
            self.awake_until_ns = 0

    def _set_timer(self, command: commands.SetTimer) -> None:
        self.deadline_ns = command.deadline_ns

    def _record(self, command: commands.RecordLease) -> None:
        self._journal.record(command.uuid, command.lease_id, command.process_id)

    def _notify(self, command: commands.Notify) -> None:
        self._notes.append((self._now_ns, command))
        if command.kind == "refused" and command.values["why"] in ("capacity", "pins", "host memory"):
            self._explain_refusal(int(str(command.values["client"])), str(command.values["uuid"]))

    def _explain_refusal(self, connection: int, uuid: str) -> None:
        """Comes before the answer, after which the program prints it."""
        refusal = self.scheduler.refusal_snapshot(connection, uuid)
        text = explanations.refusal(refusal, hide_names=self._rights.hide_other_users)
        self._reject(connection, messages.Rejection.OUT_OF_MEMORY, text)

    def note(self, kind: str, values: dict[str, Any], now_ns: int) -> None:
        """Adds a trace event of the shell."""
        self._notes.append((now_ns, commands.Notify(kind, values)))

    def publish_notes(self) -> None:
        """Publishes the trace events.  Call after the clients' messages are sent, to keep handovers short."""
        notes, self._notes = self._notes, []
        for at_ns, command in notes:
            self._sequence += 1
            for observe in self._observers:
                observe(command.kind, command.values)
            if self._events_to is not None and self._events_to.wanted:
                self._events_to.publish(self._sequence, at_ns, command.kind, command.values)

    def _log(self, command: commands.Log) -> None:
        log.log(command.level, "%s", command.text)

    def _kill(self, command: commands.Kill) -> None:
        """Kills a process only while its connection is open: otherwise its id may mean another process."""
        client = self._clients.get(command.client)
        if command.process_id <= 1 or client is None or client.process_id != command.process_id:
            return
        log.warning("killing process %d: %s", command.process_id, command.reason)
        self._end_process(command.process_id)

    def _check_memory(self, command: commands.CheckMemory) -> None:
        if self._check_card is not None:
            self._check_card(command.uuid)

    def _park(self, command: commands.DriverCall) -> None:
        if self._call_driver is not None:
            self._call_driver(command)

    _carry_out: Final[dict[type[Any], Callable[[Any, Any], None]]] = {
        commands.Send: _send,
        commands.SetTimer: _set_timer,
        commands.RecordLease: _record,
        commands.Notify: _notify,
        commands.Log: _log,
        commands.Kill: _kill,
        commands.CheckMemory: _check_memory,
        commands.ExpectCheckpoint: _park,
        commands.Checkpoint: _park,
        commands.Restore: _park,
        commands.ParkingOver: _park,
    }


def _kill_process(process_id: int) -> None:
    with contextlib.suppress(OSError):
        end_process(process_id, kill=True)


def _short(text: str) -> str:
    """Fits a text to `Rejected.text` and to one log line."""
    return printable(text).encode("utf-8", "replace")[:255].decode("utf-8", "ignore")
