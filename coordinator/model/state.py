"""Records of the core: clients, their seats on GPUs, the GPUs; and the transitions that a seat may make.

A *seat* is one client on one GPU.  Its phase:

    IDLE ──request──> WAITING ──chosen──> NEXT ──memory is there──> HOLDING ──revoke──> REVOKING ──deadline──> OVERDUE
      ^                  ^ └──────────────grant─────────────────────^  │                   │                     │
      └──────────────────┴──────────────────────release─────────────────┴───────────────────┴─────────────────────┘

Invariants: a seat changes phase through `Seat.enter` only, along `TRANSITIONS`; a seat is in `Gpu.leases` exactly in
the phases `WITH_LEASE`, and in `Gpu.line` exactly when it is WAITING, not shut out, and its client is not paused.

May not go here: decisions (engine/leases.py, memory/switching.py), messages, anything with a clock.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.model.room import Fit, Immovable
from nvshare.coordinator.model.switch_cost import SwitchCost
from nvshare.coordinator.model.wait_queue import Line
from nvshare.coordinator.protocol.messages import UNBOUNDED, GpuSettings, MemoryMode, Sharing
from nvshare.scheduler_policies.api import ClientView, GpuView

if TYPE_CHECKING:
    from nvshare.coordinator.engine.policy_guard import Umpire
    from nvshare.coordinator.gangs.coscheduling import Gang
    from nvshare.coordinator.memory.host_budget import HostOwner
    from nvshare.coordinator.memory.switching import Switch
    from nvshare.coordinator.model.commands import Command

MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
SETTLE_NS: Final = SECOND_NS
"""In this time clients of an earlier coordinator that can come back have done so."""
RECENT: Final = 256
"""Samples of hand-over and drain times that a GPU remembers."""


class OverdueAction(enum.Enum):
    """What happens to a client whose drain passed its deadline, besides that others are let on beside it."""

    NOTHING = "nothing"
    DEMOTE = "demote"
    """It runs only when nobody else waits, until it has given a lease back in time."""
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator decides for the core.  The shell validates; the core asserts."""

    policy: str = "round_robin"
    quantum_ns: int | None = 100 * MILLISECOND_NS
    """None: automatic."""
    sharing: Sharing = Sharing.EXCLUSIVE
    users_first: bool = True
    """Time is divided between users and slots, then between the programs of each; otherwise between programs."""
    drain_deadline_ns: int = 10 * SECOND_NS
    overdue_action: OverdueAction = OverdueAction.NOTHING
    pacing_budget_ns: int = 10 * MILLISECOND_NS
    """Submitted GPU time that a client may have unfinished when others use the same GPU."""
    idle_release_ns: int = 2 * MILLISECOND_NS
    switch_share: float = 0.05
    """Automatic quantum: the share of time that switching may cost; each GPU begins with this."""
    quantum_min_ns: int = 20 * MILLISECOND_NS
    quantum_max_ns: int = 60 * SECOND_NS
    """Bounds of the automatic quantum."""
    move_deadline_ns: int = 30 * SECOND_NS
    """After this the next client is granted though its memory is not all there."""
    move_stall_ns: int = 5 * SECOND_NS
    """An order of which nothing is heard for so long is not waited for any more."""
    host_budget_bytes: int = UNBOUNDED
    """Pinned host memory that all clients of the node may have together."""
    host_fair_times: int = 8
    """No owner may have more of it than so many times what he leaves to others; 0: there are no others."""
    max_clients: int = 1024
    check_invariants: bool = False
    """All invariants after each event, O(clients): for tests.  Otherwise a cheap subset."""
    story_length: int = 4096


class Phase(enum.Enum):
    """Where a seat stands."""

    IDLE = "idle"
    WAITING = "waiting"
    NEXT = "next"
    HOLDING = "holding"
    REVOKING = "revoking"
    OVERDUE = "overdue"


IDLE, WAITING, NEXT, HOLDING, REVOKING, OVERDUE = Phase
WITH_LEASE: Final = frozenset({HOLDING, REVOKING, OVERDUE})
TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    IDLE: frozenset({WAITING, HOLDING, REVOKING}),  # the latter two: a claim after reconnection
    WAITING: frozenset({NEXT, HOLDING}),
    NEXT: frozenset({WAITING, HOLDING}),
    HOLDING: frozenset({IDLE, REVOKING}),
    REVOKING: frozenset({IDLE, OVERDUE}),
    OVERDUE: frozenset({IDLE}),
}


@dataclass(slots=True, eq=False)
class Client:
    """One connection.  `seats` by the client's own ordinal.  `group` as in `events.ClientRegistered`."""

    client: int
    name: str
    program: str
    process_id: int
    user_id: int
    priority: int
    memory_mode: MemoryMode
    memory_limit_bytes: int
    registered_at_ns: int
    paused: bool = False
    host_asked: bool = False
    """It takes part in the host budget: it has asked for a share of it."""
    host_share_bytes: int = 0
    host_claim_bytes: int = 0
    """The amount of its first question, or of a smaller one since: see memory/host_budget.py."""
    seats: dict[int, Seat] = field(default_factory=dict)
    group: str = ""
    weight: int = 1
    gang: str = ""
    time_owner: str = ""
    """As `ClientView.owner`."""

    @property
    def owner(self) -> str:
        """The user or slot whose programs count together with it."""
        return f"slot {self.group}" if self.group else f"user {self.user_id}"


@dataclass(slots=True, eq=False)
class Order:
    """A memory order that a client has."""

    order_id: int
    client: int
    evict: bool
    bytes: int
    credit_bytes: int
    """Of a restoration: so much may have come in without asking again.  It only grows."""
    resident_before: int
    started_ns: int
    heard_ns: int
    """When it was given, or its client last said how far it is, or it got credit again."""
    exposed_before_ns: int
    """What the GPU's clock of exposed moves showed when the order was given."""
    straight: bool = True
    """It never had to wait for credit, so its time says how fast memory moves."""
    moved_bytes: int = 0
    stalled: bool = False

    @property
    def moving(self) -> bool:
        """It goes on by itself; otherwise it waits for credit, or its client hangs."""
        if self.stalled:
            return False
        return self.evict or self.credit_bytes >= self.bytes or self.moved_bytes < self.credit_bytes


@dataclass(slots=True, eq=False)
class Growth:
    """A client's question for room that is not answered yet; see memory/growth.py."""

    sequence: int
    total_bytes: int
    deadline_ns: int


@dataclass(slots=True, eq=False)
class Seat:
    """One client on one GPU."""

    client: Client
    gpu: Gpu
    ordinal: int
    attached_at_ns: int
    limit_bytes: int
    turn: int
    """Place in turn order, unique on its GPU: who attached or released longest ago has the least.  Constant while it
    waits."""
    phase: Phase = IDLE
    lease_id: int = 0
    waiting_since_ns: int | None = None
    granted_at_ns: int | None = None
    quantum_ends_ns: int = 0
    handed_over_from_ns: int | None = None
    """When the GPU became free for this lease, if it was taken over from another client without moving memory."""
    drain_deadline_ns: int | None = None
    stray: bool = False
    """It claimed a lease that is not its to claim: revoked, and never counted as the holder."""
    demoted: bool = False
    works: bool = False
    """It has asked for the GPU at least once.  A program that only looked at the card is nobody to pace others for."""
    told_waiters: bool = False
    alerted: bool = False
    """It and the next in line have been told that its turn ends; see engine/standby.py."""
    last_released_ns: int | None = None
    told_epoch: int = -1
    told_settings: GpuSettings | None = None
    order: Order | None = None
    """The open memory order; also one that nobody waits for any more."""
    stuck_out_at: int = -1
    stuck_in_at: int = -1
    """`Gpu.grants` when it could not move as it was told: it is not told again before the next grant."""
    stuck_in_bytes: int = 0
    """The credit that it left unused then; with more of it, it is told again."""
    revoked_at_ns: int = 0
    used_ns: int = 0
    leases: int = 0
    submissions: int = 0
    revokes: int = 0
    idle_releases: int = 0
    overdue: int = 0
    waited_ns: int = 0
    max_wait_ns: int = 0
    allocated_bytes: int = 0
    resident_bytes: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    reserved_bytes: int = 0
    prepare_bytes: int = 0
    """Host memory that it was told to have ready; see memory/client_settings.py."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    hidden_move_ns: int = 0
    exposed_move_ns: int = 0
    failed_orders: int = 0
    growth: Growth | None = None
    fit: Fit = field(default_factory=Fit)
    gang: Gang | None = None
    immune: bool = False
    """No gang may interrupt this turn."""
    sheltered: bool = False
    """Its policy gave it this turn earlier and may have forgotten why: it is not preempted."""
    called_at_ns: int | None = None
    """From then on its lease is a turn to which its gang was called."""
    counted_ns: int = 0
    """Until then its lease has been set against what gangs owe; see gangs/coscheduling.py."""
    rest_ns: int = 0
    """A gang interrupted its turn: what is left of it.  Its place in turn order stays."""
    view: ClientView | None = None
    """Cached while the seat waits; None when something in it has changed."""

    def enter(self, phase: Phase) -> None:
        """The only way to change phase."""
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def held_ns(self, now_ns: int) -> int:
        """Time that it has held the lease in all."""
        return self.used_ns if self.granted_at_ns is None else self.used_ns + now_ns - self.granted_at_ns

    def look(self, now_ns: int) -> ClientView:
        """What a policy sees.  While the seat waits nothing in it depends on the time, so it is cached."""
        if self.view is not None and self.granted_at_ns is None:
            return self.view
        client = self.client
        self.view = ClientView(
            client.client,
            client.name,
            client.priority,
            self.attached_at_ns,
            self.waiting_since_ns,
            self.granted_at_ns,
            self.last_released_ns,
            self.held_ns(now_ns),
            self.leases,
            self.submissions,
            self.allocated_bytes,
            self.resident_bytes,
            client.user_id,
            client.weight,
            client.group,
            client.time_owner,
        )
        return self.view


@dataclass(slots=True, eq=False)
class Gpu:
    """One scheduling domain."""

    uuid: str
    name: str
    total_bytes: int
    capacity_bytes: int
    umpire: Umpire
    sharing: Sharing
    sharing_wanted: Sharing
    """By the operator; `sharing` is in force, see engine/sharing.py."""
    next_lease_id: int
    next_turn: int
    quantum_setting_ns: int | None
    quantum_ns: int
    """In force: the setting, or the automatic one as computed."""
    switch_share: float = 0.05
    expected_holder: int | None = None
    recovery_deadline_ns: int = 0
    holder_stopped: bool = False
    """The expected holder is stopped (SIGSTOP, a debugger): recovery lasts until it runs again or ends."""
    settled_at_ns: int = 0
    survivors: bool = False
    """There are clients of an earlier coordinator."""
    recorded: tuple[int, int] = (0, 0)
    """What the journal says: the last lease id, and the process."""
    seats: dict[int, Seat] = field(default_factory=dict)
    leases: dict[int, Seat] = field(default_factory=dict)
    """Seats with a lease, those overdue and stray included, by client."""
    holder: Seat | None = None
    """Exclusive sharing: the one seat that HOLDS or is being revoked; overdue and stray seats are not it."""
    line: Line = field(default_factory=Line)
    working: int = 0
    """Seats that have asked for the GPU."""
    allocated_bytes: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    """Sums over the seats."""
    switch: Switch | None = None
    """Memory moves before the next grant."""
    kept_for: Gang | None = None
    owed_ns: int = 0
    """So long gangs have had turns here to which they were called, and the policy's turns have not made up for yet."""
    moving: dict[int, Seat] = field(default_factory=dict)
    """By client: those with an open memory order."""
    growing: dict[int, Seat] = field(default_factory=dict)
    """By client: those whose question for room is not answered yet."""
    immovable: Immovable = field(default_factory=Immovable)
    overflow_bytes: int = 0
    """What does not fit, as clients were told of it; see memory/client_settings.py."""
    turn_policy: int = 0
    """`Umpire.replaced` when the turn at hand, and its length, was chosen."""
    wake_at_ns: int | None = None
    free_since_ns: int | None = None
    """When the last lease ended, its drain included; None once it has been taken up."""
    last_holder: int = 0
    drain_average_ns: float = 0.0
    handover_average_ns: float = 0.0
    cost: SwitchCost = field(default_factory=SwitchCost)
    """What switches wait for memory."""
    hidden_average_ns: float = 0.0
    """What moves during a turn beside the one who computes."""
    turn_hidden_out_ns: int = 0
    turn_hidden_in_ns: int = 0
    """The same, of the turn at hand."""
    move_rate: float = 0.0
    """Bytes a nanosecond, as measured; 0: not yet."""
    exposed_closed_ns: int = 0
    """Time that switches which are over waited for memory; see `exposed_clock_ns`."""
    switches_measured: int = 0
    view: GpuView | None = None
    settings_epoch: int = 0
    rank_epoch: int = 0
    """Grows when the operator changes a priority or a weight."""
    turn_closed_ns: int = 0
    """Time that exclusive holders have had in finished turns; see `turn_clock_ns`."""
    grants: int = 0
    handovers: int = 0
    revokes: int = 0
    idle_releases: int = 0
    overdue: int = 0
    held_ns: int = 0
    waited_ns: int = 0
    max_wait_ns: int = 0
    drained_ns: int = 0
    moved_ns: int = 0
    hidden_move_ns: int = 0
    exposed_move_ns: int = 0
    evict_orders: int = 0
    restore_orders: int = 0
    evicted_bytes: int = 0
    restored_bytes: int = 0
    failed_orders: int = 0
    late_switches: int = 0
    refused_reservations: int = 0
    recent_handovers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_drains_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def recovering(self) -> bool:
        """Somebody may still work under a lease of an earlier coordinator."""
        return self.expected_holder is not None

    def settings_changed(self) -> None:
        """All clients of this GPU are told their settings again, at the latest with their next grant."""
        self.settings_epoch += 1

    def turn_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while an exclusive holder has its turn: not while it drains, memory moves or nobody
        holds."""
        holder = self.holder
        if holder is None or holder.phase is not HOLDING or holder.granted_at_ns is None:
            return self.turn_closed_ns
        return self.turn_closed_ns + now_ns - holder.granted_at_ns

    def settling(self, now_ns: int) -> bool:
        """After a restart: clients may be missing whose memory is on the GPU, so nothing is brought in."""
        return self.survivors and now_ns < self.settled_at_ns

    def exposed_clock_ns(self, now_ns: int) -> int:
        """A clock that runs only while a grant waits for memory."""
        return self.exposed_closed_ns + (now_ns - self.switch.started_ns if self.switch is not None else 0)

    def look(self) -> GpuView:
        """What a policy sees."""
        contended = len(self.line) > 0
        view = self.view
        if view is None or view.contended is not contended:
            view = self.view = GpuView(self.uuid, self.capacity_bytes, self.quantum_ns, contended)
        return view


@dataclass(slots=True, eq=False)
class Node:
    """Everything that the core knows, and the commands of the event at hand."""

    settings: Settings
    clients: dict[int, Client] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    out: list[Command] = field(default_factory=list)
    next_order_id: int = 1
    host_budget_bytes: int = 0
    host_shared_bytes: int = 0
    """The sum of the clients' shares."""
    host_owners: dict[str, HostOwner] = field(default_factory=dict)
    """By name; those that have clients."""
    host_settled_at_ns: int = 0
    """By then hooks of an earlier coordinator have come back and told what they have."""
    host_left: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What processes had whose connection ended lately, and until when that is remembered."""
    host_refused: int = 0
    policy_failures: int = 0
    gangs: dict[str, Gang] = field(default_factory=dict)
    touched: dict[str, Gpu] = field(default_factory=dict)
    """Other GPUs that the event at hand is about; see engine/assembly.py."""
    gang_turns: int = 0
    gang_gathered_ns: int = 0
