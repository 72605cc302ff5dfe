"""The random numbers of a hand-off of memory: the same at its ends, and nowhere else.

May not go here: who may get memory (test_ahead.py), the sockets (tests/hook/test_handdown.py).
"""

from __future__ import annotations

from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.transport import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.round_robin import RoundRobin

A, B, RECEIVER = 1, 2, 3


class Ends:
    """Outbox and journal; keeps the orders that are sent."""

    def __init__(self) -> None:
        self.sent: list[messages.Evict | messages.Restore] = []

    def send(self, connection: int, frame: bytes) -> None:
        message = messages.decode(frame, messages.TO_CLIENT)
        if isinstance(message, messages.Evict | messages.Restore):
            self.sent.append(message)

    def greeted(self, connection: int) -> None: ...

    def refuse(self, connection: int, frame: bytes, text: str) -> None: ...

    def peer(self, connection: int) -> Peer:
        return Peer(process_id=connection, user_id=0)

    def record(self, uuid: str, lease_id: int, process_id: int) -> None: ...

    def forget(self, process_id: int) -> None: ...


class Core(Scheduler):
    """Says what a test puts into `says`."""

    says: tuple[commands.Command, ...] = ()

    def handle(self, event: events.Event, now_ns: int) -> list[commands.Command]:
        return list(self.says)


def test_both_ends_get_the_same_numbers_once() -> None:
    """Broken: memory is not handed on, or a program that took part in one hand-off can take part in the next."""
    ends, core = Ends(), Core(lambda name, uuid: RoundRobin())
    dispatcher = Dispatcher(core, ends, ends, max_clients=3)
    for client in (A, B, RECEIVER):
        hello = messages.Hello(messages.PROTOCOL_VERSION, "x", "x", 0, 0, int(messages.MemoryMode.SWAP), 0, "")
        dispatcher.frame(client, messages.encode(hello), 0)

    def switch() -> list[tuple[int, int]]:
        ends.sent.clear()
        core.says = (
            commands.Send(A, messages.Evict(0, 1, 100, RECEIVER)),
            commands.Send(RECEIVER, messages.Restore(0, 2, 100, 50)),
            commands.Send(B, messages.Evict(0, 3, 100, RECEIVER)),
            commands.Send(B, messages.Evict(0, 4, 100)),
            commands.Send(A, messages.Restore(0, 5, 100, 100)),
        )
        dispatcher.event(events.TimerFired(), 0)
        core.says = ()
        return [(order.handoff_socket, order.handoff_token) for order in ends.sent]

    first, same, again, *others = switch()
    assert first == same == again
    assert all(first)
    assert others == [(0, 0), (0, 0)]
    assert switch()[0] == first, "the receiver has not finished"
    dispatcher.frame(RECEIVER, messages.encode(messages.MoveProgress(0, 2, 100, 1, True, 0)), 0)
    second = switch()[0]
    assert not set(second) & set(first)
    dispatcher.gone(RECEIVER, 0)
    assert not set(switch()[0]) & set(second)
