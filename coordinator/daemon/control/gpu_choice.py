"""Chooses the GPUs of a program before it starts, for `nvshare-run --gpu`.

Wishes exclude GPUs: `alone`, `apart`, `beside`, and memory that cannot fit.  Of the others the cheapest is chosen.  The
cost of a GPU is what its programs take from the new one, in units of a whole GPU:

- time: the sum of the programs' *demands*, the parts of time for which they keep the GPU busy.  Best-effort programs
  take no time from others than best-effort ones.  An interactive program takes a whole GPU more from another one, so
  that both are quick.
- memory: the part that would be in use.  What is beyond the capacity must move at each turn, if the others run at all:
  it costs `MOVING` times its part.

Several GPUs of one program also cost their average distance: nothing over NVLink, up to half a GPU across sockets.
Of equal GPUs the one with fewer programs is taken, then the first.  Pure: same arguments, same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

from nvshare.coordinator.engine.snapshot import ClientSnapshot, SeatSnapshot, Snapshot
from nvshare.coordinator.model.placement import NOT_PLACED, Placement
from nvshare.coordinator.units import format_size
from nvshare.scheduler_policies.api import JobClass

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control.api import Place
    from nvshare.coordinator.system.devices import Device

STARTING_NS: Final = 120_000_000_000
"""For so long after its start a program that has not used the GPU counts as one that keeps it busy."""
GIVES_WAY_NS: Final = 60_000_000_000
"""A placement keeps a GPU that it has not used for so long from programs of its own user only."""
MOVING: Final = 4.0
CONSIDERED: Final = 10
"""For a program on several GPUs only the cheapest are considered, so that there are at most 252 sets."""
FARTHEST: Final = 50
"""NVML's level of GPUs on different sockets, and of unknown distance."""


class NoPlaceError(Exception):
    """No GPU satisfies the wish.  `later`: one may, when programs have ended."""

    def __init__(self, text: str, *, later: bool) -> None:
        super().__init__(text)
        self.later = later


@dataclass(frozen=True, slots=True)
class Tenant:
    """One program on one GPU, or placed there and about to start.  `name` "" is hidden from the user who asks."""

    uuid: str
    name: str
    who: str
    """For sentences."""
    job_class: int
    demand: float
    memory_bytes: int
    immovable_bytes: int = 0
    placement: Placement = NOT_PLACED


def named(name: str, process_id: int, user_id: int, *, shown: bool) -> tuple[str, str]:
    """`name` and `who` of a tenant."""
    return (name, f"{name} ({process_id})") if shown else ("", f"a program of user {user_id}")


def tenants(snapshot: Snapshot, may_name: Callable[[ClientSnapshot], bool], user_id: int) -> list[Tenant]:
    """The programs that use a GPU, as they are for a program of this user."""
    return [
        _tenant(client, seat, snapshot.now_ns, user_id, shown=may_name(client))
        for client in snapshot.clients
        for seat in client.seats
    ]


def _tenant(client: ClientSnapshot, seat: SeatSnapshot, now_ns: int, user_id: int, *, shown: bool) -> Tenant:
    identity, memory = client.identity, seat.memory
    starting = now_ns - client.registered_at_ns < STARTING_NS
    waits, used_ns = seat.turn.waiting_since_ns is not None, max(client.registered_at_ns, seat.progress.measured_at_ns)
    stays = waits or identity.user_id == user_id or now_ns - used_ns < GIVES_WAY_NS
    wants = waits or (starting and not seat.statistics.leases)
    busy = (1.0 if wants else seat.turn.recent_share) * (seat.progress.busy_alone or 1.0)
    return Tenant(
        seat.uuid,
        *named(identity.name, identity.process_id, identity.user_id, shown=shown),
        client.rank.job_class,
        0.0 if client.paused else min(1.0, max(busy, client.rank.share_request)),
        max(memory.allocated_bytes, memory.limit_bytes if starting else 0),
        memory.immovable_bytes,
        client.placement if stays else NOT_PLACED,
    )


@dataclass(frozen=True, slots=True)
class _Offer:
    """One GPU as a place for the program.  `busy` and `used`: parts of its time, and of its memory with the program.
    `crowding`: interactive programs beside which an interactive one would be."""

    card: Device
    programs: int
    busy: float
    used: float
    crowding: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """The cost first."""
        moving = MOVING * max(0.0, self.used - 1) * min(1.0, self.busy)
        return round(self.busy + self.crowding + min(1.0, self.used) + moving, 3), self.programs, self.card.index

    def __str__(self) -> str:
        crowd = ", interactive programs" if self.crowding else ""
        return f"GPU {self.card.index} ({self.rank[0]:.2f}: busy {self.busy:.0%}, memory {self.used:.0%}{crowd})"


def _offer(card: Device, there: Sequence[Tenant], wish: Place) -> _Offer:
    quick, last = (wish.job_class == each for each in (JobClass.INTERACTIVE, JobClass.BEST_EFFORT))
    return _Offer(
        card,
        len(there),
        busy=sum(each.demand for each in there if last or each.job_class != JobClass.BEST_EFFORT),
        used=(wish.memory_bytes + sum(each.memory_bytes for each in there)) / max(1, card.total_bytes),
        crowding=sum(quick and each.job_class == JobClass.INTERACTIVE for each in there),
    )


def choose(
    cards: Iterable[Device], present: Iterable[Tenant], wish: Place, among: tuple[str, ...] | None, own: str = ""
) -> tuple[tuple[str, ...], str]:
    """The GPUs for this wish, and why.  Raises NoPlaceError.

    `among`: those that the wish names, in their order, or may have; None: all.  `own`: the placement in which the
    program starts, whose programs are not in its way.
    """
    there: dict[str, list[Tenant]] = {card.uuid: [] for card in cards}
    for tenant in present:
        if not own or tenant.placement.placement != own:
            there[tenant.uuid].append(tenant)
    if wish.beside and not any(tenant.name == wish.beside for each in there.values() for tenant in each):
        if wish.beside != wish.name:
            raise NoPlaceError(f"there is no program named {wish.beside}", later=True)
        wish = wish.model_copy(update={"beside": ""})  # the first of its name
    allowed = [card for card in cards if among is None or card.uuid in among]
    count = len(allowed) if wish.gpus else wish.count
    if len(allowed) < count:
        raise NoPlaceError(f"GPUs that can be chosen: {len(allowed)}; wanted: {count}", later=False)
    offers, excluded, hopeless = [], [], 0
    for card in allowed:
        why, later = _against(card, there[card.uuid], wish)
        if why:
            excluded.append(f"GPU {card.index}: {why}")
            hopeless += not later
        else:
            offers.append(_offer(card, there[card.uuid], wish))
    if len(offers) < count:
        raise NoPlaceError("; ".join(excluded), later=len(allowed) - hopeless >= count)
    if wish.gpus:
        return among or (), "named by --gpu"
    chosen = _cheapest(offers, count)
    return tuple(offer.card.uuid for offer in chosen), _reason(chosen, offers, excluded, wish)


def _against(card: Device, there: Sequence[Tenant], wish: Place) -> tuple[str, bool]:
    """Why the program cannot be placed on this GPU, "" if it can, and whether that may end."""
    room_bytes = card.total_bytes - sum(tenant.immovable_bytes for tenant in there)
    if card.is_mig and wish.count > 1:
        return "it is a MIG instance, and a program uses one at a time", False
    if wish.memory_bytes > card.total_bytes and not wish.gpus:
        return f"it has {format_size(card.total_bytes)}, and {format_size(wish.memory_bytes)} are wanted", False
    if wish.memory_bytes > room_bytes and not wish.gpus:
        return f"it has room for {format_size(max(0, room_bytes))} beside memory that cannot move", True
    if wish.beside and all(tenant.name != wish.beside for tenant in there):
        return f"{wish.beside} is not there", True
    for tenant in there:
        theirs = tenant.placement
        if wish.alone or (wish.apart and tenant.name == wish.apart):
            return f"{tenant.who} is there", True
        if not wish.gpus and theirs.placed_alone:
            return f"{tenant.who} is alone there", True
        if not wish.gpus and theirs.placed_apart and theirs.placed_apart == wish.name:
            return f"{tenant.who} is apart from {wish.name}", True
    return "", True


def _cheapest(offers: Sequence[_Offer], count: int) -> list[_Offer]:
    """The set with the least average cost, distance included; of equal sets the one with the first GPUs."""
    considered = sorted(offers, key=lambda offer: offer.rank)[: max(count, CONSIDERED)]
    sets = combinations(considered, count)
    best = min(sets, key=lambda each: round(sum(offer.rank[0] for offer in each) / count + _distance(each), 3))
    return sorted(best, key=lambda offer: offer.card.index)


def _distance(offers: Sequence[_Offer]) -> float:
    levels = [one.card.distances.get(two.card.uuid, FARTHEST) for one, two in combinations(offers, 2)]
    return sum(0.25 + level / (4 * FARTHEST) for level in levels if level) / max(1, len(levels))


def _reason(chosen: Sequence[_Offer], offers: Iterable[_Offer], excluded: Sequence[str], wish: Place) -> str:
    wishes = ["alone"] * wish.alone
    wishes += [f"{word} {name}" for word, name in (("with", wish.beside), ("apart from", wish.apart)) if name]
    text = ", ".join([*wishes, "cheapest: "]) + " and ".join(map(str, chosen))
    if len(chosen) > 1 and not _distance(chosen):
        text += ", joined by NVLink"
    others = [str(offer) for offer in sorted(offers, key=lambda offer: offer.rank) if offer not in chosen]
    return "; ".join([", then ".join([text, *others]), *excluded])
