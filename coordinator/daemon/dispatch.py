"""Between transport and scheduler: messages become events, commands become messages, journal entries and log lines.

Invariants: a peer's first message is an acceptable `Hello`; what breaks the protocol ends that connection and nothing
else; the core hears of each registered client's end exactly once; commands are carried out in their order.

May not go here: sockets and waiting (daemon/loop.py), decisions (the core).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from nvshare.coordinator.daemon.control_api import I32_MAX, encode_event
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode, ReleaseReason, RemoteProtocolError

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.live_settings import LiveSettings
    from nvshare.coordinator.daemon.transport import Outbox, Peer
    from nvshare.coordinator.engine.scheduler import Scheduler
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook

log: Final = logging.getLogger("nvshare")

Publish = Callable[[bytes], None]
Observe = Callable[[str, Mapping[str, Any]], None]


class LeaseJournal(Protocol):
    """What the dispatcher needs of a journal."""

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        """Who may be at work on this GPU from now on."""

    def forget(self, process_id: int) -> None:
        """The process is gone."""


class Dispatcher:
    """Feeds the scheduler and carries out what it says."""

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        journal: LeaseJournal,
        *,
        max_clients: int,
        end_process: Callable[[int], None] | None = None,
    ) -> None:
        """`end_process` replaces SIGKILL where processes are models."""
        self.scheduler = scheduler
        self.deadline_ns: int | None = None
        self.awake_until_ns = 0
        """Around a hand-over: until when the next message is worth waiting for wide awake."""
        self.cues = 0
        """Messages sent after which a release or the end of a quantum comes: each is worth a rehearsal."""
        self.publish: Publish | None = None
        """Where trace events go; None while nobody listens, so that they cost nothing."""
        self.observe: Observe | None = None
        """Sees every trace event, for metrics."""
        self.slots: SlotBook | None = None
        """Whose slots clients come by; None where there are none."""
        self.live: LiveSettings | None = None
        """What the operator set for clients that come back; None where nobody sets anything."""
        self._most_rank = (I32_MAX, messages.MAX_WEIGHT)
        self._outbox = outbox
        self._journal = journal
        self._max_clients = max_clients
        self._end_process = end_process or _end_process
        self._clients: dict[int, int] = {}  # connection -> process id
        self._processes: dict[int, int] = {}  # process id -> how many connections
        self._sequence = 0
        self._news: list[tuple[int, commands.Notify]] = []
        self._now_ns = 0

    def __len__(self) -> int:
        """Registered clients."""
        return len(self._clients)

    # --- in ---------------------------------------------------------------------------------------------------------

    def frame(self, connection: int, frame: bytes, now_ns: int) -> None:
        """One frame from a peer."""
        try:
            message = messages.decode(frame, messages.TO_COORDINATOR)
            translate = _TRANSLATE.get(type(message))  # type: ignore[arg-type]  # an int is in no table
            if translate is not None and connection in self._clients:
                self.event(translate(connection, message), now_ns)
            else:
                self._unusual(connection, message, now_ns)
        except RemoteProtocolError as error:
            self._breach(connection, messages.Rejection.MALFORMED, str(error), now_ns)

    def _unusual(self, connection: int, message: messages.Message | int, now_ns: int) -> None:
        known = connection in self._clients
        if isinstance(message, int):
            text = f"message type {message} is unknown to protocol {messages.PROTOCOL_VERSION}"
            self._reject(connection, messages.Rejection.UNKNOWN_MESSAGE, text)
        elif isinstance(message, messages.Hello) and not known:
            self._hello(connection, message, now_ns)
        elif isinstance(message, messages.AttachGpu) and known:
            self._attach(connection, message, now_ns)
        elif known and isinstance(message, messages.Goodbye):
            self.gone(connection, now_ns)
        else:
            raise RemoteProtocolError("a second Hello" if known else f"{type(message).__name__} before Hello")

    def gone(self, connection: int, now_ns: int) -> None:
        """The connection ended."""
        process_id = self._clients.pop(connection, None)
        if process_id is None:
            return
        if self.slots is not None and self.slots.has(connection):
            self.slots.leave(connection, self.scheduler.client_snapshot(connection, now_ns))
        self.event(events.ClientGone(connection), now_ns)
        if self.live is not None:
            self.live.gone(connection)
        left = self._processes.get(process_id, 1) - 1
        if left:
            self._processes[process_id] = left
        else:
            self._processes.pop(process_id, None)
            self._journal.forget(process_id)

    def event(self, event: events.Event, now_ns: int) -> None:
        """Any event; raises RemoteProtocolError when a client must not have caused it."""
        self._now_ns = now_ns
        for command in self.scheduler.handle(event, now_ns):
            self._carry_out[type(command)](self, command)

    def _hello(self, connection: int, hello: messages.Hello, now_ns: int) -> None:
        if hello.protocol != messages.PROTOCOL_VERSION:
            text = (
                f"this coordinator speaks protocol {messages.PROTOCOL_VERSION}, the hook ({hello.library_version}) "
                f"{hello.protocol}; install the same nvshare version on both sides"
            )
            self._breach(connection, messages.Rejection.PROTOCOL_VERSION, text, now_ns)
            return
        if len(self._clients) >= self._max_clients:
            text = f"{self._max_clients} clients are connected already; raise max_clients"
            self._breach(connection, messages.Rejection.TOO_MANY_CLIENTS, text, now_ns)
            return
        if hello.memory_mode not in MemoryMode.__members__.values():
            raise RemoteProtocolError(f"memory mode {hello.memory_mode}")
        peer = self._outbox.peer(connection)
        if peer is None:
            return
        priority, weight = self._own_rank(peer, hello)
        registered = events.ClientRegistered(
            client=connection,
            name=_printable(hello.name or hello.program),
            program=_printable(hello.program),
            # The kernel says 0 for a process of a PID namespace that this one does not see.  The journal's 0 is
            # "nobody", and two such processes must not be taken for one: each has a negative id of its own.
            process_id=peer.process_id or -1 - connection,
            user_id=peer.user_id,
            priority=priority,
            memory_mode=MemoryMode(hello.memory_mode),
            memory_limit_bytes=hello.memory_limit_bytes,
            weight=weight,
            # One user's gang is not another's, whatever they call it.  A slot has better names; see slot_book.py.
            gang=f"user:{peer.user_id}/{_printable(hello.gang)}" if hello.gang else "",
        )
        if peer.slot:
            adopted = None if self.slots is None else self.slots.register(peer.slot, registered)
            if adopted is None:
                text = f"slot {peer.slot} is gone: its container must be started again"
                self._breach(connection, messages.Rejection.NOT_ALLOWED, text, now_ns)
                return
            registered = adopted
        self._outbox.greeted(connection)
        process_id = registered.process_id
        self._clients[connection] = process_id
        self._processes[process_id] = self._processes.get(process_id, 0) + 1
        self.event(registered, now_ns)
        for event in () if self.live is None else self.live.registered(registered):
            self.event(event, now_ns)
        if not peer.slot and (priority, weight) != (hello.priority, hello.weight):
            text = f"user {peer.user_id} may have priority {priority}, weight {weight} and no more"
            self._reject(connection, messages.Rejection.NOT_ALLOWED, f"{text} (max_priority, max_weight)")

    def _own_rank(self, peer: Peer, hello: messages.Hello) -> tuple[int, int]:
        """The priority and weight that a program gets by its own environment.  Root and the coordinator's user, who may
        set them with nvshare-ctl anyway, have no bound.  A slot has its annotations instead; see slot_book.py."""
        if peer.user_id in (0, os.geteuid()):
            return hello.priority, hello.weight
        return min(hello.priority, self._most_rank[0]), min(hello.weight, self._most_rank[1])

    def bound_ranks(self, max_priority: int, max_weight: int) -> None:
        """For clients that come from now on."""
        self._most_rank = (max_priority, max_weight)

    def _attach(self, connection: int, message: messages.AttachGpu, now_ns: int) -> None:
        why = None if self.slots is None else self.slots.refuses(connection, message.uuid)
        if why is not None:  # its slot does not have that GPU
            self._reject(connection, messages.Rejection.UNKNOWN_GPU, why)
            return
        self.event(_attached(connection, message), now_ns)
        for event in () if self.live is None else self.live.attached(connection, message.uuid):
            self.event(event, now_ns)

    def slot_says(self, event: events.Event, now_ns: int) -> None:
        """A slot's file changed.  What the operator set live stays."""
        for each in (event,) if self.live is None else self.live.slot_says(event):
            self.event(each, now_ns)

    # --- refusing ---------------------------------------------------------------------------------------------------

    def _reject(self, connection: int, code: messages.Rejection, text: str) -> None:
        self._outbox.send(connection, messages.encode(messages.Rejected(int(code), False, _short(text))))

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
            self.cues += 1
        elif type(message) is messages.Revoke:
            self.cues += 1
        elif type(message) is messages.Grant:
            self.awake_until_ns = 0

    def _set_timer(self, command: commands.SetTimer) -> None:
        self.deadline_ns = command.deadline_ns

    def _record(self, command: commands.RecordLease) -> None:
        self._journal.record(command.uuid, command.lease_id, command.process_id)

    def _notify(self, command: commands.Notify) -> None:
        self._news.append((self._now_ns, command))

    def tell_news(self) -> None:
        """Trace events go out when the clients have got their messages: a hand-over does not wait for its audience."""
        news, self._news = self._news, []
        for at_ns, command in news:
            self._sequence += 1
            if self.observe is not None:
                self.observe(command.kind, command.values)
            if self.publish is not None:
                self.publish(encode_event(self._sequence, at_ns, command.kind, command.values))

    def _log(self, command: commands.Log) -> None:
        log.log(command.level, "%s", command.text)

    def _kill(self, command: commands.Kill) -> None:
        """Only while the connection is known to be that process's: an id may have been reused."""
        if command.process_id <= 1 or self._clients.get(command.client) != command.process_id:
            return
        log.warning("killing process %d: %s", command.process_id, command.reason)
        self._end_process(command.process_id)

    _carry_out: Final[dict[type[Any], Callable[[Any, Any], None]]] = {
        commands.Send: _send,
        commands.SetTimer: _set_timer,
        commands.RecordLease: _record,
        commands.Notify: _notify,
        commands.Log: _log,
        commands.Kill: _kill,
    }


def _end_process(process_id: int) -> None:
    """By a pidfd, which cannot come to mean another process before the signal is sent."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(process_id)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _attached(client: int, m: messages.AttachGpu) -> events.Event:
    return events.GpuAttached(
        client=client,
        gpu=m.gpu,
        uuid=m.uuid,
        lease_id=m.lease_id,
        wanted=m.wanted,
        allocated_bytes=m.allocated_bytes,
        resident_bytes=m.resident_bytes,
        pinned_bytes=m.pinned_bytes,
    )


def _request(client: int, m: messages.Request) -> events.Event:
    return events.Requested(client, m.gpu)


def _release(client: int, m: messages.Release) -> events.Event:
    return events.Released(
        client,
        m.gpu,
        m.lease_id,
        m.reason == ReleaseReason.IDLE,
        m.drained,
        m.wanted,
        m.drain_ns,
        m.opened_at_ns,
        m.submissions,
    )


def _memory(client: int, m: messages.MemoryReport) -> events.Event:
    return events.MemoryReported(client, m.gpu, m.allocated_bytes, m.resident_bytes, m.pinned_bytes, m.host_bytes)


def _reserve(client: int, m: messages.ReserveMemory) -> events.Event:
    return events.ReservationAsked(client, m.gpu, m.sequence, m.bytes)


def _reserve_pins(client: int, m: messages.ReservePins) -> events.Event:
    return events.PinsAsked(client, m.gpu, m.sequence, m.bytes)


def _reserve_host(client: int, m: messages.ReserveHost) -> events.Event:
    return events.HostAsked(client, m.sequence, m.bytes)


def _progress(client: int, m: messages.MoveProgress) -> events.Event:
    return events.MoveProgressed(client, m.gpu, m.order_id, m.moved_bytes, m.elapsed_ns, m.finished, m.error)


_TRANSLATE: Final[dict[type[messages.Message], Callable[[int, Any], events.Event]]] = {
    messages.Request: _request,
    messages.Release: _release,
    messages.MemoryReport: _memory,
    messages.ReserveMemory: _reserve,
    messages.ReservePins: _reserve_pins,
    messages.ReserveHost: _reserve_host,
    messages.MoveProgress: _progress,
}


def _printable(name: str) -> str:
    """A client chooses its name, and it ends on terminals and in logs: nothing that steers them."""
    return "".join(c if c.isprintable() else "?" for c in name) or "?"


def _short(text: str) -> str:
    """Fits `Rejected.text`, and one log line."""
    return _printable(text).encode("utf-8", "replace")[:255].decode("utf-8", "ignore")
