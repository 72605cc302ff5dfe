"""Reports of work by clients, and the rates that follow: now and alone.

Rules:
- A rate needs two counts of one lease with the same running set between them.  A lease begins with a count of its own:
  the last one before it.
- A rate counts as the client's rate alone if no other client had a lease, from `REFILL_NS` after the set began.  Until
  then a program fills its queue again: one that is bound by launching does less, others submit more than they do.
  Before that a client's first rate alone is a guess.
- Reports are the client's own.  Figures that are impossible are dropped.

- Policies see rates within leases.  People see `over_time`: waiting and idle time count too.

Non-goals: what policies make of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.seat import HOLDING, REVOKING, Seat
from nvshare.coordinator.model.settings import MILLISECOND_NS, SECOND_NS
from nvshare.coordinator.protocol.messages import Progress
from nvshare.scheduler_policies.api import Measured

REFILL_NS: Final = 50 * MILLISECOND_NS
SHORTEST_NS: Final = 20 * MILLISECOND_NS
GUESS_NS: Final = 80 * MILLISECOND_NS
SHOWN_NS: Final = 5 * SECOND_NS
AT_WORK: Final = frozenset({HOLDING, REVOKING})
UNLIKELY: Final = 1.2
"""No program stays so much faster beside others than alone: its rate alone is measured again."""
SURE_NS: Final = 500 * MILLISECOND_NS
"""A client must be ahead by this time alone.  A program that works in bursts is faster in single reports."""
NEW_PHASE: Final = 0.25
"""A rate alone that differs by this part from the last one replaces it."""
WEIGHT: Final = 0.3
"""Weight of the newest sample of a rate alone, otherwise."""


def report(node: Node, seat: Seat, message: Progress, now_ns: int) -> None:
    """Takes a client's count.  It concerns the GPU if its plan may change by it."""
    gpu, mine, last = seat.gpu, seat.progress, seat.progress.last
    at_ns = min(message.at_ns, now_ns)
    changed_ns = gpu.leases.changed_at_ns
    since_ns = max(last.at_ns, changed_ns)
    counted = seat.phase in AT_WORK and message.lease_id == seat.lease.lease_id
    # Between its last lease and this one a client does no work, so a count from before this lease is good too.
    same_set = last.at_ns >= changed_ns or seat.lease.granted_at_ns == changed_ns
    work, for_ns = message.work - last.work, at_ns - since_ns
    if not counted or not same_set or work < 0:
        _keep(seat, message, at_ns, now_ns)
        return
    if for_ns < SHORTEST_NS:
        if last.at_ns == 0:
            _keep(seat, message, at_ns, now_ns)
        return
    mine.rate = work * SECOND_NS / for_ns
    mine.step_rate = max(0, message.steps - last.steps) * SECOND_NS / for_ns
    mine.measured_for_ns = at_ns - gpu.leases.changed_at_ns
    alone = len(gpu.leases.by_client) == 1
    if not alone and mine.alone_rate > 0.0:
        mine.ahead_ns = max(0.0, mine.ahead_ns + (mine.rate / mine.alone_rate - UNLIKELY) * for_ns)
        if mine.ahead_ns > SURE_NS:  # it was idle when it was measured alone, or does something else now
            mine.alone_rate = mine.busy_alone = mine.ahead_ns = 0.0
    filled_ns = since_ns - changed_ns
    if alone and (filled_ns >= REFILL_NS or (mine.alone_rate == 0.0 and for_ns >= GUESS_NS)):
        changed = abs(mine.rate - mine.alone_rate) > NEW_PHASE * mine.alone_rate
        anew = changed or mine.alone_is_guess or filled_ns >= 10 * REFILL_NS
        mine.alone_rate = mine.rate if anew else mine.alone_rate + WEIGHT * (mine.rate - mine.alone_rate)
        mine.alone_at_ns, mine.alone_is_guess = at_ns, filled_ns < REFILL_NS
    watched_ns = message.watched_ns - last.watched_ns
    if alone and watched_ns >= SHORTEST_NS:
        mine.busy_alone = min(1.0, max(0.0, (message.busy_ns - last.busy_ns) / watched_ns))
    _keep(seat, message, at_ns, now_ns)
    if not gpu.policy_guard.reads_progress:
        return
    running = tuple(client for client, other in gpu.leases.by_client.items() if other.phase in AT_WORK)
    gpu.policy_guard.observe(lambda: Measured(seat.view(), running, now_ns, for_ns), node.out)
    if gpu.schedule.reports:
        gpu.schedule.stale = True
        node.concern(gpu)


def over_time(seat: Seat, now_ns: int) -> float:
    """Work over the last 5 s or round of turns, against the rate alone, at most 1.0; 0: not known."""
    mine, round_ns = seat.progress, seat.gpu.leases.active_seats * seat.gpu.rules.quantum_ns
    span_ns = min(mine.recent.span_ns, max(SHOWN_NS, round_ns), now_ns - seat.place.attached_at_ns)
    rate = mine.recent.growth(now_ns, mine.last.work, span_ns=span_ns) * SECOND_NS / max(1, span_ns)
    # A rate alone that is less than the present one within a lease was measured badly.
    return min(1.0, rate / max(mine.alone_rate, mine.rate)) if mine.alone_rate > 0.0 else 0.0


def _keep(seat: Seat, message: Progress, at_ns: int, now_ns: int) -> None:
    seat.progress.recent.mark(now_ns, message.work)
    seat.progress.last = replace(message, at_ns=at_ns)
    seat.place.view = None
