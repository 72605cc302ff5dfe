"""Turn order: turns rotate between owners first, then between the programs of each.

An owner's rank is the end of its last turn on this GPU, or the last turn or attachment of its next program, if later: a
newcomer gets no credit for the past.  A co-scheduled turn of a gang counts only while the owner has no other program:
else a gang would take the turns of its owner's other programs.

Invariant: while a program waits, each other owner has at most one turn for each turn of the program's owner.  Each
other program of its owner has at most one turn.  So with p programs of each of u owners it waits at most p u - 1 turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import Final

from nvshare.scheduler_policies.api import Allotment, Happened, JobLeft, JobView, Plan, PolicyBase, State, TurnEnded

AHEAD: Final = 8
"""Number of jobs in a plan's order."""
REMEMBERED: Final = 1024
"""Number of remembered owners; beyond it the owner with the oldest turn is forgotten."""
_COMING: Final = State.COMING


def split(jobs: Sequence[JobView]) -> tuple[Sequence[JobView], Sequence[JobView]]:
    """The jobs that run or come, and those that wait."""
    active = 0
    while active < len(jobs) and jobs[active].state:
        active += 1
    return jobs[:active], jobs[active:]


def is_over(job: JobView, quantum_ns: int, now_ns: int) -> bool:
    """Whether the job runs and its turn has ended."""
    return job.state is State.RUNNING and now_ns >= job.turn.began_ns + quantum_ns


def going_on(active: Sequence[JobView], quantum_ns: int, now_ns: int) -> JobView | None:
    """The job whose turn goes on: the one on its way, else the one that runs and has time left."""
    for job in active:
        if job.state is _COMING:
            return job
    return next((job for job in active if not is_over(job, quantum_ns, now_ns)), None)


def has_waited(job: JobView, limit_ns: int, now_ns: int) -> bool:
    """Whether the job waits, or waited before its present turn, for longer than the limit."""
    turn = job.turn
    since_ns = turn.waiting_since_ns or turn.last_released_ns or turn.attached_at_ns
    return (turn.granted_at_ns or now_ns) - since_ns > limit_ns


def one_turn(job: JobView, quantum_ns: int, following: Iterable[JobView], waiting: int) -> Plan:
    """The plan that one job has a turn."""
    order = tuple(other.client for other in following if other.client != job.client)
    others = waiting - (not job.state)
    why = f"{job.name} has a turn of {quantum_ns / 1e6:g} ms, {others} wait" if others else f"{job.name} is alone"
    return Plan((Allotment(job.client, quantum_ns),), order, why=why)


class OwnerTurns:
    """Turns on one GPU."""

    def __init__(self) -> None:
        self._last_ns: dict[str, int] = {}  # in order of time
        self._owners: dict[int, str] = {}  # for clients that have had a turn
        self._programs: Counter[str] = Counter()
        self._most_programs = self._most_owners = 0

    def observe(self, happened: Happened) -> None:
        """Notes a turn, or forgets a client.  Its owner keeps its rank, or short-lived programs would get all turns."""
        if isinstance(happened, TurnEnded):
            job = happened.job
            self._know(job.client, job.owner)
            if happened.called:
                return
            self._last_ns.pop(job.owner, None)
            self._last_ns[job.owner] = happened.now_ns
            if len(self._last_ns) > REMEMBERED:
                del self._last_ns[next(iter(self._last_ns))]
        elif isinstance(happened, JobLeft):
            owner = self._owners.pop(happened.client, None)
            if owner is not None:
                self._programs[owner] -= 1
                self._programs += Counter()  # drops zeros

    def _know(self, client: int, owner: str) -> None:
        if client not in self._owners:
            self._owners[client] = owner
            self._programs[owner] += 1
            self._most_programs = max(self._most_programs, self._programs[owner])
            self._most_owners = max(self._most_owners, len(self._programs))

    def following(
        self, waiting: Sequence[JobView], running: JobView | None = None, but: Container[int] = ()
    ) -> list[JobView]:
        """The next few jobs of those in turn order, `but` some clients: round by round, owner by owner.

        The owner of the running job has its turn now, so it is the last of each round.  At most one pass.
        """
        owners = len({job.owner for job in waiting})
        if owners <= 1:
            return list(islice((job for job in waiting if job.client not in but), AHEAD))
        now = None if running is None else running.owner
        rounds = -(-AHEAD // owners)
        lacking = rounds * owners
        queues: dict[str, list[JobView]] = {}
        ranks: dict[str, int] = {}
        early: list[int] = []
        for job in waiting:
            if job.client in but:
                continue
            queue = queues.get(job.owner)
            if queue is None:
                since_ns = _since(job)
                if len(early) >= AHEAD and sorted(early)[AHEAD - 1] < since_ns:
                    break  # no later owner is among the next ones
                queues[job.owner] = [job]
                ranks[job.owner] = max(self._last_ns.get(job.owner, 0), since_ns)
                if job.owner != now:
                    early.append(ranks[job.owner])
                lacking -= 1
            elif len(queue) < AHEAD:
                queue.append(job)
                lacking -= len(queue) <= rounds
            if not lacking:
                break  # so many rounds are complete
        order = sorted(queues, key=lambda owner: (owner == now, ranks[owner]))
        following = (queues[owner][turn] for turn in range(AHEAD) for owner in order if turn < len(queues[owner]))
        return list(islice(following, AHEAD))

    def longest_wait(self, clients: int) -> int:
        """Longest wait in turns with this number of clients.  For tests.

        Programs may start and end during a wait, so the largest numbers so far count.  Clients that have had no turn
        yet count for the owners that make the wait longest.
        """
        unknown = max(0, clients - len(self._owners))
        programs, owners = self._most_programs, self._most_owners
        mixes = ((programs + unknown - new + (programs == 0 < new), owners + new) for new in range(unknown + 1))
        return max((most * owners for most, owners in mixes), default=1) - 1


class TurnPolicy(PolicyBase):
    """A policy that keeps the last turn of each owner."""

    def __init__(self) -> None:
        self.turns = OwnerTurns()

    def observe(self, happened: Happened) -> None:
        """Notes a turn of the job's owner."""
        self.turns.observe(happened)


def _since(job: JobView) -> int:
    return max(job.turn.attached_at_ns, job.turn.last_released_ns or 0)
