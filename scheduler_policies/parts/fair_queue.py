"""Start-time fair queueing on two levels: owners by their weight, then the programs of each by theirs.

Each owner has a *tag*, the lease time of its programs by its weight; each program has one among those of its owner.
- Idle time earns no credit: virtual time is the tag with which the last turn began.  A newcomer begins one turn after
  it, a returning job at it or later.
- Debt is bounded: a tag is at most `DEBT` turns ahead of virtual time.
- Tags within half a turn count as equal: the oldest turn goes first, and the running job does not renew.
- A turn in a gang's slot counts for its owner only while the owner has no other program, as in parts/turns.py: else the
  gang would take the turns of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace, nsmallest
from typing import Final

from nvshare.scheduler_policies.api import Happened, JobLeft, JobView, TurnEnded
from nvshare.scheduler_policies.parts.turns import AHEAD

DEBT: Final = 4
_FIRST_NS: Final = 100_000_000
"""The first turn counts as this long at most: a job that was alone may have had the GPU for hours."""
_HISTORY: Final = 256
_SCALE: Final = 1 << 20
"""Tags are integers: nanoseconds times this, divided by the weight."""


@dataclass(slots=True)
class _Level:
    """Tags with a common virtual time."""

    virtual: int = 1
    tags: dict[str | int, int] = field(default_factory=dict)
    weights: dict[str | int, int] = field(default_factory=dict)
    rose_at_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    history: deque[int] = field(default_factory=lambda: deque([1], maxlen=_HISTORY + 1))
    """Virtual time before each rise, then the present one."""

    def new(self, attached_at_ns: int) -> int:
        """Virtual time when a newcomer attached."""
        return self.history[bisect_left(self.rose_at_ns, attached_at_ns)]

    def charge(
        self, key: str | int, weight: int, job: JobView, lease: tuple[int, int], turn_ns: int, now_ns: int
    ) -> None:
        """Adds a lease to a tag: the turns before the last one, and the last one."""
        turn = turn_ns * _SCALE // weight
        self.weights[key] = weight
        start = (
            max(self.tags.get(key) or self.new(job.turn.attached_at_ns) + turn, self.virtual)
            + lease[0] * _SCALE // weight
        )
        longest = turn_ns * _SCALE // min(self.weights.values())
        if start - longest // 2 > self.virtual:  # others within half a turn of it wait
            self.virtual = start - longest // 2
            self.rose_at_ns.append(now_ns)
            self.history.append(self.virtual)
        self.tags[key] = min(start + lease[1] * _SCALE // weight, max(start, self.virtual) + DEBT * turn)


@dataclass(slots=True)
class _Range:
    least: int = 1 << 62
    most: int = 1

    def add(self, weight: int) -> None:
        self.least, self.most = min(self.least, weight), max(self.most, weight)

    def ratio(self) -> int:
        """Largest weight divided by the smallest, rounded up."""
        return -(-self.most // self.least)


class FairQueue:
    """The tags on one GPU."""

    def __init__(self) -> None:
        self._top = _Level()
        self._levels: dict[str, _Level] = {}
        self._owner_of: dict[int, str] = {}
        self._turn_ns = 0
        """About the median of the turns."""
        self._most_turn_ns = 0
        self._most_programs = self._most_owners = 1
        self._programs_weights, self._owners_weights = _Range(), _Range()

    def observe(self, happened: Happened) -> None:
        """Charges a lease, or forgets a client.  An owner's tag stays while in debt: else short programs never pay."""
        if isinstance(happened, TurnEnded):
            job = happened.job
            lease_ns = job.uncharged_ns(happened.now_ns)
            renewed_ns = max(0, job.turn.began_ns - (happened.now_ns - lease_ns))
            last_ns, step_ns = lease_ns - renewed_ns, max(1, self._turn_ns // 10)
            self._turn_ns += (
                max(-step_ns, min(step_ns, last_ns - self._turn_ns)) if self._turn_ns else min(last_ns, _FIRST_NS)
            )
            self._owner_of[job.client] = job.owner
            self._most_turn_ns = max(self._most_turn_ns, self._turn_ns)
            level = self._levels.setdefault(job.owner, _Level())
            lease = renewed_ns, last_ns
            if not (happened.called and level.tags.keys() - {job.client}):
                weight = _owner_weight(job)
                self._top.charge(job.owner, weight, job, lease, self._turn_ns, happened.now_ns)
            level.charge(job.client, job.rank.weight, job, lease, self._turn_ns, happened.now_ns)
            self._programs_weights.add(job.rank.weight)
            self._owners_weights.add(_owner_weight(job))
            self._most_programs = max(self._most_programs, len(level.tags))
            self._most_owners = max(self._most_owners, sum(1 for level in self._levels.values() if level.tags))
        elif isinstance(happened, JobLeft) and happened.client in self._owner_of:
            level = self._levels[self._owner_of.pop(happened.client)]
            del level.tags[happened.client], level.weights[happened.client]
            for owner in [owner for owner, level in self._levels.items() if not level.tags]:
                if self._top.tags[owner] <= self._top.virtual:
                    del self._levels[owner], self._top.tags[owner], self._top.weights[owner]

    def following(
        self, jobs: Sequence[JobView], quantum_ns: int, now_ns: int, running: JobView | None = None
    ) -> list[JobView]:
        """The next few jobs, by the tags of their owners, then by their own.

        A job whose turn is over is the last of `jobs`.  `running`: its turn goes on, and counts for its owner.
        """
        if not jobs:
            return []
        queues: defaultdict[str, list[JobView]] = defaultdict(list)
        for job in jobs:
            queues[job.owner].append(job)
        last = jobs[-1]
        lease_ns = last.uncharged_ns(now_ns) if last.state else 0
        turn = (self._turn_ns or quantum_ns) * _SCALE
        top, known, owners = self._top, self._top.tags.get, list(queues)
        turns = [turn // _owner_weight(queue[0]) for queue in queues.values()]
        tags = [
            known(owner) or top.new(queue[0].turn.attached_at_ns) + one
            for (owner, queue), one in zip(queues.items(), turns, strict=True)
        ]
        if lease_ns:
            place = owners.index(last.owner)
            tags[place] = max(tags[place], top.virtual) + lease_ns * _SCALE // _owner_weight(last)
        if running is not None and running.owner in queues:
            tags[owners.index(running.owner)] += turn // _owner_weight(running)
        near = _order(tags, turns.__getitem__, top.virtual, AHEAD)
        heap = [(max(tags[place], top.virtual) if rank else -1, rank, place) for rank, place in enumerate(near)]
        taken: list[int] = []
        while heap and len(taken) < AHEAD:
            _, rank, place = heap[0]
            taken.append(place)
            nth = taken.count(place)
            if nth < len(queues[owners[place]]):
                heapreplace(heap, (max(tags[place], top.virtual) + nth * turns[place], rank, place))
            else:
                heappop(heap)
        programs = {
            place: iter(self._programs(queues[owners[place]], turn, lease_ns, taken.count(place)))
            for place in set(taken)
        }
        return [next(programs[place]) for place in taken]

    def wait_bound(self, clients: int) -> tuple[int, int] | None:
        """The longest wait in half turns, and the length of a turn; None: clients have had no turn yet.

        Programs start and end, and weights change, during a wait: the extremes so far count.
        """
        if clients > len(self._owner_of):
            return None
        debt = 2 * DEBT + 3  # halves
        within = (self._most_programs - 1) * (2 + self._programs_weights.ratio() * debt)
        return within + (self._most_owners - 1) * (
            2 + self._owners_weights.ratio() * (debt + within)
        ), self._most_turn_ns

    def _programs(self, queue: list[JobView], turn: int, lease_ns: int, count: int) -> list[JobView]:
        """The next programs of one owner."""
        level = self._levels.get(queue[0].owner) or _Level()
        known = level.tags.get
        history, times = level.history, level.rose_at_ns
        tags = [
            known(job.client) or history[bisect_left(times, job.turn.attached_at_ns)] + turn // job.rank.weight
            for job in queue
        ]
        if lease_ns and queue[-1].state:
            tags[-1] = max(tags[-1], level.virtual) + lease_ns * _SCALE // queue[-1].rank.weight
        near = _order(tags, lambda place: turn // queue[place].rank.weight, level.virtual, count)
        return [queue[place] for place in near[:count]]


def _order(tags: list[int], turn: Callable[[int], int], virtual: int, count: int) -> list[int]:
    """The first places by tag; before them the first one, in turn order, within half a turn of the least."""
    near = nsmallest(count, range(len(tags)), key=tags.__getitem__)
    close = max(virtual, tags[near[0]]) + turn(near[0]) // 2
    first = next(place for place, tag in enumerate(tags) if tag <= close)
    return [first, *(place for place in near if place != first)]


def _owner_weight(job: JobView) -> int:
    """A user has weight 1, a slot the weight of its annotation."""
    return job.rank.weight if job.owner.startswith("slot ") else 1
