"""A GPU: one scheduling domain."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.gang import GpuGangs
from nvshare.coordinator.model.memory import GpuMemory, Switch
from nvshare.coordinator.model.seat import HOLDING, Seat
from nvshare.coordinator.model.statistics import LeaseStatistics
from nvshare.coordinator.model.switch_cost import SwitchCost
from nvshare.coordinator.model.wait_queue import WaitQueue
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.scheduler_policies.api import GpuView

if TYPE_CHECKING:
    from nvshare.coordinator.engine.policy_guard import PolicyGuard

RECENT: Final = 256
"""Samples of hand-over and drain times that a GPU remembers."""


@dataclass(slots=True, eq=False)
class GpuRules:
    """What is in force on one GPU.  Changed by engine/operator_commands.py, engine/sharing.py, engine/leases.py."""

    sharing: Sharing
    sharing_wanted: Sharing
    """By the operator; `sharing` is in force, see engine/sharing.py."""
    quantum_setting_ns: int | None
    """None: automatic."""
    quantum_ns: int = 0
    """In force: the setting, or the automatic quantum."""
    switch_share: float = 0.05
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
    """What the journal says: the last lease id, and the process."""


@dataclass(slots=True, eq=False)
class GpuLeases:
    """Leases of one GPU.  Changed by engine/leases.py; engine/sharing.py and engine/recovery.py adjust the holder."""

    next_lease_id: int
    next_turn: int = 1
    by_client: dict[int, Seat] = field(default_factory=dict)
    """Seats with a lease, overdue and stray ones included."""
    holder: Seat | None = None
    """Exclusive sharing: the one seat that HOLDS or is being revoked; never an overdue or stray one."""
    active_seats: int = 0
    """Seats that have asked for the GPU."""
    last_holder: int = 0
    policy_epoch: int = 0
    """`PolicyGuard.replaced` when the present turn and its length were chosen."""
    policy_wakes_at_ns: int | None = None
    """The policy left the GPU idle until this time."""
    free_since_ns: int | None = None
    """When the last lease ended, its drain included; None once the next lease has begun."""
    turns_closed_ns: int = 0
    """Time of exclusive holders in finished turns; see `Gpu.turn_clock_ns`."""


@dataclass(slots=True, eq=False)
class Switching:
    """The present switch and what switches cost.

    Changed by memory/switching.py, memory/orders.py and engine/leases.py.
    """

    switch: Switch | None = None
    """Memory moves before the next grant."""
    cost: SwitchCost = field(default_factory=SwitchCost)
    """What switches wait for memory."""
    drain_average_ns: float = 0.0
    handover_average_ns: float = 0.0
    measured: int = 0
    """Switches whose drain was measured."""
    hidden_average_ns: float = 0.0
    """What moves during a turn of another client."""
    turn_hidden_out_ns: int = 0
    turn_hidden_in_ns: int = 0
    """The same, of the present turn."""
    move_rate: float = 0.0
    """Measured bytes a nanosecond; 0: not yet."""
    exposed_closed_ns: int = 0
    """Time that finished switches waited for memory; see `Gpu.exposed_clock_ns`."""
    recent_handovers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_drains_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))


@dataclass(slots=True, eq=False)
class Gpu:
    """One scheduling domain.  Its records name the modules that change them."""

    uuid: str
    name: str
    policy_guard: PolicyGuard
    rules: GpuRules
    recovery: Recovery
    leases: GpuLeases
    memory: GpuMemory
    seats: dict[int, Seat] = field(default_factory=dict)
    """By client."""
    wait_queue: WaitQueue = field(default_factory=WaitQueue)
    switching: Switching = field(default_factory=Switching)
    gangs: GpuGangs = field(default_factory=GpuGangs)
    statistics: LeaseStatistics = field(default_factory=LeaseStatistics)

    @property
    def recovering(self) -> bool:
        """A client may still work under a lease of an earlier coordinator."""
        return self.recovery.expected_holder is not None

    def reconnecting(self, now_ns: int) -> bool:
        """After a restart: clients may be missing whose memory is on the GPU, so nothing is brought in."""
        return self.recovery.survivors and now_ns < self.recovery.reconnected_at_ns

    def settings_changed(self) -> None:
        """All clients of this GPU are sent their settings again, at the latest with their next grant."""
        self.rules.settings_epoch += 1

    def turn_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while an exclusive holder has its turn: not during drains, moves or idle time."""
        closed_ns, holder = self.leases.turns_closed_ns, self.leases.holder
        if holder is None or holder.phase is not HOLDING or holder.lease.granted_at_ns is None:
            return closed_ns
        return closed_ns + now_ns - holder.lease.granted_at_ns

    def exposed_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while a grant waits for memory."""
        switching = self.switching
        return switching.exposed_closed_ns + (now_ns - switching.switch.started_ns if switching.switch else 0)

    def view(self) -> GpuView:
        """What a policy sees."""
        rules, contended = self.rules, len(self.wait_queue) > 0
        view = rules.view
        if view is None or view.contended is not contended:
            view = rules.view = GpuView(self.uuid, self.memory.capacity_bytes, rules.quantum_ns, contended)
        return view
