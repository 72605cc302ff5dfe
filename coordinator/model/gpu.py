"""A GPU: one scheduling domain."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.gang import Gang
from nvshare.coordinator.model.memory import GpuMemory, Switch
from nvshare.coordinator.model.seat import REVOKING, Seat, WaitQueue
from nvshare.coordinator.model.settings import Settings, Sharing
from nvshare.coordinator.model.statistics import LeaseStatistics
from nvshare.scheduler_policies.api import Allotment, GpuView

if TYPE_CHECKING:
    from nvshare.coordinator.engine.policy_guard import PolicyGuard

RECENT: Final = 256
"""Samples of hand-over and drain times that a GPU remembers."""
WAITS: Final = 16
"""Switches whose waits for memory are averaged."""


@dataclass(slots=True, eq=False)
class GpuRules:
    """What follows from the settings.  Changed by engine/operator_commands.py and engine/leases.py."""

    quantum_ns: int = 0
    """In force: the setting, or the automatic quantum."""
    settings_epoch: int = 0
    """Grows when the settings that clients are sent may have changed."""
    rank_epoch: int = 0
    """Grows when the operator changes a priority or a weight."""
    view: GpuView | None = None
    """Cached; None when the quantum has changed."""


@dataclass(slots=True, eq=False)
class Recovery:
    """Leases of an earlier coordinator.  Changed by engine/recovery.py, engine/leases.py and the scheduler."""

    expected_holder: int | None = None
    """The process whose claim is waited for, or `commands.MANY_HOLDERS`."""
    deadline_ns: int = 0
    holder_stopped: bool = False
    """The expected holder is stopped (SIGSTOP, a debugger): recovery lasts until it continues or ends."""
    reconnected_at_ns: int = 0
    """By this time clients of an earlier coordinator have connected again."""
    survivors: bool = False
    """There are clients of an earlier coordinator."""
    recorded: tuple[int, int] = (0, 0)
    """The journal's record: the last lease id, and the process."""
    lost: tuple[int, int] = (0, 0)
    """The last lease that ended with its connection, and its process, which may claim it by a new one."""


@dataclass(slots=True, eq=False)
class GpuLeases:
    """Leases of one GPU.  Changed by engine/leases.py."""

    next_lease_id: int
    next_turn: int = 1
    by_client: dict[int, Seat] = field(default_factory=dict)
    """Seats with a lease, overdue and stray ones included."""
    running: dict[int, Seat] = field(default_factory=dict)
    """By client: the seats that HOLD a lease."""
    changed_at_ns: int = 0
    """When the running set changed last, drains included."""
    active_seats: int = 0
    """Seats that have asked for the GPU."""
    last_holder: int = 0
    free_since_ns: int | None = None
    """When the last lease ended, its drain included; None once the next lease has begun."""
    ran_ns: int = 0
    ran_since_ns: int | None = None
    """Time with a running set, and since when there is one; see `Gpu.turn_clock_ns`."""
    quiet_ns: int = 0
    quiet_since_ns: int | None = None
    """Time in which no client waited, and since when; see `Gpu.quiet_clock_ns`."""
    debts: dict[str, int] = field(default_factory=dict)
    """By owner: until when its waiting clients are held back, because a drain of theirs took others' time."""
    statistics: LeaseStatistics = field(default_factory=LeaseStatistics)


@dataclass(slots=True, eq=False)
class Schedule:
    """The plan of one GPU.  Changed by engine/planning.py, `rests_since_ns` by engine/gangs/slots.py."""

    members: dict[int, Allotment] = field(default_factory=dict)
    """The running set by client, most important first."""
    order: tuple[int, ...] = ()
    """The next clients, as far as the policy names them."""
    ask_again_ns: int | None = None
    why: str = ""
    stale: bool = True
    """Something has changed that the policy must be asked about."""
    reports: bool = True
    """A report of progress may change the plan."""
    crowded: bool = False
    """A member was left out because its memory does not fit beside the others'."""
    side_by_side: bool = False
    """In concurrent sharing: all clients that want the GPU are members, none in turns."""
    planned_ns: int = 0
    """When the plan was made last, all clients considered."""
    held_back: bool = False
    """The policy wants a switch that would cost too much now."""
    rests_since_ns: int | None = None
    """A gang's slot ended here while others wanted the GPU: for a quantum no other slot begins."""


@dataclass(slots=True)
class SwitchCredit:
    """The time that switches may still wait for memory.  Changed by engine/memory/switch_credit.py."""

    credit_ns: float = 2e9
    at_ns: int = 0
    """When the credit was computed, by the turn clock."""
    logged_at_ns: int | None = None


@dataclass(slots=True)
class HiddenMoves:
    """Time of moves during turns of other clients.  Changed by engine/memory/moves.py."""

    average_ns: float = 0.0
    turn_out_ns: int = 0
    turn_in_ns: int = 0
    """During the present turn."""


@dataclass(slots=True, eq=False)
class Switching:
    """The present switch and what switches cost.

    Changed by engine/memory/residency.py, engine/memory/moves.py and engine/leases.py.
    """

    switch: Switch | None = None
    """Memory moves before the next grant."""
    waits_ns: deque[int] = field(default_factory=lambda: deque(maxlen=WAITS))
    """Times that the last switches waited for memory; empty while none has to."""
    credit: SwitchCredit = field(default_factory=SwitchCredit)
    drain_average_ns: float = 0.0
    handover_average_ns: float = 0.0
    measured: int = 0
    """Switches whose drain was measured."""
    hidden: HiddenMoves = field(default_factory=HiddenMoves)
    move_rate: float = 0.0
    """Measured bytes a nanosecond; 0: not yet."""
    exposed_closed_ns: int = 0
    """Time that finished switches waited for memory; see `Gpu.exposed_clock_ns`."""
    recent_handovers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_drains_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def average_cost_ns(self) -> float:
        """Average cost of a switch as measured so far."""
        return self.drain_average_ns + self.idle_average_ns

    @property
    def idle_average_ns(self) -> float:
        """The part of it in which the GPU idles: during the drain it works."""
        return self.handover_average_ns + self.wait_average_ns

    @property
    def wait_average_ns(self) -> float:
        """Average wait of a switch for memory, each with equal weight: all together should cost their share."""
        return sum(self.waits_ns) / len(self.waits_ns) if self.waits_ns else 0.0


@dataclass(slots=True, eq=False)
class Gpu:
    """One scheduling domain.  Its records name the modules that change them."""

    uuid: str
    name: str
    settings: Settings
    """The node's, with this GPU's own values.  Changed by engine/operator_commands.py."""
    policy_guard: PolicyGuard
    rules: GpuRules
    recovery: Recovery
    leases: GpuLeases
    memory: GpuMemory
    seats: dict[int, Seat] = field(default_factory=dict)
    """By client."""
    wait_queue: WaitQueue = field(default_factory=WaitQueue)
    schedule: Schedule = field(default_factory=Schedule)
    switching: Switching = field(default_factory=Switching)
    gang: Gang | None = None
    """The gang that has a slot here, whatever the policy plans."""

    @property
    def recovering(self) -> bool:
        """A client may still work under a lease of an earlier coordinator."""
        return self.recovery.expected_holder is not None

    @property
    def is_waited_for(self) -> bool:
        """A client waits that may be granted, or memory moves for one."""
        return len(self.wait_queue) > 0 or self.switching.switch is not None

    def reconnecting(self, now_ns: int) -> bool:
        """After a restart: clients may be missing whose memory is on the GPU, so nothing is brought in."""
        return self.recovery.survivors and now_ns < self.recovery.reconnected_at_ns

    def settings_changed(self) -> None:
        """All clients of this GPU are sent their settings again, at the latest with their next grant."""
        self.rules.settings_epoch += 1

    def turn_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while a client holds a lease: not during drains, moves or idle time."""
        since_ns = self.leases.ran_since_ns
        return self.leases.ran_ns + (0 if since_ns is None else now_ns - since_ns)

    def quiet_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while no client waits."""
        since_ns = self.leases.quiet_since_ns
        return self.leases.quiet_ns + (0 if since_ns is None else now_ns - since_ns)

    def exposed_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while a grant waits for memory."""
        switching = self.switching
        return switching.exposed_closed_ns + (now_ns - switching.switch.started_ns if switching.switch else 0)

    @property
    def memory_short(self) -> bool:
        """The clients' memory does not fit beside each other."""
        return self.memory.allocated_bytes > self.memory.capacity_bytes

    def view(self) -> GpuView:
        """The GPU as a policy sees it."""
        rules, short = self.rules, self.memory_short or self.schedule.crowded
        cost_ns, leases = int(self.switching.idle_average_ns), self.leases
        view = rules.view
        if view is None or view.memory_short is not short or view.switch_cost_ns != cost_ns:
            view = rules.view = GpuView(
                self.uuid,
                self.memory.capacity_bytes,
                rules.quantum_ns,
                self.settings.sharing is Sharing.EXCLUSIVE,
                cost_ns,
                short,
            )
        if len(leases.by_client) == len(leases.running):
            return view
        draining = tuple(seat.view() for seat in leases.by_client.values() if seat.phase is REVOKING)
        return replace(view, draining=draining) if draining else view
