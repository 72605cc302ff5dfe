"""Members of gangs: which can be granted, which run, and what co-scheduled turns owe the other clients of a GPU.

Non-goals: when a gang has its turn (coscheduling.py).
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.model.gang import Chosen, Gang
from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.seat import HOLDING, WAITING, Seat

LONGEST_CALL: Final = 2
"""Quanta: a member that runs when its gang is co-scheduled has one while the others come, and one with them."""


def can_be_granted(seat: Seat) -> bool:
    """The member waits and is schedulable."""
    return seat.phase is WAITING and not (seat.client.paused or seat.place.demoted or seat.room.unschedulable)


def still_waits(chosen: Chosen) -> bool:
    """The chosen member waits, for the same turn."""
    seat = chosen.seat
    return can_be_granted(seat) and seat.place.waiting_since_ns == chosen.waiting_since_ns


def is_running(gang: Gang, gpu: Gpu) -> bool:
    """A member runs there, or is about to."""
    holder, switch = gpu.leases.holder, gpu.switching.switch
    if switch is not None:
        return switch.seat.gang_turn.gang is gang
    return holder is not None and holder.gang_turn.gang is gang and holder.phase is HOLDING


def running_members(gang: Gang) -> list[Seat]:
    """The gang's exclusive holders."""
    return [seat for seat in gang.seats if seat is seat.gpu.leases.holder and seat.phase is HOLDING]


def in_gang_turn(seat: Seat) -> bool:
    """The lease belongs to a turn of its gang, which may be over."""
    return (
        seat.gang_turn.gang is not None
        and seat.phase is HOLDING
        and seat.lease.quantum_ends_ns == seat.gang_turn.gang.ends_ns
    )


def members_in_turn(gang: Gang, now_ns: int) -> list[Seat]:
    """Members with a lease in the gang's present turn; empty when there is none."""
    return [seat for seat in running_members(gang) if in_gang_turn(seat)] if now_ns < gang.ends_ns else []


def mates_in_turn(seat: Seat, now_ns: int) -> list[Seat]:
    """The other members that run in the same turn."""
    gang = seat.gang_turn.gang
    return (
        []
        if gang is None or not in_gang_turn(seat)
        else [mate for mate in members_in_turn(gang, now_ns) if mate is not seat]
    )


def others_wait(gpu: Gpu, gang: Gang) -> bool:
    """A client that is no member waits."""
    return any(seat.gang_turn.gang is not gang for seat in gpu.wait_queue.seats())


def keep_chosen(gang: Gang) -> None:
    """The common turn has begun, or there is none.  Chosen members that still wait stay chosen."""
    gang.chosen = {uuid: chosen for uuid, chosen in gang.chosen.items() if still_waits(chosen)}


def account_turn(seat: Seat, now_ns: int) -> None:
    """Sets an exclusive holder's turn so far against the debt of gangs on its GPU."""
    gpu, gang, called_at_ns = seat.gpu, seat.gang_turn.gang, seat.gang_turn.co_scheduled_at_ns
    given_ns = (now_ns if called_at_ns is None else called_at_ns) - seat.gang_turn.accounted_until_ns
    gpu.gangs.debt_ns = max(0, gpu.gangs.debt_ns - max(0, given_ns))
    if called_at_ns is not None:
        longest_ns = LONGEST_CALL * max(gpu.rules.quantum_ns, 0 if gang is None else gang.quantum_ns)
        gpu.gangs.debt_ns = max(
            1, min(longest_ns, gpu.gangs.debt_ns + now_ns - max(called_at_ns, seat.gang_turn.accounted_until_ns))
        )
    seat.gang_turn.accounted_until_ns = now_ns


def turn_renewed(seat: Seat, now_ns: int) -> None:
    """The policy renews the turn, however it began."""
    account_turn(seat, now_ns)
    seat.gang_turn.co_scheduled_at_ns = None
    seat.gang_turn.protected_from_gangs = seat.gpu.gangs.debt_ns > 0
    seat.lease.alerted = False


def will_be_co_scheduled(seat: Seat) -> bool:
    """The turn that the seat is about to have comes from its gang, not from the policy of its own GPU."""
    gang = seat.gang_turn.gang
    chosen = None if gang is None else gang.chosen.get(seat.gpu.uuid)
    return chosen is None or chosen.seat is not seat


def was_co_scheduled(seat: Seat) -> bool:
    """The lease was co-scheduled from its beginning: no policy of its GPU chose it."""
    at_ns = seat.gang_turn.co_scheduled_at_ns
    return at_ns is not None and at_ns == seat.lease.granted_at_ns


def lease_ended(seat: Seat) -> None:
    """The seat has no lease any more."""
    seat.gang_turn.protected_from_policy = False
    seat.gang_turn.co_scheduled_at_ns = None
    gang = seat.gang_turn.gang
    if gang is not None:
        chosen = gang.chosen.get(seat.gpu.uuid)
        if chosen is not None and chosen.seat is seat:
            del gang.chosen[seat.gpu.uuid]


def protected_from_policy(seat: Seat) -> bool:
    """The policy gave it this turn earlier and may have forgotten why."""
    return seat.gang_turn.protected_from_policy or (
        seat.gang_turn.gang is not None and in_gang_turn(seat) and seat.gpu.uuid in seat.gang_turn.gang.protected
    )


def waits_for_mates(gpu: Gpu) -> bool:
    """The next lease is ready, and waits for those on other GPUs."""
    return (
        gpu.switching.switch is not None
        and gpu.gangs.reserved_for is not None
        and gpu.switching.switch.seat.gang_turn.gang is gpu.gangs.reserved_for
    )


def deadline_ns(gpu: Gpu) -> int | None:
    """When `assembly.advance_all` must look at this GPU again though nothing happens."""
    gang = gpu.gangs.reserved_for
    if gang is None:
        return None
    return gang.deadline_ns if gang.gathering_since_ns is not None else gang.ends_ns
