"""Start times of processes in the journal: a process id may come back."""

from __future__ import annotations

from nvshare.coordinator.daemon.control.rights import Rights
from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies import registry
from tests.unit.daemon.test_rank import Connections


class _Noting(Connections):
    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.forgotten: list[int] = []

    def forget(self, process_id: int) -> None:
        self.forgotten.append(process_id)


def test_a_process_id_that_comes_back_is_looked_up_again() -> None:
    """Broken: a restarted coordinator takes the holder for an earlier process of this id, and grants its GPU again."""
    connections = _Noting(Peer(7, 0))
    dispatcher = Dispatcher(Scheduler(registry.create), connections, connections, Rights(own_user=0), max_clients=9)
    hello = messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "job", "python", 1, 0))
    dispatcher.frame(1, hello, 1)
    connections.forgotten.clear()
    dispatcher.frame(2, hello, 2)
    assert connections.forgotten == [7], "the new process registers before the end of the old connection is seen"
    dispatcher.gone(1, 3)
    assert connections.forgotten == [7, 7]
