"""Checks of a world (world.py) against what its models really do, and counts of what happened.

- Invariants 1 and 7: at a grant each other process that has its gate open or unfinished work on that GPU holds a lease
  of the plan; or gives one back, if the new lease has no turn.  Under exclusive sharing such a process is a mate in a
  gang's slot.
  Excused are processes past their drain's deadline, with a connection lost at work, or missing in a damaged journal.
  A confirmed claim under other sharing begins no work, so it is not checked.
- Invariant 7: in the end every process was served, and no client waits.  Excepted are clients that do not fit beside
  immovable memory of others and are reported as such.
- Gangs: time in which members had their gates open together, and in which one had while another waited.

Limits of the coordinator's effort, and of its clients' waits:
- Timers: after the timer has fired, the next deadline is in the future.  In each 100 ms of simulated time the timer
  fires at most `TIMERS_PER_GPU` times for each GPU, `TIMERS_PER_QUANTUM` times for each quantum of each running
  client, and once for each other event.
- Messages: one event causes at most `MESSAGES_PER_SEAT` messages for each client and each of its GPUs.
- Memory: the number of clients bounds the entries in all containers of the engine, the dispatcher and the slot book,
  checked after every `CHECK_EVERY` events.  Nothing remains after the last client.
- Work: in a world without obstacles, memory moves without any work for at most half of the time in which clients want
  the GPU, or for what switches may cost (engine/memory/switch_credit.py).  In such a world all memory can move and
  fits, no process hangs, stops or dies, the coordinator lives, and there is no operator and no hostile client.
- Waits: in such a world without gangs, if a turn is long enough for a move (`MIN_QUANTUM_NS`, or automatic), a client
  waits at most as long as its policy states, plus `TURN_COST_NS` for each turn.

The engine's own checks are in engine/invariants.py.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from nvshare.bench.virtual_node.process import Process
from nvshare.coordinator.engine.memory.switch_credit import MOST_NS
from nvshare.coordinator.engine.policy_guard import QUANTUM_BOUNDS_NS
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.seat import HOLDING, REVOKING
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.registry import BUILT_IN

if TYPE_CHECKING:
    from nvshare.bench.virtual_node.coordinator import Shell
    from nvshare.bench.virtual_node.world import World
    from nvshare.coordinator.model.node import Node

CALM_EVENTS = 20_000
"""Most events in the ten minutes of calm at the end; a world with more does not come to rest."""


class Checks:
    """The checks of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._handled_before_calm = 0
        self.grants = 0
        self.excused = 0
        self.targets = 0
        self.rising = 0
        """Targets below a goal."""
        self.host_refused = 0
        """Refused requests for host memory."""
        self.refused_in_calm = 0
        """Refused requests for room in the calm, when no process allocates: they were for existing memory."""
        self.pins_refused = 0
        self.lacking = 0
        """Clients that did not fit beside immovable memory of others.  In the second after a restart they do not count:
        they may have allocated before other clients were back."""
        self.unschedulable = 0
        self.gathered = 0
        self.together_ns = 0
        self.apart_ns = 0

    def calm_begins(self) -> None:
        """From now on no process begins new work."""
        self._handled_before_calm = self._world.handled

    def watch(self, out: Sequence[commands.Command]) -> None:
        """Checks the commands of one event, in their order."""
        world = self._world
        restless = world.calm and world.handled > self._handled_before_calm + CALM_EVENTS
        assert not restless, f"the world has not come to rest after {CALM_EVENTS} events without new work"
        for command in out:
            if isinstance(command, commands.Send):
                self._check_send(command, out)
            elif isinstance(command, commands.Notify):
                self._count(command)

    def _count(self, note: commands.Notify) -> None:
        self.gathered += note.kind == "gang_gathered"
        self.host_refused += note.kind == "refused" and "owner" in note.values
        self.refused_in_calm += note.kind == "refused" and self._world.calm
        self.lacking += note.kind == "lacks_room" and not self._is_reconnecting(str(note.values["uuid"]))
        self.unschedulable += note.kind == "unschedulable"

    def _is_reconnecting(self, uuid: str) -> bool:
        assert self._world.scheduler is not None
        return self._world.scheduler._node.gpus[uuid].reconnecting(self._world.now_ns)

    def _check_send(self, command: commands.Send, out: Sequence[commands.Command]) -> None:
        world = self._world
        process, message = world.network.connections.get(command.client), command.message
        if not isinstance(process, Process):
            return
        if isinstance(message, messages.Target):
            side = process.sides.get(message.gpu)
            if side is not None and message.number > side.memory.mover.number:  # else it brings an answer alone
                self.targets += 1
                self.rising += message.rises
            return
        if not isinstance(message, messages.Grant | messages.Revoke):
            return
        side = process.sides[message.gpu]
        uuid = side.uuid
        if isinstance(message, messages.Revoke):
            number = message.lease_id
            world.after(message.drain_deadline_ns, lambda: process.excuse(side, number))
            return
        self.grants += 1
        for other in world.processes.values():
            for its in other.sides.values():
                if its.uuid == uuid and its.open and other is not process:
                    fits = its.excused or self._may_be_beside(command, uuid, other, side.open, out)
                    assert fits, f"invariant 1 or 7: {uuid} granted to {process.pid} while {other.pid} has it"
                    self.excused += its.excused

    def _may_be_beside(
        self, grant: commands.Send, uuid: str, other: Process, claimed: bool, out: Sequence[commands.Command]
    ) -> bool:
        """Whether the plan has the other process run beside the grant, which is one of the commands `out`."""
        assert self._world.scheduler is not None
        gpu = self._world.scheduler._node.gpus[uuid]
        seat = None if other.connection is None else gpu.seats.get(other.connection)
        gang, mine = None if gpu.gang is None else gpu.gang.name, gpu.seats[grant.client]
        own = mine.client.facts.gang
        in_slot = any(
            isinstance(each, commands.Notify) and each.kind == "plan" and each.values["uuid"] == uuid
            and each.values["why"] == f"gang {own} has its slot"
            for each in out
        )  # fmt: skip
        # The slot began and ended with this event, or a member of an earlier one has connected again.
        if own and (in_slot or claimed or mine.phase is REVOKING):
            gang = own
        if seat is not None and seat.client.facts.gang == mine.client.facts.gang == gang:
            return True
        if gpu.settings.sharing is Sharing.EXCLUSIVE:
            return False
        if claimed or (seat is not None and seat.phase is HOLDING):
            return True
        after = out[out.index(grant) :]
        notes = [
            note for note in after if isinstance(note, commands.Notify) and note.values.get("client") == grant.client
        ]
        if any(note.kind == "claimed" for note in notes):  # it has given back meanwhile what it claims
            return True
        quantum = next(note.values["quantum_ns"] for note in notes if note.kind == "granted")
        if seat is None or seat.phase is not REVOKING:
            return False
        revoked = any(
            isinstance(each, commands.Send)
            and isinstance(each.message, messages.Revoke)
            and each.client == other.connection
            for each in after
        )
        return quantum == 0 or revoked  # perhaps after the grant

    def pass_time(self, elapsed_ns: int) -> None:
        """Accounts for the gangs' time since the last change."""
        at_work: dict[str, set[str]] = {}
        waiting: dict[str, set[str]] = {}
        for process in self._world.processes.values():
            if process.alive and process.gang:
                for side in process.sides.values():
                    if side.open:
                        at_work.setdefault(process.gang, set()).add(side.uuid)
                    elif side.asked:
                        waiting.setdefault(process.gang, set()).add(side.uuid)
        for gang, gpus in at_work.items():
            if len(gpus) > 1:
                self.together_ns += elapsed_ns
            elif waiting.get(gang, gpus) - gpus:
                self.apart_ns += elapsed_ns

    def check_end(self) -> None:
        """Asserts that every process was served, or is told what it lacks.

        One that had more than its limit before a restart may have to wait for memory that others keep since.
        """
        world = self._world
        assert world.scheduler is not None
        snapshot = world.scheduler.snapshot(world.now_ns)
        sides = [(process.connection, side) for process in world.processes.values() for side in process.sides.values()]
        beyond = {(connection, side.uuid) for connection, side in sides if side.over_its_limit}
        reported = {
            (client.client, seat.uuid)
            for client in snapshot.clients
            for seat in client.seats
            if seat.turn.waiting_since_ns is not None
            and seat.memory.unschedulable
            and (seat.memory.lacking_bytes or (client.client, seat.uuid) in beyond)
        }
        for gpu in snapshot.gpus:
            waiting = gpu.leases.waiting - sum(uuid == gpu.uuid for _, uuid in reported)
            assert waiting == 0, f"{waiting} wait for {gpu.uuid} for ever: {gpu}"
        for process in world.processes.values():
            for side in process.sides.values():
                waits = process.alive and side.wanted and not side.open
                lost = waits and (process.connection, side.uuid) not in reported
                assert not lost, f"process {process.pid} was lost: {side}"


WINDOW_NS: Final = 100 * MILLISECOND_NS
TIMERS_PER_GPU: Final = 20
TIMERS_PER_QUANTUM: Final = 3
"""Before its end, at its end, and late, for a policy that renews each quantum without other events."""
SHORTEST_TURN_NS: Final = MILLISECOND_NS
"""A policy may give turns that are shorter than the quantum, as for a small weight."""
MESSAGES_PER_SEAT: Final = 3
ENTRIES_PER_SEAT: Final = 40
ENTRIES_PER_GPU: Final = 80
CHECK_EVERY: Final = 500
SHORTEST_NS: Final = 20 * MILLISECOND_NS
"""Shortest quantum of the built-in policies here."""
MIN_QUANTUM_NS: Final = 100 * MILLISECOND_NS
TURN_COST_NS: Final = 300 * MILLISECOND_NS
"""A model moves its memory in at most 5 steps of 8 ms, after the other clients; a refused growth takes 200 ms."""

_PLAIN: Final = (int, float, str, bytes, type, type(None), type(len), type(lambda: None))


class Bounds:
    """The limits of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.checks_work = has_no_obstacles(world)
        self.checks_waits = self.checks_work and not world.plan.gangs and _has_long_turns(world)
        self.sent = 0
        self.most_timers = 0
        """Most timers in one window, beyond one for each other event."""
        self.most_sent = 0
        self.most_entries = 0
        self.moving_share = 0.0
        self.worst_wait = 0.0
        """Longest wait as a share of the allowed one."""
        # The world's operator and the engine use 20 ms or more; a policy may ask for less.
        known = world.settings.policy in BUILT_IN
        self._quantum_ns = min(world.settings.quantum_ns or SHORTEST_NS, SHORTEST_NS) if known else QUANTUM_BOUNDS_NS[0]
        self._window_ends_ns = 0
        self._window_timers = 0
        self._window_turns = 0
        """Most clients that ran at one time in the window: each may have turns of its own."""
        self._next_check = CHECK_EVERY
        self._moving_ns: dict[str, int] = {}
        self._wanted_ns: dict[str, int] = {}
        self._waits: dict[tuple[int, int], tuple[int, int]] = {}
        """Since when a client waits, and what its policy allowed then: an automatic quantum may shrink meanwhile."""
        self._holding: set[tuple[int, int]] = set()

    def figures(self) -> dict[str, float]:
        """The highest values of this world; as shares of the limit where there is one."""
        return {
            "timers_for_nothing_in_100_ms": self.most_timers,
            "messages_of_one_event": self.most_sent,
            "entries": self.most_entries,
            "moving_share": round(self.moving_share, 3),
            "wait_over_allowed": round(self.worst_wait, 3),
        }

    def watch(self, event: events.Event, out: Sequence[commands.Command]) -> None:
        """Checks an event and its commands."""
        self._timer(event, out)
        self._messages(out)
        if self._world.handled >= self._next_check:
            self._next_check += CHECK_EVERY
            self._check_entries()
        if self.checks_waits:
            self._wait(event, out)

    def _timer(self, event: events.Event, out: Sequence[commands.Command]) -> None:
        now_ns, fired = self._world.now_ns, type(event) is events.TimerFired
        if now_ns >= self._window_ends_ns:
            self._window_ends_ns, self._window_timers, self._window_turns = now_ns + WINDOW_NS, 0, 0
        self._window_timers = max(0, self._window_timers + (1 if fired else -1))
        self.most_timers = max(self.most_timers, self._window_timers)
        gpus = self._node.gpus.values()
        running = sum(max(1, len(gpu.leases.running)) for gpu in gpus)
        turns_ns = [a.quantum_ns for gpu in gpus for a in gpu.schedule.members.values() if a.quantum_ns]
        shortest_ns = min(self._quantum_ns, max(SHORTEST_TURN_NS, min(turns_ns, default=self._quantum_ns)))
        self._window_turns = max(self._window_turns, running * TIMERS_PER_QUANTUM * WINDOW_NS // shortest_ns)
        most = len(self._world.uuids) * TIMERS_PER_GPU + self._window_turns
        assert self._window_timers <= most, f"the timer fired {self._window_timers} times for nothing within 100 ms"
        if fired:
            for command in out:
                if type(command) is commands.SetTimer and command.deadline_ns is not None:
                    late_ns = now_ns - command.deadline_ns
                    assert late_ns < 0, f"a timer that has just fired is overdue again by {late_ns} ns"

    def _messages(self, out: Sequence[commands.Command]) -> None:
        sent = sum(type(command) is commands.Send for command in out)
        self.sent += sent
        if sent > self.most_sent:
            self.most_sent = sent
            most = MESSAGES_PER_SEAT * (1 + self._seats())
            assert sent <= most, f"{sent} messages for one event, at most {most} are expected"

    @property
    def _node(self) -> Node:
        assert self._world.scheduler is not None
        return self._world.scheduler._node

    def _seats(self) -> int:
        """Number of clients plus the number of their GPUs."""
        node = self._node
        return len(node.clients) + sum(len(gpu.seats) for gpu in node.gpus.values())

    # --- memory of the coordinator ----------------------------------------------------------------------------------

    def _check_entries(self) -> None:
        assert self._world.shell is not None
        found, seats = entries(self._world.shell), self._seats()
        self.most_entries = max(self.most_entries, found)
        most = ENTRIES_PER_GPU * (2 + len(self._world.uuids)) + ENTRIES_PER_SEAT * seats
        assert found <= most, f"the coordinator has {found} entries for {seats} clients and seats, at most {most}"

    def check_empty(self) -> None:
        """Asserts that nothing remains after the last client."""
        self._check_entries()
        shell = self._world.shell
        assert shell is not None
        assert not len(shell.dispatcher), "the dispatcher knows clients that have left"
        assert not self._seats(), "invariant 6: the engine knows clients that have left"
        for uuid, wanted_ns in self._wanted_ns.items():
            moving_ns = self._moving_ns.get(uuid, 0)
            share, most_ns = moving_ns / wanted_ns, max(wanted_ns / 2, MOST_NS + wanted_ns / 5)
            self.moving_share = max(self.moving_share, share)
            assert moving_ns <= most_ns, f"memory of {uuid} moved without work for {share:.0%} of the time"

    # --- work -------------------------------------------------------------------------------------------------------

    def pass_time(self, elapsed_ns: int) -> None:
        """Accounts for the time since the last change."""
        if not self.checks_work or self._world.calm or not elapsed_ns:
            return
        wanted: dict[str, bool] = {}
        moving: dict[str, bool] = {}
        for process in self._world.processes.values():
            for side in process.sides.values():
                uuid = side.uuid
                wanted[uuid] = wanted.get(uuid, False) or side.open or side.wanted
                moving[uuid] = not side.open and moving.get(uuid, True)
        for uuid in [uuid for uuid, some in wanted.items() if some]:
            self._wanted_ns[uuid] = self._wanted_ns.get(uuid, 0) + elapsed_ns
            if moving[uuid] and self._moves(uuid):
                self._moving_ns[uuid] = self._moving_ns.get(uuid, 0) + elapsed_ns

    def _moves(self, uuid: str) -> bool:
        sides = (side for process in self._world.processes.values() for side in process.sides.values())
        return any(not side.memory.mover.at_rest for side in sides if side.uuid == uuid)

    # --- waits ------------------------------------------------------------------------------------------------------

    def _wait(self, event: events.Event, out: Iterable[commands.Command]) -> None:
        message = event.message if isinstance(event, events.Received) else None
        if isinstance(event, events.Received) and isinstance(
            message, messages.Request | messages.AttachGpu | messages.Release
        ):
            key = (event.client, message.gpu)
            if isinstance(message, messages.Release):
                self._holding.discard(key)
            asks = isinstance(message, messages.Request) or message.wanted
            if asks and key not in self._holding:
                self._waits.setdefault(key, (self._world.now_ns, self._allowed_ns(key)))
        for command in out:
            if isinstance(command, commands.Send) and isinstance(command.message, messages.Grant):
                self._granted((command.client, command.message.gpu))

    def _allowed_ns(self, key: tuple[int, int]) -> int:
        """The longest wait as things are; 0: the policy states none."""
        gpu = self._node.clients[key[0]].seats[key[1]].gpu
        bound_ns = gpu.policy_guard.wait_bound_ns(len(gpu.seats), gpu.view())
        if bound_ns is None:
            return 0
        return max(bound_ns, len(gpu.seats) * MIN_QUANTUM_NS) + len(gpu.seats) * TURN_COST_NS

    def _granted(self, key: tuple[int, int]) -> None:
        self._holding.add(key)
        since_ns, before_ns = self._waits.pop(key, (None, 0))
        now_ns = self._allowed_ns(key)
        if since_ns is None or not now_ns:
            return
        waited_ns, allowed_ns = self._world.now_ns - since_ns, max(before_ns, now_ns)
        self.worst_wait = max(self.worst_wait, waited_ns / allowed_ns)
        assert waited_ns <= allowed_ns, f"client {key[0]} waited {waited_ns} ns, at most {allowed_ns}"


def has_no_obstacles(world: World) -> bool:
    """Whether only the coordinator could keep a process from working."""
    plan, settings = world.plan, world.settings
    obstacles = (
        plan.hang_chance, plan.death_chance, plan.drop_chance, plan.crash_every_ns, plan.admin_every_ns, plan.hostiles,
        plan.short_move_chance, plan.pin_chance, plan.stop_chance, plan.slot_share,
    )  # fmt: skip
    fits = not plan.memory_bytes or (plan.swap_share == 1.0 and plan.memory_bytes <= plan.capacity_bytes)
    known = settings.policy in BUILT_IN and settings.sharing is not Sharing.CONCURRENT
    return fits and known and settings.host_budget_bytes is None and not any(obstacles)


def _has_long_turns(world: World) -> bool:
    quantum_ns = world.settings.quantum_ns
    return quantum_ns is None or quantum_ns >= MIN_QUANTUM_NS


def entries(shell: Shell) -> int:
    """Entries in all containers of the coordinator, without samples and the event log, which have fixed lengths."""
    own = {"scheduler", "_outbox", "_journal"}
    found, seen = 0, set[int]()
    left: list[object] = [shell.scheduler._node, *(v for k, v in vars(shell.dispatcher).items() if k not in own)]
    while left:
        thing = left.pop()
        if isinstance(thing, _PLAIN) or id(thing) in seen or type(thing).__name__ in ("method", "Settings"):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set) or (isinstance(thing, deque) and thing.maxlen is None):
            found += len(thing)
        left += gc.get_referents(thing)
    return found
