"""A seeded world: processes that live, work, hang and die, a network that delays, a coordinator that crashes, and the
real core.

The processes are models of hooks: they hold a gate open between `Grant` and `Release`, so the world knows who could
be using which GPU at every moment.  That is compared with what the core does, independently of what the core
believes:

- invariant 1, 7: when the core grants an exclusive lease, no other process has its gate open or work unfinished on
  that GPU, except one that is excused (its drain is past the deadline; its connection broke while it was at work; it
  was let in concurrently before);
- invariant 4: what is really on a card never exceeds its capacity, while the core knows of everybody (`occupy`);
- gangs: how long members have had their gates open at the same time, and how long one had while another waited;
- invariant 7: after everything has calmed down nobody waits, and every process that asked was served; but those who
  do not fit beside what others have that cannot move, and cannot run from the host, are named as such.

The core's own checks (invariants.py) run after each event.

Invariants: all chance comes from one seed; time is the queue's.  May not go here: assertions on single features
(tests/).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from coordinator import commands, events, wire
from coordinator.scheduler import PolicyFactory, Scheduler, Settings
from coordinator.simulated_client import Plan, Process, Side
from coordinator.state import MILLISECOND_NS, SECOND_NS

MICROSECOND_NS = 1000
RECOVERY_NS = 2 * SECOND_NS
UNKNOWN_NS = 2 * SECOND_NS
"""After this a process that has lost its connection has certainly connected again and told what it has."""


class World:
    """Everything, and the queue of what happens next."""

    def __init__(self, seed: int, plan: Plan, policies: PolicyFactory, settings: Settings) -> None:
        self.chance = random.Random(seed)
        self.plan = plan
        self.settings = settings
        self.policies = policies
        self.now_ns = SECOND_NS
        self.calm = False
        self.scheduler: Scheduler | None = None
        self.journal: dict[str, tuple[int, int]] = {}
        self.processes: dict[int, Process] = {}
        self.connections: dict[int, Process] = {}
        self.handled = 0
        self.crashes = 0
        self.grants = 0
        self.excused = 0
        self.restores = 0
        self.credits = 0
        self.host_refused = 0
        """How often a process was refused host memory."""
        self.refused_in_calm = 0
        """Nobody allocates any more then: these were refused room for what they have already."""
        self.pins_refused = 0
        self.lacking = 0
        """How often somebody did not fit beside what others have that cannot move."""
        self.shut_out = 0
        self.gathered = 0
        self.together_ns = 0
        self.apart_ns = 0
        self.unknown_until_ns = 0
        """Somebody may have memory that the core has not heard of (yet, or any more)."""
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._sharing: dict[object, wire.Sharing] = {}
        """By GPU, as the core has told, up to the command at hand.

        A claim that brings more memory than fits beside the others' is confirmed, and ends sharing side by side: in the
        commands of one event its `Grant` comes first, side by side with theirs; then all are revoked, turns begin, and
        what is granted from there on is granted to one."""
        self._next_connection = 1
        self._next_pid = 100
        self._timer = 0
        self._expected: dict[str, int] = {}
        self._peer: dict[int, Scheduler | None] = {}
        """The coordinator at the other end of each connection, which may be dead."""
        self._up_ns: dict[int, int] = {}
        self._down_ns: dict[int, int] = {}
        self.uuids = [f"GPU-{number}" for number in range(plan.gpus)]

    # --- time ---------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Later; in the order of asking when at the same time."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._sequence, action))

    def run(self) -> None:
        """The whole plan, then calm: nothing new is wanted, everything that was is served."""
        self.start_coordinator()
        for _ in range(self.plan.processes):
            self.new_process()
        if self.plan.crash_every_ns:
            self.after(self.plan.crash_every_ns, self.crash)
        if self.plan.admin_every_ns:
            self.after(self.plan.admin_every_ns, self.meddle)
        end_ns = self.now_ns + self.plan.duration_ns
        self._run_until(end_ns)
        self.calm = True
        if self.scheduler is None:
            self.start_coordinator()
        for number, process in self.connections.items():
            if process.alive:
                self.give(events.Resumed(number))
        self._run_until(end_ns + 600 * SECOND_NS)
        self._check_end()

    def _run_until(self, end_ns: int) -> None:
        while self._queue and self._queue[0][0] <= end_ns:
            at_ns, _, action = heapq.heappop(self._queue)
            if self.plan.gangs:
                self._watch_gangs(at_ns - self.now_ns)
            self.now_ns = at_ns
            action()
        self.now_ns = max(self.now_ns, end_ns if self._queue else self.now_ns)

    # --- the coordinator ----------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """A new one, with what the journal says."""
        if self.scheduler is not None:
            return
        self.scheduler = Scheduler(self.policies, self.settings)
        self._sharing = dict.fromkeys(self.uuids, self.settings.sharing)
        for uuid in self.uuids:
            lease, pid = self.journal.get(uuid, (0, 0))
            self._expected[uuid] = pid
            lives = pid == commands.MANY_HOLDERS or (pid in self.processes and self.processes[pid].alive)
            capacity = self.plan.capacity_bytes
            self.give(
                events.GpuAdded(
                    uuid, "Model", capacity, capacity, lease + 1, pid if lives else None, self.now_ns + RECOVERY_NS
                )
            )

    def crash(self) -> None:
        """SIGKILL of the coordinator: what it sent may still arrive, what it was sent is lost."""
        if self.calm or self.scheduler is None:
            return
        self.crashes += 1
        self.unknown_until_ns = self.now_ns + UNKNOWN_NS
        self.scheduler = None
        self._timer += 1
        for number, process in list(self.connections.items()):
            if self.chance.random() < 0.5:
                self._down_ns.pop(number, None)
                del self.connections[number]
                process.lost()
            else:
                last_ns = max(0, self._down_ns.get(number, 0) - self.now_ns)
                self.after(last_ns + 1, lambda n=number: self._cut(n))  # type: ignore[misc]
        self.after(self.chance.randint(1, 200) * MILLISECOND_NS, self.start_coordinator)
        self.after(self.plan.crash_every_ns, self.crash)

    def _cut(self, number: int) -> None:
        process = self.connections.pop(number, None)
        if process is not None and process.connection == number:
            process.lost()

    def give(self, event: events.Event) -> None:
        """Let the core have an event, and carry out what it says."""
        if self.scheduler is None:
            return
        self.handled += 1
        out = self.scheduler.handle(event, self.now_ns)
        for command in out:
            if isinstance(command, commands.Send):
                self._check_send(command)
                self._send_down(command.client, command.message)
            elif isinstance(command, commands.RecordLease):
                self.journal[command.uuid] = (command.lease_id, command.process_id)
            elif isinstance(command, commands.SetTimer):
                self._set_timer(command.deadline_ns)
            elif isinstance(command, commands.Notify):
                if command.kind == "sharing":
                    self._sharing[command.values["uuid"]] = wire.Sharing[str(command.values["sharing"]).upper()]
                self.gathered += command.kind == "gang_gathered"
                self.host_refused += command.kind == "refused" and "owner" in command.values
                self.refused_in_calm += command.kind == "refused" and self.calm
                self.lacking += command.kind == "lacks_room"
                self.shut_out += command.kind == "shut_out"
            elif isinstance(command, commands.Kill):
                victim = self.connections.get(command.client)
                if victim is not None:
                    self.after(MILLISECOND_NS, lambda v=victim: self.kill(v))  # type: ignore[misc]

    def _set_timer(self, deadline_ns: int | None) -> None:
        self._timer += 1
        number = self._timer
        if deadline_ns is not None:
            late_ns = self.chance.randint(0, 100) * MICROSECOND_NS
            self.after(max(0, deadline_ns - self.now_ns) + late_ns, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number == self._timer:
            self.give(events.TimerFired())

    # --- the network --------------------------------------------------------------------------------------------

    def new_connection(self, process: Process) -> int:
        """Numbers are never used again."""
        number = self._next_connection
        self._next_connection += 1
        self.connections[number] = process
        self._peer[number] = self.scheduler
        return number

    def send_up(self, number: int, event: events.Event) -> None:
        """In order, after a delay, unless the coordinator or the connection is gone by then."""
        at_ns = max(self._up_ns.get(number, 0), self.now_ns + self.chance.randint(5, 300) * MICROSECOND_NS)
        self._up_ns[number] = at_ns
        self.after(at_ns - self.now_ns, lambda: self._arrive(number, event))

    def _arrive(self, number: int, event: events.Event) -> None:
        if number in self.connections and self._peer[number] is self.scheduler:
            self.give(event)

    def _send_down(self, number: int, message: wire.Message) -> None:
        wire.encode(message)
        at_ns = max(self._down_ns.get(number, 0), self.now_ns + self.chance.randint(5, 300) * MICROSECOND_NS)
        self._down_ns[number] = at_ns
        self.after(at_ns - self.now_ns, lambda: self._deliver(number, message))

    def _deliver(self, number: int, message: wire.Message) -> None:
        process = self.connections.get(number)
        if process is not None and process.connection == number:
            process.hear(message)

    # --- processes ----------------------------------------------------------------------------------------------

    def new_process(self) -> None:
        """On some of the GPUs, working at once."""
        self._next_pid += 1
        count = self.chance.randint(1, len(self.uuids))
        kind = self.chance.random() if self.plan.device_share or self.plan.swap_share else 1.0
        mode = wire.MemoryMode.MANAGED
        if kind < self.plan.device_share:
            mode = wire.MemoryMode.DEVICE
        elif kind < self.plan.device_share + self.plan.swap_share:
            mode = wire.MemoryMode.SWAP
        uuids, priority = self.chance.sample(self.uuids, count), self.chance.randint(-1, 2)
        gang = ""
        if self.plan.gangs and self.chance.random() < 0.7:
            gang = f"g{self.chance.randrange(self.plan.gangs)}"
        process = Process(self, self._next_pid, uuids, mode, priority, gang)
        if self.plan.pin_chance:
            process.old = self.chance.random() < self.plan.old_share
            process.unhosted = self.chance.random() < self.plan.unhosted_share
        self.processes[process.pid] = process
        process.connect()
        for side in process.sides.values():
            self.after(self.chance.randint(0, 50) * MILLISECOND_NS, lambda s=side: process.live(s))  # type: ignore[misc]

    def kill(self, process: Process) -> None:
        """SIGKILL: the connection ends soon after; another process takes its place."""
        if not process.alive:
            return
        process.alive = False
        number, process.connection = process.connection, None
        for side in process.sides.values():
            side.open = side.closing = side.wanted = False
            side.move = None
            side.resident = side.allocated = side.pinned = 0
        if number is not None:
            self.after(MILLISECOND_NS, lambda: self._disconnected(number))
        for uuid in [uuid for uuid, pid in self._expected.items() if pid == process.pid]:
            self.after(MILLISECOND_NS, lambda u=uuid: self.give(events.HolderGone(u)))  # type: ignore[misc]
        if not self.calm:
            self.new_process()

    def drop(self, process: Process) -> None:
        """The connection breaks, the process does not notice at once and goes on."""
        number = process.connection
        assert number is not None
        self.unknown_until_ns = self.now_ns + UNKNOWN_NS
        for side in process.sides.values():
            side.excused = side.excused or side.open
        if self.chance.random() < 0.5:
            self._disconnected(number)
        else:  # it is noticed late, perhaps after the process has connected again
            self.after(self.chance.randint(1, 900) * MILLISECOND_NS, lambda: self._disconnected(number))
        process.lost()

    def _disconnected(self, number: int) -> None:
        if self.connections.pop(number, None) is not None and self._peer[number] is self.scheduler:
            self.give(events.ClientGone(number))

    # --- the operator -------------------------------------------------------------------------------------------

    def meddle(self) -> None:
        """Any administrative event."""
        if self.calm:
            return
        chance = self.chance
        client = chance.choice(list(self.connections) or [0])
        uuid = chance.choice([None, *self.uuids])
        choices: list[events.Event] = [
            events.QuantumSet(chance.choice([None, 20 * MILLISECOND_NS, 200 * MILLISECOND_NS]), uuid),
            events.PolicySet(chance.choice(["round_robin", "priority", "fair_share"]), {}, uuid),
            events.SharingSet(chance.choice(list(wire.Sharing)), uuid),
            events.PrioritySet(client, chance.randint(-2, 3)),
            events.WeightSet(client, chance.choice([1, 2, 5])),
            events.LimitSet(client, chance.choice([0, 100])),
            events.ResidentLimitSet(client, chance.choice([0, 200]), uuid),
            events.HostBudgetSet(chance.choice([500, 5000])),
            events.SwitchShareSet(chance.choice([0.02, 0.05]), uuid),
            events.Paused(client),
            events.Resumed(client),
        ]
        if self.plan.gangs:
            choices.append(events.GangSet(client, chance.choice(["", "g0"])))
        if self.plan.pin_chance:  # some cannot run from the host, and who allocates without a lease has no share of it
            choices = [c for c in choices if not isinstance(c, events.HostBudgetSet | events.ResidentLimitSet)]
        self.give(chance.choice(choices))
        self.after(self.plan.admin_every_ns, self.meddle)

    # --- checks -------------------------------------------------------------------------------------------------

    def resident(self, uuid: str) -> int:
        """Bytes really on the card."""
        return sum(s.resident for p in self.processes.values() for s in p.sides.values() if s.uuid == uuid)

    def occupy(self, side: Side, size: int) -> int:
        """A model brings memory onto the card, as much as it was told that there is room for; returns how much fits.

        Invariant 4: all of it, unless the core cannot know of what is there: somebody has lost his connection, or a
        pager has filled the card, for which nobody asks."""
        room = self.plan.capacity_bytes - self.resident(side.uuid)
        known = self.now_ns >= self.unknown_until_ns and self.plan.swap_share + self.plan.device_share >= 1.0
        assert size <= room or not known, f"invariant 4: {size} brought to {side.uuid}, room for {room}"
        side.resident += (size := max(0, min(size, room)))
        return size

    def _watch_gangs(self, elapsed_ns: int) -> None:
        """So long nothing has changed."""
        at_work: dict[str, set[str]] = {}
        waiting: dict[str, set[str]] = {}
        for process in self.processes.values():
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

    def _check_send(self, command: commands.Send) -> None:
        process, message = self.connections.get(command.client), command.message
        if process is None:
            return
        if isinstance(message, wire.Restore | wire.MoveCredit):
            self.restores += isinstance(message, wire.Restore)
            self.credits += isinstance(message, wire.MoveCredit)
            return
        if not isinstance(message, wire.Grant | wire.Revoke):
            return
        side = process.sides[message.gpu]
        uuid = side.uuid
        if isinstance(message, wire.Revoke):
            lease = message.lease_id
            self.after(message.drain_deadline_ns, lambda: process.excuse(side, lease))
            return
        self.grants += 1
        if self._sharing[uuid] is wire.Sharing.CONCURRENT:
            return
        for other in self.processes.values():
            for its in other.sides.values():
                if its.uuid == uuid and its.open and other is not process:
                    assert its.excused, f"invariant 1 or 7: {uuid} granted to {process.pid} while {other.pid} has it"
                    self.excused += 1

    def _check_end(self) -> None:
        assert self.scheduler is not None
        snapshot = self.scheduler.snapshot(self.now_ns)
        named = {
            (client.process_id, seat.uuid)
            for client in snapshot.clients
            for seat in client.seats
            if seat.shut_out and seat.lacking_bytes and seat.waiting_since_ns is not None
        }
        for gpu in snapshot.gpus:
            waiting = gpu.waiting - sum(uuid == gpu.uuid for _, uuid in named)
            assert waiting == 0, f"{waiting} wait for {gpu.uuid} for ever: {gpu}"
        for process in self.processes.values():
            for side in process.sides.values():
                waits = process.alive and side.wanted and not side.open and (process.pid, side.uuid) not in named
                assert not waits, f"process {process.pid} was lost: {side}"
