"""A seeded world: processes that live, work, hang and die, a network that delays, a coordinator that is killed at any
moment, and all of the coordinator that is not a socket.

The processes are models of hooks: they hold a gate open between `Grant` and `Release`, so the world knows who could
be using which GPU at every moment.  They speak encoded messages through the real decoder and dispatcher
(shell.py); beside them hostile clients send anything (hostile.py).  What the models see is compared
with what the core does, independently of what the core believes:

- invariant 1, 7: when the core grants an exclusive lease, no other process has its gate open or work unfinished on
  that GPU, except one that is excused (its drain is past the deadline; its connection broke while it was at work; it
  was let in concurrently before; a damaged journal did not name it);
- invariant 4: what is really on a card never exceeds its capacity, while the core knows of everybody (`occupy`);
- gangs: how long members have had their gates open at the same time, and how long one had while another waited;
- invariant 7: after everything has calmed down nobody waits, and every process that asked was served; but those who
  do not fit beside what others have that cannot move, and cannot run from the host, are named as such.

The core's own checks (engine/invariants.py) run after each event, and those of effort and work (simulation/bounds.py).

Invariants: all chance comes from one seed; time is the queue's.  May not go here: assertions on single features
(tests/).
"""

from __future__ import annotations

import heapq
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler, Settings
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.simulation.bounds import Bounds
from nvshare.coordinator.simulation.client import Plan, Process, Side
from nvshare.coordinator.simulation.hostile import HostileClient
from nvshare.coordinator.simulation.network import Network
from nvshare.coordinator.simulation.shell import Shell
from nvshare.coordinator.simulation.slots import Slots

FIRST_PID = 12_000_100
"""Above every process id of Linux, so that nothing here can ever mean a real process.  A multiple of 12, and 100."""
CALM_EVENTS = 20_000
"""In the ten minutes of calm; a world that has more of them never comes to rest."""
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
        self.shell: Shell | None = None
        self.network = Network(self)
        self.processes: dict[int, Process] = {}
        """By process id; the living."""
        self.hostiles: list[HostileClient] = []
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
        self._sharing: dict[object, messages.Sharing] = {}
        """By GPU, as the core has told, up to the command at hand.

        A claim that brings more memory than fits beside the others' is confirmed, and ends sharing side by side: in the
        commands of one event its `Grant` comes first, side by side with theirs; then all are revoked, turns begin, and
        what is granted from there on is granted to one."""
        self._processes_made = 0
        self._handled_before_calm = 0
        self._unrecorded = False
        """The journal of the coordinator that died last was damaged."""
        self._journal = Path()
        self._expected: dict[str, int | None] = {}
        self.uuids = [f"GPU-{number}" for number in range(plan.gpus)]
        self.slots = Slots(self)
        self.bounds = Bounds(self)

    @property
    def scheduler(self) -> Scheduler | None:
        """Of the present coordinator; None while there is none."""
        return None if self.shell is None else self.shell.scheduler

    # --- time ---------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Later; in the order of asking when at the same time."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._sequence, action))

    def run(self) -> None:
        """The whole plan, then calm: nothing new is wanted, everything that was is served."""
        with tempfile.TemporaryDirectory(prefix="nvshare-world-") as directory:
            self._journal = Path(directory) / "journal"
            try:
                self._run()
            finally:
                if self.shell is not None:
                    self.shell.end()

    def _run(self) -> None:
        plan = self.plan
        self.start_coordinator()
        for _ in range(plan.processes):
            self.new_process()
        for number in range(plan.hostiles):
            self.hostiles.append(HostileClient(self, self._new_pid(), f"h{number}"))
        if plan.crash_every_ns:
            self.after(plan.crash_every_ns, self.crash)
        if plan.admin_every_ns:
            self.after(plan.admin_every_ns, self.meddle)
        end_ns = self.now_ns + plan.duration_ns
        self._run_until(end_ns)
        self.calm = True
        self._handled_before_calm = self.handled
        for hostile in self.hostiles:
            hostile.end()
        self.start_coordinator()
        for number, endpoint in list(self.network.connections.items()):
            if isinstance(endpoint, Process) and endpoint.alive:
                self.give(events.Resumed(number))
        self._run_until(end_ns + 600 * SECOND_NS)
        self._check_end()
        for process in list(self.processes.values()):
            self.kill(process)
        self._run_until(self.now_ns + 600 * SECOND_NS)
        self.bounds.check_empty()

    def _run_until(self, end_ns: int) -> None:
        while self._queue and self._queue[0][0] <= end_ns:
            at_ns, _, action = heapq.heappop(self._queue)
            if self.plan.gangs:
                self._watch_gangs(at_ns - self.now_ns)
            self.bounds.pass_time(at_ns - self.now_ns)
            self.now_ns = at_ns
            action()
        self.now_ns = max(self.now_ns, end_ns if self._queue else self.now_ns)

    # --- the coordinator ----------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """A new one, with what the journal says."""
        if self.shell is not None:
            return
        self._sharing = dict.fromkeys(self.uuids, self.settings.sharing)
        self.shell = Shell(self, self._journal)
        self.shell.begin()

    def crash(self) -> None:
        """SIGKILL of the coordinator, between two turns or in the midst of one."""
        if self.calm or self.shell is None:
            return
        if self.plan.torn_journal:
            self.shell.kill_within(self.chance.randint(0, 12))
        else:
            self.died()

    def died(self) -> None:
        """The coordinator was killed: what it sent may still arrive, what it was sent is lost."""
        assert self.shell is not None
        self.shell.end()
        self.shell = None
        self.crashes += 1
        self.unknown_until_ns = self.now_ns + UNKNOWN_NS
        self._unrecorded = False
        for number in list(self.network.connections):
            self.network.abandon(number)
        if self.plan.damage_chance and self.chance.random() < self.plan.damage_chance:
            self._damage_journal()
        self.after(self.chance.randint(1, 200) * MILLISECOND_NS, self.start_coordinator)
        self.after(self.plan.crash_every_ns, self.crash)

    def _damage_journal(self) -> None:
        """By something else than its coordinator, at any byte.  The processes that it may have named are excused."""
        content, chance = bytearray(self._journal.read_bytes()), self.chance
        where = chance.randint(0, len(content))
        kind = chance.randint(0, 3)
        if kind == 0:
            del content[where:]
        elif kind == 1:
            content[where : where + 8] = chance.randbytes(8)
        elif kind == 2:
            content = bytearray(chance.randbytes(where))
        else:
            content += chance.randbytes(where)
        self._journal.write_bytes(content)
        self._unrecorded = True
        for process in self.processes.values():
            for side in process.sides.values():
                side.excused = side.excused or side.open

    def is_unrecorded(self, connection: int | None) -> bool:
        """Whether a grant that comes now is of a coordinator that has died, and perhaps not in its journal."""
        late = connection is None or not self.network.reaches(connection, self.shell)
        return late and self._unrecorded

    def give(self, *given: events.Event) -> None:
        """Let the core have events that no client sent."""
        if self.shell is not None:
            self.shell.give(*given)

    def watch(self, event: events.Event, out: Sequence[commands.Command]) -> None:
        """What the core does, command by command in their order."""
        self.handled += 1
        restless = self.calm and self.handled > self._handled_before_calm + CALM_EVENTS
        assert not restless, f"nothing new is wanted, and the world has not come to rest after {CALM_EVENTS} events"
        for command in out:
            if isinstance(command, commands.Send):
                self._check_send(command)
            elif isinstance(command, commands.Notify):
                if command.kind == "sharing":
                    self._sharing[command.values["uuid"]] = messages.Sharing[str(command.values["sharing"]).upper()]
                self.gathered += command.kind == "gang_gathered"
                self.host_refused += command.kind == "refused" and "owner" in command.values
                self.refused_in_calm += command.kind == "refused" and self.calm
                self.lacking += command.kind == "lacks_room"
                self.shut_out += command.kind == "shut_out"
        self.bounds.watch(event, out)

    def waits_for(self, uuid: str, process_id: int | None) -> None:
        """A new coordinator hears of the end of the process that held the lease."""
        self._expected[uuid] = process_id

    def started_at(self, process_id: int) -> int | None:
        """When a process started; None when it does not live."""
        return next((each.number for each in self._programs() if each.pid == process_id), None)

    def end_process(self, process_id: int) -> None:
        """SIGKILL by the coordinator."""
        for each in self._programs():
            if each.pid == process_id:
                self.after(MILLISECOND_NS, each.kill)

    def _programs(self) -> list[Process | HostileClient]:
        """Those that live."""
        return [*self.processes.values(), *(hostile for hostile in self.hostiles if hostile.alive)]

    # --- processes ----------------------------------------------------------------------------------------------

    def _new_pid(self) -> int:
        self._processes_made += 1
        if not self.plan.pids:
            return FIRST_PID + self._processes_made
        used = {*self.processes, *(hostile.pid for hostile in self.hostiles)}
        possible = (FIRST_PID + (self._processes_made + n) % self.plan.pids for n in range(self.plan.pids))
        return next(pid for pid in possible if pid not in used)

    def new_process(self) -> None:
        """On some of the GPUs, working at once."""
        pid = self._new_pid()
        count = self.chance.randint(1, len(self.uuids))
        kind = self.chance.random() if self.plan.device_share or self.plan.swap_share else 1.0
        mode = messages.MemoryMode.MANAGED
        if kind < self.plan.device_share:
            mode = messages.MemoryMode.DEVICE
        elif kind < self.plan.device_share + self.plan.swap_share:
            mode = messages.MemoryMode.SWAP
        uuids, priority = self.chance.sample(self.uuids, count), self.chance.randint(-1, 2)
        gang = ""
        if self.plan.gangs and self.chance.random() < 0.7:
            gang = f"g{self.chance.randrange(self.plan.gangs)}"
        slot = self.slots.choose()
        if slot is not None:
            uuids = [uuid for uuid in uuids if uuid in slot.gpus] or list(slot.gpus)
        process = Process(self, pid, uuids, mode, priority, gang)
        process.number, process.slot = self._processes_made, "" if slot is None else slot.slot
        if self.plan.hidden_share:
            process.hidden = self.chance.random() < self.plan.hidden_share
        if self.plan.pin_chance:
            process.old = self.chance.random() < self.plan.old_share
        self.processes[process.pid] = process
        process.connect()
        for side in process.sides.values():
            self.after(self.chance.randint(0, 50) * MILLISECOND_NS, lambda s=side: process.live(s))  # type: ignore[misc]

    def kill(self, process: Process) -> None:
        """SIGKILL: the connection ends soon after; another process takes its place."""
        if not process.alive:
            return
        process.alive = False
        del self.processes[process.pid]
        number, process.connection = process.connection, None
        for side in process.sides.values():
            side.open = side.closing = side.wanted = False
            side.move = None
            side.resident = side.allocated = side.pinned = 0
        if number is not None:
            self.after(MILLISECOND_NS, lambda: self.network.break_off(number))
        for uuid in [uuid for uuid, pid in self._expected.items() if pid == process.pid]:
            self.after(MILLISECOND_NS, lambda u=uuid: self._holder_gone(u, process.pid))  # type: ignore[misc]
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
            self.network.break_off(number)
        else:  # it is noticed late, perhaps after the process has connected again
            self.after(self.chance.randint(1, 900) * MILLISECOND_NS, lambda: self.network.break_off(number))
        process.lost()

    def _holder_gone(self, uuid: str, process_id: int) -> None:
        if self._expected.get(uuid) == process_id:
            self.give(events.HolderGone(uuid))

    # --- the operator -------------------------------------------------------------------------------------------

    def meddle(self) -> None:
        """Any administrative event."""
        if self.calm:
            return
        chance = self.chance
        client = chance.choice(list(self.network.connections) or [0])
        uuid = chance.choice([None, *self.uuids])
        choices: list[events.Event] = [
            events.QuantumSet(chance.choice([None, 20 * MILLISECOND_NS, 200 * MILLISECOND_NS]), uuid),
            events.PolicySet(chance.choice(["round_robin", "priority", "fair_share"]), {}, uuid),
            events.SharingSet(chance.choice(list(messages.Sharing)), uuid),
            events.PrioritySet(client, chance.randint(-2, 3)),
            events.WeightSet(client, chance.choice([1, 2, 5])),
            events.LimitSet(client, chance.choice([0, 100])),
            events.HostBudgetSet(chance.choice([500, 5000])),
            events.SwitchShareSet(chance.choice([0.02, 0.05]), uuid),
            events.Paused(client),
            events.Resumed(client),
        ]
        if self.plan.gangs:
            choices.append(events.GangSet(client, chance.choice(["", "g0"])))
        if self.plan.pin_chance:  # memory that is allocated without a lease has no host share
            choices = [c for c in choices if not isinstance(c, events.HostBudgetSet)]
        self.give(chance.choice(choices))
        self.slots.meddle()
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
        process, message = self.network.connections.get(command.client), command.message
        if not isinstance(process, Process):
            return
        if isinstance(message, messages.Restore | messages.MoveCredit):
            self.restores += isinstance(message, messages.Restore)
            self.credits += isinstance(message, messages.MoveCredit)
            return
        if not isinstance(message, messages.Grant | messages.Revoke):
            return
        side = process.sides[message.gpu]
        uuid = side.uuid
        if isinstance(message, messages.Revoke):
            lease = message.lease_id
            self.after(message.drain_deadline_ns, lambda: process.excuse(side, lease))
            return
        self.grants += 1
        if self._sharing[uuid] is messages.Sharing.CONCURRENT:
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
            (client.client, seat.uuid)
            for client in snapshot.clients
            for seat in client.seats
            if seat.memory.shut_out and seat.memory.lacking_bytes and seat.waiting_since_ns is not None
        }
        for gpu in snapshot.gpus:
            waiting = gpu.leases.waiting - sum(uuid == gpu.uuid for _, uuid in named)
            assert waiting == 0, f"{waiting} wait for {gpu.uuid} for ever: {gpu}"
        for process in self.processes.values():
            for side in process.sides.values():
                waits = process.alive and side.wanted and not side.open and (process.connection, side.uuid) not in named
                assert not waits, f"process {process.pid} was lost: {side}"
