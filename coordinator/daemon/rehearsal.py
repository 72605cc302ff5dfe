"""Cache warm-up: a made-up handover, run shortly before a real one.

After 20 ms of sleep the interpreter's code and data have left the processor's caches, and a handover takes 140 us
instead of 30 us (docs/decisions).  A handover between two made-up clients just before restores most of that.

Invariants: the made-up scheduler and dispatcher share no state with the real ones.  The real journal's last record is
rewritten, because a record is written before each grant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nvshare.coordinator.daemon.dispatch import Dispatcher
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import QuantumSettings, Settings
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.round_robin import RoundRobin

_GPU: Final = "rehearsal"
_TURN_NS: Final = 1_000_000_000


class _Recorder:
    """Stands in for transport and journal, and records the lease holder."""

    def __init__(self, rewrite_journal: Callable[[], None]) -> None:
        self.holder = 0
        self.lease = 0
        self._rewrite_journal = rewrite_journal

    def send(self, connection: int, frame: bytes) -> None:
        message = messages.decode(frame, messages.TO_CLIENT)
        if type(message) is messages.Grant:
            self.holder, self.lease = connection, message.lease_id

    def greeted(self, connection: int) -> None:
        pass

    def refuse(self, connection: int, frame: bytes, text: str) -> None:
        raise AssertionError(f"{connection} was refused: {frame!r}")

    def peer(self, connection: int) -> Peer:
        return Peer(process_id=connection, user_id=0)

    def record(self, uuid: str, lease_id: int, process_id: int) -> None:
        self._rewrite_journal()

    def forget(self, process_id: int) -> None:
        pass


class Rehearsal:
    """Two clients that take turns on a made-up GPU, one handover at each `run`."""

    def __init__(self, rewrite_journal: Callable[[], None]) -> None:
        recorder = self._recorder = _Recorder(rewrite_journal)
        turns = QuantumSettings(quantum_ns=_TURN_NS // 10)
        settings = Settings(policy="round_robin", sharing=messages.Sharing.EXCLUSIVE, quantum=turns)
        scheduler = Scheduler(lambda name, uuid: RoundRobin(), settings)
        self._dispatcher = Dispatcher(scheduler, recorder, recorder, max_clients=2)
        self._now_ns = 0
        self._dispatcher.event(events.GpuAdded(_GPU, _GPU, 1 << 30, 1 << 30), 0)
        for client in (1, 2):
            hello = messages.Hello(messages.PROTOCOL_VERSION, _GPU, _GPU, 0, 0, int(messages.MemoryMode.DEVICE), 0, "")
            self._dispatcher.frame(client, messages.encode(hello), 0)
            self._dispatcher.frame(client, messages.encode(messages.AttachGpu(0, _GPU, 1 << 30, 0, True, 0, 0, 0)), 0)

    def run(self) -> None:
        """Ends the turn of one client and begins that of the other."""
        now_ns = self._now_ns = self._now_ns + _TURN_NS
        recorder = self._recorder
        self._dispatcher.event(events.TimerFired(), now_ns)
        release = messages.Release(
            0, recorder.lease, int(messages.ReleaseReason.REVOKED), True, True, 1000, now_ns - 5000, 7
        )
        self._dispatcher.frame(recorder.holder, messages.encode(release), now_ns + 2000)
        self._dispatcher.publish_notes()
