"""The coordinator's event loop: waits for sockets, timers and signals, and feeds the dispatcher.

Invariants: only this thread uses the scheduler.  The work of one turn is bounded, so that no peer can starve the
others.  An idle loop sleeps without a timer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from nvshare.coordinator.daemon.control.api import encode_error
from nvshare.coordinator.daemon.control.listeners import ControlListener, EventPublisher
from nvshare.coordinator.daemon.control.read_budget import CHANGE_NS, ReadBudget
from nvshare.coordinator.daemon.peers import Limits
from nvshare.coordinator.daemon.transport import PeerListener
from nvshare.coordinator.engine.policy_guard import LATEST_NS
from nvshare.coordinator.model import events
from nvshare.coordinator.system.journal import is_stopped, start_time

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.checkpoint_processes import CheckpointProcesses
    from nvshare.coordinator.daemon.control.rights import Rights
    from nvshare.coordinator.daemon.control.server import Administration
    from nvshare.coordinator.daemon.dispatch import Dispatcher
    from nvshare.coordinator.daemon.usage import Usage
    from nvshare.coordinator.kubernetes.slots.watch import SlotWatch
    from nvshare.coordinator.system.runtime_dir import RuntimeDir

log: Final = logging.getLogger("nvshare")

MOST_ENDING: Final = 256
"""Processes whose end is watched at a time."""
ANSWER_TIMEOUT_S: Final = 2.0
LOOK_NS: Final = 1_000_000_000
"""Between two looks for programs to park and for stopped ones."""

T = TypeVar("T")


class Waiter:
    """Waits for any of several descriptors to become readable."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def add(self, descriptor: int) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)

    def wait(self, timeout_ns: int | None) -> set[int]:
        """Readable descriptors; empty after the timeout, which is rounded up to milliseconds and may end early.  None
        waits forever."""
        timeout_s = None if timeout_ns is None else max(0, min(timeout_ns, LATEST_NS)) / 1e9
        return {descriptor for descriptor, _ in self._epoll.poll(timeout_s)}

    def close(self) -> None:
        self._epoll.close()


class ProcessEnds:
    """Processes that have disconnected or hold leases of an earlier coordinator, and have not ended.

    The driver frees a process's memory after its socket has closed, and before its pidfd is readable.
    """

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._processes: dict[int, int] = {}  # pidfd -> process id
        self._holders: set[int] = set()

    def watch(self, process_id: int) -> bool:
        """Whether `ended` will name the process.  False: it has ended, or cannot be watched."""
        if process_id in self._processes.values():
            return True
        try:
            descriptor = os.pidfd_open(process_id)
        except OSError:
            return False
        if len(self._processes) >= MOST_ENDING + len(self._holders):
            self._unwatch(next(each for each, pid in self._processes.items() if pid not in self._holders))
        self._processes[descriptor] = process_id
        self._waiter.add(descriptor)
        return True

    def watch_holder(self, process_id: int, started_at: int) -> bool:
        """As `watch`, whichever others end meanwhile.  False also if another process has got its id."""
        self._holders.add(process_id)
        return self.watch(process_id) and start_time(process_id) == started_at

    def ended(self, ready: set[int]) -> list[int]:
        """The processes that have ended, by their readable descriptors."""
        return [self._unwatch(descriptor) for descriptor in self._processes.keys() & ready]

    def close(self) -> None:
        for descriptor in self._processes:
            os.close(descriptor)

    def _unwatch(self, descriptor: int) -> int:
        self._waiter.remove(descriptor)
        os.close(descriptor)
        self._holders.discard(self._processes[descriptor])
        return self._processes.pop(descriptor)


class Sockets:
    """The three sockets of a runtime directory, and the poller of the loop."""

    def __init__(self, directory: RuntimeDir, limits: Limits, rights: Rights, *, all_users: bool) -> None:
        """`all_users`: all users may connect (the system's coordinator).  The directory must be locked."""
        self.rights = rights
        mode = 0o666 if all_users else 0o600
        self.hooks = PeerListener(directory.hooks_socket, mode, limits)
        self.control = ControlListener(directory.control_socket, mode, rights)
        self.events = EventPublisher(directory.events_socket, mode, rights)
        self.waiter = Waiter()
        for source in (self.hooks, self.control, self.events):
            self.waiter.add(source.descriptor)
        self.ends = ProcessEnds(self.waiter)

    def close(self) -> None:
        """Closes the sockets and removes their files."""
        for closing in (self.hooks, self.control, self.events):
            closing.close()
        self.ends.close()
        self.waiter.close()


class Server:
    """The loop.  It ends by `stop`, a signal, or the condition of `leave_when`."""

    def __init__(
        self,
        sockets: Sockets,
        dispatcher: Dispatcher,
        administration: Administration,
        helpers: CheckpointProcesses,
        usage: Usage,
    ) -> None:
        self._sockets = sockets
        self._dispatcher = dispatcher
        self._administration = administration
        self._listeners = (sockets.hooks, sockets.control, sockets.events)
        self._helpers = helpers
        self._timed = (*self._listeners, helpers, usage)
        self._readers = ReadBudget(sockets.rights)
        self._stopping = False
        self._tasks: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._leave_when: Callable[[], bool] | None = None
        self._linger_ns = 0
        self._leave_check_ns: int | None = None
        self._look_ns: int | None = None
        self._slots: SlotWatch | None = None
        self._ping: Callable[[], None] = lambda: None
        self._ping_period_ns = 0
        self._ping_at_ns: int | None = None
        sockets.waiter.add(self._wake_read)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def leave_when(self, condition: Callable[[], bool], linger_ns: int) -> None:
        """Embedded: stop when no client is connected and the condition holds.

        The check happens `linger_ns` after the last client left, and every `linger_ns` from then on.
        """
        self._leave_when = condition
        self._linger_ns = linger_ns

    def ping(self, period_ns: int, ping: Callable[[], None]) -> None:
        """Calls `ping` from the loop every `period_ns`, so a loop that hangs gives no sign of life."""
        self._ping, self._ping_period_ns, self._ping_at_ns = ping, period_ns, time.monotonic_ns()

    def watch_slots(self, slots: SlotWatch) -> None:
        """Serves the slots of this watch; reads the present ones at once."""
        self._slots = slots
        if slots.descriptor is not None:
            self._sockets.waiter.add(slots.descriptor)
        while (due_ns := slots.next_deadline_ns()) is not None and due_ns <= time.monotonic_ns():
            self._slots_turn(slots, set())

    def watch_holder(self, process_id: int, started_at: int) -> None:
        """Recovery: reports to the engine when an earlier lease holder has died, and at once whether it is stopped."""
        self._look_ns = time.monotonic_ns()
        if not self._sockets.ends.watch_holder(process_id, started_at):
            self._dispatcher.event(events.ProcessEnded(process_id), time.monotonic_ns())

    def handle_signals(self, reload: Callable[[], None]) -> None:
        """SIGTERM and SIGINT end the loop, SIGHUP calls `reload` on it.  Main thread only."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop_by_signal)
        signal.signal(signal.SIGHUP, lambda *_: self._tasks.append(reload))

    # --- from other threads -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run` after the present turn.  For any thread or signal handler."""
        self._stopping = True
        self._wake()

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` between two turns."""
        self._tasks.append(work)
        self._wake()

    def run_on_loop(self, work: Callable[[], T]) -> T:
        """Runs `work` between two turns and returns its result.  Raises TimeoutError and the exceptions of `work`."""
        outcome: Future[T] = Future()

        def attempt() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

        self.post(attempt)
        return outcome.result(ANSWER_TIMEOUT_S)

    def _stop_by_signal(self, _number: int, _frame: object) -> None:
        self.stop()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the loop anyway
            os.write(self._wake_write, b"\0")

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until the loop is stopped."""
        self._schedule_leave_check(time.monotonic_ns())
        while not self._stopping:
            ready = self._wait()
            self._helpers.serve(ready)
            for process_id in self._sockets.ends.ended(ready):
                self._dispatcher.event(events.ProcessEnded(process_id), time.monotonic_ns())
            if self._wake_read in ready:
                self._tasks_turn()
            if self._sockets.control.descriptor in ready or self._sockets.control.pending:
                self._control_turn()
            if self._sockets.events.descriptor in ready or self._sockets.events.pending:
                self._sockets.events.read_subscriptions(time.monotonic_ns())
            if self._slots is not None:
                self._slots_turn(self._slots, ready)
            self._hooks_turn()
            self._timers_turn()
            self._sockets.hooks.flush()
            self._dispatcher.publish_notes()
            self._sockets.events.flush()

    def _wait(self) -> set[int]:
        """Readable sources.  Around a handover the loop polls instead of sleeping (engine/leases.py)."""
        timeout_ns = self._timeout_ns()
        awake_until_ns = self._dispatcher.awake_until_ns
        if awake_until_ns and not self._sockets.hooks.pending:
            now_ns = time.monotonic_ns()
            if now_ns < awake_until_ns:
                bound_ns = awake_until_ns if timeout_ns is None else min(awake_until_ns, now_ns + timeout_ns)
                if self._sockets.hooks.stay_awake(bound_ns):
                    return set()  # hooks first; the next turn polls the other sources
                return self._sockets.waiter.wait(0)
        return self._sockets.waiter.wait(0 if any(each.pending for each in self._listeners) else timeout_ns)

    def _hooks_turn(self) -> None:
        clock = time.monotonic_ns
        dispatcher = self._dispatcher
        gone, frames = self._sockets.hooks.receive(clock())
        for connection in gone:
            dispatcher.gone(connection, clock())
        for connection, frame in frames:
            dispatcher.frame(connection, frame, clock())
        if not len(dispatcher):
            self._schedule_leave_check(clock())
        else:
            self._leave_check_ns = None

    def _control_turn(self) -> None:
        clock, control = time.monotonic_ns, self._sockets.control
        for connection, peer, request in control.take(clock()):
            user_id = peer.user_id
            now_ns, began_ns, changes = clock(), time.thread_time_ns(), self._administration.changes
            refusal = self._readers.refusal(user_id, now_ns)
            if refusal is None:
                reply = self._administration.answer(request, user_id, now_ns, peer.process_id)
                logged_ns = CHANGE_NS if self._administration.changes > changes else 0
                self._readers.charge(user_id, time.thread_time_ns() - began_ns + logged_ns)
            else:
                reply = encode_error(refusal)
            control.send(connection, reply)
        control.flush()

    def _slots_turn(self, slots: SlotWatch, ready: set[int]) -> None:
        now_ns = time.monotonic_ns()
        due_ns = slots.next_deadline_ns()
        changed = slots.descriptor in ready
        if changed or (due_ns is not None and due_ns <= now_ns):
            for client in slots.turn(now_ns, changed):
                self._dispatcher.settle(client, now_ns)

    def _tasks_turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._tasks:
            self._tasks.popleft()()

    def _timers_turn(self) -> None:
        now_ns = time.monotonic_ns()
        due_ns = self._dispatcher.deadline_ns
        if due_ns is not None and now_ns >= due_ns:
            self._dispatcher.event(events.TimerFired(), now_ns)
        if not self._dispatcher.scheduler.wants_looks:
            self._look_ns = None
        elif self._look_ns is None:
            self._look_ns = now_ns + LOOK_NS
        elif now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._dispatcher.event(
                events.Look(tuple(sorted(filter(is_stopped, self._dispatcher.scheduler.watched)))), now_ns
            )
        for source in self._timed:
            due_ns = source.next_deadline_ns()
            if due_ns is not None and now_ns >= due_ns:
                source.expire(now_ns)
        if self._ping_at_ns is not None and now_ns >= self._ping_at_ns:
            self._ping_at_ns = now_ns + self._ping_period_ns
            self._ping()
        if self._leave_check_ns is not None and now_ns >= self._leave_check_ns:
            self._leave_check_ns = None
            if self._leave_when is not None and self._leave_when():
                log.info("no program uses this embedded coordinator any more; stopping")
                self._stopping = True
            else:
                self._schedule_leave_check(now_ns)

    def _schedule_leave_check(self, now_ns: int) -> None:
        if self._leave_when is not None and self._leave_check_ns is None:
            self._leave_check_ns = now_ns + self._linger_ns

    def _timeout_ns(self) -> int | None:
        slots_ns = None if self._slots is None else self._slots.next_deadline_ns()
        due = [self._dispatcher.deadline_ns, self._leave_check_ns, self._look_ns, self._ping_at_ns, slots_ns]
        due += [source.next_deadline_ns() for source in self._timed]
        times = [at for at in due if at is not None]
        return max(0, min(times) - time.monotonic_ns()) if times else None

    def close(self) -> None:
        """Closes the descriptors.  Call after `run`."""
        signal.set_wakeup_fd(-1)
        if self._slots is not None:
            self._slots.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
