"""May a program run on a GPU, and if not, why: one state and one reason, which every view shows.

Non-goals: acting on it (planning.py, reconcile.py, stopped.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nvshare.coordinator.engine.memory import claims
from nvshare.coordinator.model.client import ParkState
from nvshare.coordinator.model.seat import HOLDING, NEXT, OVERDUE, Seat
from nvshare.coordinator.units import format_size

_WHY: Final = {
    "paused": "this program is paused; `nvshare-ctl resume {program}` continues it",
    "parking": "this program is {state}",
    "stopped": "this program is stopped: continue it (kill -CONT) or end it",
    "recovering": "the coordinator has restarted, and an earlier holder is not back yet{stopped}",
    "lacks": "{lacking} of this program's memory does not fit beside memory that cannot move",
    "stuck": "the memory of {blocker} does not move{stopped}",
    "refused": "its limit is less than it has, or memory of others could not be moved; it is tried again every few "
    "seconds",
    "moving": "this program is next, and memory is being moved for it",
    "debt": "others come first, because programs of this user gave the GPU back too late",
    "free": "no program holds it now; {place}",
    "next": "memory is being moved for {blocker}{stopped}; {place}",
    "turn": "held by {blocker}{stopped}; {place}",
}
"""Sentences by reason."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One client on one GPU."""

    state: str
    """`running`, `waiting`, `paused`, `stopped`, ...: the word of all views."""
    reason: str = ""
    """As `_WHY`; "": it runs or wants nothing."""
    blocker: int = 0
    """The client that the reason names; 0: none."""
    blocker_stopped: bool = False

    def sentence(self, program: str, blocker: str, place: int, lacking_bytes: int) -> str:
        """The reason for people; "" without one.  `place`: the clients that come before it."""
        stopped = " (stopped: continue it with kill -CONT, or end it)" if self.blocker_stopped else ""
        where, lacking = f"{ordinal(place + 1)} in line" if place else "next in line", format_size(lacking_bytes)
        return _WHY.get(self.reason, "").format(
            program=program, state=self.state, blocker=blocker, stopped=stopped, place=where, lacking=lacking
        )


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def standing(seat: Seat) -> Standing:
    """O(leases and moves of the GPU); without room, O(its clients)."""
    client, gpu, parking, switch = seat.client, seat.gpu, seat.client.parking, seat.gpu.switching.switch
    if client.facts.paused:
        return Standing("paused", "paused")
    if parking.move.target or parking.state is not ParkState.RUNNING:
        return Standing("migrating" if parking.move.target else parking.state.value, "parking")
    if client.stopped:
        return Standing("stopped", "stopped")
    if seat.place.waiting_since_ns is None:
        return Standing("running" if seat.phase is HOLDING else seat.phase.value)
    if gpu.recovering:
        return Standing("waiting", "recovering", blocker_stopped=gpu.recovery.holder_stopped)
    state = "no room" if seat.room.unschedulable else seat.phase.value
    if seat.room.unschedulable and seat.room.lacking_bytes:
        return Standing(state, "lacks")
    if (stuck := _stuck(seat)) is not None:
        return Standing(state, "stuck", stuck.client.client_id, stuck.client.stopped)
    if seat.room.unschedulable or seat.phase is NEXT:
        return Standing(state, "moving" if seat.phase is NEXT else "refused")
    if seat.in_debt:
        return Standing("in debt", "debt")
    holders = [*(gpu.leases.running or gpu.leases.by_client).values(), *([] if switch is None else [switch.seat])]
    if not holders:
        return Standing(state, "free")
    first = holders[0].client
    return Standing(state, "next" if holders[0].phase is NEXT else "turn", first.client_id, first.stopped)


def _stuck(waiting: Seat) -> Seat | None:
    """Another client whose memory is to make room for this one's, and does not move."""
    gpu = waiting.gpu
    overdue = [seat for seat in gpu.leases.by_client.values() if seat.phase is OVERDUE]
    if overdue and not claims.fits_beside_overdue(gpu, waiting):
        return overdue[0]
    for seat in gpu.memory.evictable.values() if waiting.room.unschedulable else gpu.memory.moving.values():
        move = seat.moves.move
        stays = seat.client.stopped and waiting.room.unschedulable
        if seat is not waiting and (stays or (move is not None and move.out and move.stalled)):
            return seat
    return None
