"""The random numbers of a hand-off of memory: the same at its ends, and nowhere else.

May not go here: who may get memory (test_ahead.py), the sockets (tests/hook/test_handdown.py).
"""

from __future__ import annotations

from coordinator import commands, events, wire
from coordinator.dispatch import Dispatcher
from coordinator.scheduler import Scheduler
from coordinator.transport import Peer
from scheduler_policies.round_robin import RoundRobin

A, B, RECEIVER = 1, 2, 3


class Ends:
    """Outbox and journal; keeps the orders that are sent."""

    def __init__(self) -> None:
        self.sent: list[wire.Evict | wire.Restore] = []

    def send(self, connection: int, frame: bytes) -> None:
        message = wire.decode(frame, wire.TO_CLIENT)
        if isinstance(message, wire.Evict | wire.Restore):
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
        hello = wire.Hello(wire.PROTOCOL_VERSION, "x", "x", 0, 0, int(wire.MemoryMode.SWAP), 0, "")
        dispatcher.frame(client, wire.encode(hello), 0)

    def switch() -> list[tuple[int, int]]:
        ends.sent.clear()
        core.says = (
            commands.Send(A, wire.Evict(0, 1, 100, RECEIVER)),
            commands.Send(RECEIVER, wire.Restore(0, 2, 100, 50)),
            commands.Send(B, wire.Evict(0, 3, 100, RECEIVER)),
            commands.Send(B, wire.Evict(0, 4, 100)),
            commands.Send(A, wire.Restore(0, 5, 100, 100)),
        )
        dispatcher.event(events.TimerFired(), 0)
        core.says = ()
        return [(order.handoff_socket, order.handoff_token) for order in ends.sent]

    first, same, again, *others = switch()
    assert first == same == again
    assert all(first)
    assert others == [(0, 0), (0, 0)]
    assert switch()[0] == first, "the receiver has not finished"
    dispatcher.frame(RECEIVER, wire.encode(wire.MoveProgress(0, 2, 100, 1, True, 0)), 0)
    second = switch()[0]
    assert not set(second) & set(first)
    dispatcher.gone(RECEIVER, 0)
    assert not set(switch()[0]) & set(second)
