"""A seeded world: simulated processes, network, operator and crashes around the real coordinator without its sockets.

The processes (process.py) work, hang, die and send encoded messages through the real decoder and dispatcher
(coordinator.py).  Hostile clients send anything.  Containers have slots with one or two GPUs, whose annotations and
allocations change.  Checks compare the models with the engine's commands after each event (checks.py); `bring_in`
checks invariant 4.

Invariants: all randomness comes from one seed.  Time is that of the event queue.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvshare.bench.virtual_node.checks import Bounds, Checks
from nvshare.bench.virtual_node.clock import Clock
from nvshare.bench.virtual_node.coordinator import Network, Shell
from nvshare.bench.virtual_node.hostile import HostileClient
from nvshare.bench.virtual_node.process import Process, Side, draw_profile
from nvshare.coordinator.engine.scheduler import PolicyFactory, Scheduler
from nvshare.coordinator.kubernetes.slots.slot import Slot
from nvshare.coordinator.model import commands, events
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS, Settings, Sharing
from nvshare.coordinator.protocol import messages
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import BUILT_IN

if TYPE_CHECKING:
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook


SLOTS = 3
FIRST_PID = 12_000_100
"""Above every process id of Linux, so that no id means a real process.  A multiple of 12, plus 100."""
UNKNOWN_NS = 2 * SECOND_NS
"""After this time a process has certainly reconnected and reported its memory."""


def core_settings(**values: Any) -> Settings:
    """Settings; by default turns of 100 ms, and invariants are checked."""
    usual = {"check_invariants": True, "policy": "round_robin", "sharing": Sharing.EXCLUSIVE}
    return Settings(**{"quantum_ns": 100 * MILLISECOND_NS, "recovery_ns": 2 * SECOND_NS, **usual, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a world.  Chances are per occasion."""

    gpus: int = 2
    processes: int = 6
    duration_ns: int = 20 * SECOND_NS
    capacity_bytes: int = 1000
    memory_bytes: int = 0
    """Largest allocation of a process on a GPU; 0: no memory is simulated."""
    device_share: float = 0.0
    swap_share: float = 0.0
    hang_chance: float = 0.0
    death_chance: float = 0.0
    exit_ns: int = 0
    """Longest time for which a dead process's memory stays on the GPU after its connection has ended."""
    drop_chance: float = 0.0
    crash_every_ns: int = 0
    admin_every_ns: int = 0
    short_move_chance: float = 0.0
    pin_chance: float = 0.0
    """Chance of changing a process's pins at each work, and of allocating without a lease."""
    old_share: float = 0.0
    """Share of processes whose hook does not ask for pins."""
    gangs: int = 0
    """Number of gangs; most processes belong to one.  0: none."""
    users: int = 1
    """Number of users, which have the processes in turn."""
    stop_chance: float = 0.0
    """Chance of a stop of some seconds in a move, as by SIGSTOP."""
    gangs_are_told: bool = True
    """False: the engine does not learn of the gangs, for comparison."""
    hostiles: int = 0
    """Number of hostile clients."""
    torn_journal: bool = False
    """The coordinator dies within a turn, and its journal's last write is incomplete."""
    damage_chance: float = 0.0
    """Chance of damage to the journal while there is no coordinator."""
    slot_share: float = 0.0
    """Share of processes in slots."""
    hidden_share: float = 0.0
    """Share of processes in another PID namespace, whose ids the kernel does not report."""
    profile_share: float = 0.0
    """Share of processes that say what they are: class, shares, deadline, whether they run under MPS."""
    pids: int = 0
    """Number of process ids, which are reused; 0: ids are unique."""


class Slots:
    """The slots of the node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._present: dict[str, Slot] = {}
        self._allocations = 0
        if world.plan.slot_share:
            for number in range(SLOTS):
                self._allocate(f"s{number}", world.uuids[number % len(world.uuids) :][:2])

    def present(self) -> Collection[Slot]:
        """All slots, for a new coordinator."""
        return self._present.values()

    def choose(self) -> Slot | None:
        """The slot of a new process; None for a process outside of containers."""
        chance, share = self._world.chance, self._world.plan.slot_share
        if not share or chance.random() >= share or not self._present:
            return None
        return chance.choice(list(self._present.values()))

    def meddle(self) -> None:
        """Changes an annotation, or ends a container and allocates its slot anew."""
        chance = self._world.chance
        if not self._present or chance.random() < 0.7:
            return
        slot = chance.choice(list(self._present.values()))
        if chance.random() < 0.7:
            self._put(slot.model_copy(update={"policy": self._policy()}))
            return
        del self._present[slot.slot]
        for process in list(self._world.processes.values()):
            if process.slot == slot.slot:
                process.ending = True
                self._world.after(chance.randint(0, 20) * MILLISECOND_NS, process.kill)
        self._tell(lambda book: book.remove(slot.slot))
        delay_ns = chance.randint(1, 500) * MILLISECOND_NS
        self._world.after(delay_ns, lambda: self._allocate(slot.slot, list(slot.gpus)))

    def _policy(self) -> dict[str, str]:
        chance = self._world.chance
        gang = chance.choice([None, None, "train"])
        limit = chance.choice([None, None, self._world.plan.capacity_bytes // 2])
        found = {"priority": chance.choice([None, 0, 3]), "weight": chance.choice([None, 4]), "gang": gang}
        return {word: str(value) for word, value in (found | {"memory_limit": limit}).items() if value is not None}

    def _allocate(self, name: str, gpus: list[str]) -> None:
        self._allocations += 1
        devices = tuple(f"{gpu}::0" for gpu in gpus)
        allocation = str(self._allocations)
        slot = Slot(slot=name, allocation=allocation, allocated_at_s=0, gpus=tuple(gpus), device_ids=devices)
        self._put(slot.model_copy(update={"policy": self._policy()}))

    def _put(self, slot: Slot) -> None:
        self._present[slot.slot] = slot
        self._tell(lambda book: book.put(slot))

    def _tell(self, action: Callable[[SlotBook], list[int] | None]) -> None:
        shell = self._world.shell
        if shell is not None and shell.dispatcher.slots is not None:
            shell.settle(action(shell.dispatcher.slots) or ())


class World(Clock):
    """All parts of one world, and its event queue."""

    def __init__(self, seed: int, plan: Plan, policies: PolicyFactory, settings: Settings) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.plan = plan
        self.settings = settings
        self.policies = policies
        self.calm = False
        self.shell: Shell | None = None
        self.network = Network(self)
        self.processes: dict[int, Process] = {}
        """Living processes by process id."""
        self.exiting: dict[int, Process] = {}
        """Dead processes whose memory is still on the GPU, by process id."""
        self.hostiles: list[HostileClient] = []
        self.handled = 0
        self.crashes = 0
        self.unknown_until_ns = 0
        """Until this time a process may have memory that the engine does not know of."""
        self._processes_made = 0
        self._unrecorded = False
        """The journal of the last dead coordinator was damaged."""
        self._journal = Path()
        self.uuids = [f"GPU-{number}" for number in range(plan.gpus)]
        self.slots = Slots(self)
        self.checks = Checks(self)
        self.bounds = Bounds(self)

    @property
    def scheduler(self) -> Scheduler | None:
        """The present coordinator's scheduler; None without a coordinator."""
        return None if self.shell is None else self.shell.scheduler

    # --- time ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the whole plan, then a calm without new work in which all requests must be served."""
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
        self.run_until(end_ns)
        self.calm = True
        self.checks.calm_begins()
        for hostile in self.hostiles:
            hostile.end()
        self.start_coordinator()
        for number, endpoint in list(self.network.connections.items()):
            if isinstance(endpoint, Process) and endpoint.alive:
                self.give(events.Set("paused", False, client=number))
        self.run_until(end_ns + 600 * SECOND_NS)
        self.checks.check_end()
        for process in list(self.processes.values()):
            self.kill(process)
        self.run_until(self.now_ns + 600 * SECOND_NS)
        self.bounds.check_empty()

    def pass_time(self, elapsed_ns: int) -> None:
        """Accounts for the time since the last change."""
        if self.plan.gangs:
            self.checks.pass_time(elapsed_ns)
        self.bounds.pass_time(elapsed_ns)

    # --- the coordinator ----------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Starts a new coordinator from the journal, if there is none."""
        if self.shell is not None:
            return
        self.shell = Shell(self, self._journal)
        self.shell.begin()

    def crash(self) -> None:
        """Kills the coordinator, between two turns or within one."""
        if self.calm or self.shell is None:
            return
        if self.plan.torn_journal:
            self.shell.kill_within(self.chance.randint(0, 12))
        else:
            self.died()

    def died(self) -> None:
        """The coordinator was killed: its messages may still arrive, messages to it are lost."""
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
        """Damages the file at any byte.  Excuses the processes that it may have named."""
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
        """Whether a grant that arrives now comes from a dead coordinator with a damaged journal."""
        late = connection is None or not self.network.reaches(connection, self.shell)
        return late and self._unrecorded

    def give(self, *given: events.Event) -> None:
        """Passes events to the engine that no client sent."""
        if self.shell is not None:
            self.shell.give(*given)

    def watch(self, event: events.Event, out: Sequence[commands.Command]) -> None:
        """Checks an event and its commands."""
        self.handled += 1
        self.checks.watch(out)
        self.bounds.watch(event, out)

    def started_at(self, process_id: int) -> int | None:
        """Start of a process; None for a dead one."""
        return next((each.number for each in self._programs() if each.pid == process_id), None)

    def end_process(self, process_id: int) -> None:
        """SIGKILL by the coordinator."""
        for each in self._programs():
            if each.pid == process_id:
                self.after(MILLISECOND_NS, each.kill)

    def _programs(self) -> list[Process | HostileClient]:
        """Living processes, hostile ones included."""
        return [*self.processes.values(), *(hostile for hostile in self.hostiles if hostile.alive)]

    # --- processes ----------------------------------------------------------------------------------------------

    def _new_pid(self) -> int:
        self._processes_made += 1
        if not self.plan.pids:
            return FIRST_PID + self._processes_made
        used = {*self.processes, *self.exiting, *(hostile.pid for hostile in self.hostiles)}
        possible = (FIRST_PID + (self._processes_made + n) % self.plan.pids for n in range(self.plan.pids))
        return next((pid for pid in possible if pid not in used), FIRST_PID + self.plan.pids + self._processes_made)

    def new_process(self) -> None:
        """Starts a process on some of the GPUs."""
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
        if self.plan.profile_share and self.chance.random() < self.plan.profile_share:
            process.profile, process.spatial = draw_profile(self.chance), self.chance.random() < 0.3
        self.processes[process.pid] = process
        process.connect()
        for side in process.sides.values():
            self.after(self.chance.randint(0, 50) * MILLISECOND_NS, lambda s=side: process.live(s))  # type: ignore[misc]

    def kill(self, process: Process) -> None:
        """Kills a process.  Its connection ends soon after, then its memory is free.  A new process replaces it."""
        if not process.alive:
            return
        process.alive = False
        del self.processes[process.pid]
        number, process.connection = process.connection, None
        for side in process.sides.values():
            side.open = side.closing = side.wanted = False
        if number is not None:
            self.after(MILLISECOND_NS, lambda: self.network.break_off(number))
        self.exiting[process.pid] = process
        known = self.plan.exit_ns and not process.hidden  # the end of the others cannot be watched
        exit_ns = self.chance.randint(0, self.plan.exit_ns) if known else 0
        self.after(MILLISECOND_NS + exit_ns, lambda: self._process_ended(process))
        if not self.calm:
            self.new_process()

    def _process_ended(self, process: Process) -> None:
        del self.exiting[process.pid]
        for side in process.sides.values():
            side.memory.clear()
        self.give(events.ProcessEnded(process.pid))

    def watch_end(self, process_id: int) -> bool:
        """Whether the process has not ended."""
        return process_id in self.exiting or any(each.pid == process_id for each in self._programs())

    def drop(self, process: Process) -> None:
        """Breaks a process's connection; its work continues."""
        number = process.connection
        assert number is not None
        self.unknown_until_ns = self.now_ns + UNKNOWN_NS
        for side in process.sides.values():
            side.excused = side.excused or side.open
        if self.chance.random() < 0.5:
            self.network.break_off(number)
        else:  # the coordinator notices late, perhaps after the reconnect
            self.after(self.chance.randint(1, 900) * MILLISECOND_NS, lambda: self.network.break_off(number))
        process.lost()

    # --- the operator -------------------------------------------------------------------------------------------

    def meddle(self) -> None:
        """Gives an administrative event."""
        if self.calm:
            return
        chance = self.chance
        client = chance.choice(list(self.network.connections) or [0])
        uuid = chance.choice([None, *self.uuids])
        choices = [
            events.Set("quantum", chance.choice([None, 20 * MILLISECOND_NS, 200 * MILLISECOND_NS]), uuid),
            events.Set("policy", chance.choice(sorted(BUILT_IN)), uuid),
            events.Set("sharing", chance.choice(list(Sharing)).name.lower(), uuid),
            events.Set("priority", chance.randint(-2, 3), client=client),
            events.Set("weight", chance.choice([1, 2, 5]), client=client),
            events.Set("class", chance.choice(list(JobClass)).name.lower(), client=client),
            events.Set("share_request", chance.choice([0.0, 0.4]), client=client),
            events.Set("share_limit", chance.choice([0.3, 1.0]), client=client),
            events.Set("limit", chance.choice([0, 100]), client=client),
            events.Set("host_budget", chance.choice([500, 5000])),
            events.Set("switch_share", chance.choice([0.02, 0.05]), uuid),
            events.Set("paused", True, client=client),
            events.Set("paused", False, client=client),
        ]
        if self.plan.gangs:
            choices.append(events.Set("gang", chance.choice(["", "g0"]), client=client))
        if self.plan.pin_chance:  # memory that is allocated without a lease has no host share
            choices = [c for c in choices if c.setting != "host_budget"]
        self.give(chance.choice(choices))
        self.slots.meddle()
        self.after(self.plan.admin_every_ns, self.meddle)

    # --- memory of the GPUs -----------------------------------------------------------------------------------------

    def resident(self, uuid: str) -> int:
        """Bytes on a GPU."""
        processes = (*self.processes.values(), *self.exiting.values())
        return sum(s.memory.resident for p in processes for s in p.sides.values() if s.uuid == uuid)

    def figures(self, uuid: str) -> tuple[dict[str, int], int]:
        """The driver's figures: memory by process, and what it lists no process with."""
        listed: dict[str, int] = {}
        for process in (*self.processes.values(), *self.exiting.values()):
            if process.mode is not messages.MemoryMode.MANAGED and not process.hidden:
                listed[str(process.pid)] = sum(s.memory.resident for s in process.sides.values() if s.uuid == uuid)
        return listed, self.resident(uuid) - sum(listed.values())

    def bring_in(self, side: Side, size: int) -> int:
        """Brings memory onto a GPU and returns the size that fits.

        Invariant 4: all of it fits, unless the engine cannot know the present memory, because a process has lost its
        connection, has had more since before a restart than its limit is now, or a pager has filled the GPU."""
        room = self.plan.capacity_bytes - self.resident(side.uuid)
        known = self.now_ns >= self.unknown_until_ns and self.plan.swap_share + self.plan.device_share >= 1.0
        sides = [s for p in self.processes.values() for s in p.sides.values() if s.uuid == side.uuid]
        known = known and not any(each.over_its_limit for each in sides)
        assert size <= room or not known, f"invariant 4: {size} brought to {side.uuid}, room for {room}"
        side.memory.resident += (size := max(0, min(size, room)))
        return size
