"""Programs run side by side or in turns, whichever gives more: the default policy.

Source: introspection and packing of Gandiva (Xiao et al., OSDI 2018); control of best-effort work as in TGS and AntMan.
Rule: everybody who wants the GPU runs, as on the card without a coordinator, until measurements say that turns are
better.  Programs that leave the GPU idle alone always run.  Two or more that saturate it take turns beside the others
where that gives more (parts/packing.py).
- An interactive job is named first.  While it is active, others have little unfinished work.
- Best-effort jobs have the rate of parts/harvest.py beside others.
- Where memory is short, or more than `MOST` jobs want the GPU, jobs take turns; interactive and small ones stay.
- A limit is a rate.  A request of more than an equal part caps the rates of the others.
Bound: none.  Turns rotate as in parts/turns.py, and turns that leave a program with too little are undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import Allotment, GpuView, Happened, JobClass, JobView, Plan, PolicyBase, State
from nvshare.scheduler_policies.parts.harvest import Harvest
from nvshare.scheduler_policies.parts.members import MOST, allot
from nvshare.scheduler_policies.parts.packing import SOLO_NS, Packing, Verdict, is_saturating
from nvshare.scheduler_policies.parts.turns import OwnerTurns, going_on, split

SMALL: Final = 8
"""A job with at most capacity / 8 may stay where memory is short, for 1 / 4 of the capacity in all."""
PATIENCE_NS: Final = 30_000_000_000
"""Where jobs take turns, a best-effort job has one after this time."""
_COMING: Final = State.COMING
_INTERACTIVE: Final = JobClass.INTERACTIVE
_BEST_EFFORT: Final = JobClass.BEST_EFFORT


class Auto(PolicyBase):
    """Keeps measurements and turns."""

    name = "auto"

    def __init__(self) -> None:
        self._turns = OwnerTurns()
        self._packing = Packing()
        self._harvest = Harvest()

    def observe(self, happened: Happened) -> None:
        """Notes turns and reports."""
        self._turns.observe(happened)
        self._packing.observe(happened)
        self._harvest.observe(happened, lambda job: job.rank.job_class is _BEST_EFFORT)

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Alone, in turns of memory, or in the running set that gives most."""
        if len(jobs) == 1:
            job = jobs[0]
            watch = job.progress.busy_alone == 0.0
            return Plan((Allotment(job.client, rate=job.rank.share_limit, watch=watch),), why=f"{job.name} is alone")
        if gpu.exclusive or gpu.memory_short or len(jobs) > MOST:
            return self._crowded(gpu, jobs, now_ns)
        return self._packed(gpu, jobs, now_ns)

    def _packed(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """All but those that wait for their turn, or for the end of a measurement."""
        first = [job for job in jobs if job.rank.job_class is _INTERACTIVE]
        solo = self._packing.solo(now_ns)
        alone = next((job for job in jobs if solo is not None and job.client == solo[0]), None)
        if alone is not None and solo is not None and not first:
            others = tuple(job.client for job in jobs if job is not alone)
            why = f"{alone.name} runs alone for at most {SOLO_NS // 1_000_000} ms, to be measured"
            return Plan((Allotment(alone.client, rate=alone.rank.share_limit, watch=True),), others, solo[1], why)
        batch = [job for job in jobs if job.rank.job_class not in (_INTERACTIVE, _BEST_EFFORT)]
        spare = [job for job in jobs if job.rank.job_class is _BEST_EFFORT]
        takers = [job for job in batch if is_saturating(job)]
        light = [*first, *(job for job in batch if not is_saturating(job))]
        verdict = Verdict(False)
        if len(takers) > 1:
            gained = gpu.quantum_ns / (gpu.quantum_ns + gpu.switch_cost_ns)
            verdict = self._packing.judge(takers, [*light, *spare], gained)
        order: tuple[int, ...] = ()
        quanta: dict[int, int] = {}
        members = [*light, *takers]
        if verdict.turns:
            active, waiting = split(takers)
            running = going_on(active, gpu.quantum_ns, now_ns)
            following = self._turns.following(waiting, running or next(iter(active), None))
            taker = running or (following[0] if following else active[0])
            order = tuple(job.client for job in following if job is not taker)
            quanta[taker.client] = gpu.quantum_ns
            members = [*light, taker]
        why = verdict.why(takers, gpu.quantum_ns) if len(takers) > 1 else _why_together(jobs)
        return replace(allot(members, spare, quanta, self._harvest, now_ns), order=order, why=why)

    def _crowded(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Turns, the most important first; members that do not fit are left out by the engine."""
        quantum_ns = gpu.quantum_ns
        active, waiting = split(jobs)
        here = [job for job in active if job.state is _COMING or now_ns < job.turn.began_ns + quantum_ns]
        back = [job for job in waiting if job.rank.job_class and not _waits_its_turn(job, now_ns)]
        urgent = [job for job in (*here, *back) if job.rank.job_class is _INTERACTIVE]
        small: list[JobView] = []
        if gpu.memory_short and not gpu.exclusive:
            free = gpu.capacity_bytes // 4
            for job in (*active, *waiting[: 4 * MOST]):
                needs = job.memory.allocated_bytes
                if needs * SMALL <= gpu.capacity_bytes and needs <= free and not is_saturating(job):
                    free -= needs
                    small.append(job)
        turning = [job for job in here if job.rank.job_class is not _BEST_EFFORT]
        later = {job.client for job in back}
        queue = [job for job in waiting if job.client not in later] if later else waiting
        following = self._turns.following(queue, next(iter(turning or active), None))
        spare = [job for job in (*here, *back) if job.rank.job_class is _BEST_EFFORT]
        ahead = [*urgent, *turning, *following][: max(1, len(urgent))]  # small jobs run in what these leave
        named = {job.client: job for job in (*ahead, *small[: MOST // 2], *turning, *following, *active, *spare)}
        members = list(named.values())[: 1 if gpu.exclusive else MOST]
        kept = {job.client for job in small} - {job.client for job in ahead}
        quanta = {job.client: quantum_ns for job in members if job.client not in kept}
        order = tuple(job.client for job in following if job not in members)
        what = "memory is short" if gpu.memory_short else "one job at a time" if gpu.exclusive else "many programs wait"
        patient = [job for job in back if job.rank.job_class is _BEST_EFFORT and job.turn.waiting_since_ns is not None]
        again_ns = min([(job.turn.waiting_since_ns or 0) + PATIENCE_NS + 1 for job in patient], default=None)
        why = f"{what}: {len(jobs)} programs take turns of {quantum_ns / 1e6:g} ms, now {members[0].name}"
        plan = allot(members, [], quanta, self._harvest, now_ns)
        due_ns = [at_ns for at_ns in (plan.ask_again_ns, again_ns) if at_ns is not None]
        return replace(plan, order=order, ask_again_ns=min(due_ns, default=None), why=why)


def _waits_its_turn(job: JobView, now_ns: int) -> bool:
    """An interactive job whose turn has just ended, or a best-effort job that has waited long."""
    since_ns = job.turn.waiting_since_ns or now_ns
    if job.rank.job_class is _INTERACTIVE:
        return since_ns == job.turn.last_released_ns
    return now_ns - since_ns > PATIENCE_NS


def _why_together(jobs: Sequence[JobView]) -> str:
    if not all(job.progress.busy_alone for job in jobs):
        return f"{len(jobs)} programs run side by side, as without a coordinator: not all have been measured alone"
    busy = ", ".join(f"{job.name} {job.progress.busy_alone:.2f}" for job in jobs[:4])
    return f"{len(jobs)} programs run side by side: fewer than two keep the GPU busy alone (busy shares: {busy})"
