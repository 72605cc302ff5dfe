"""Programs run side by side or in turns, whichever gives more: the default policy.

Source: introspection and packing of Gandiva (Xiao et al., OSDI 2018); control of best-effort work as in TGS and AntMan.
Rule: everybody who wants the GPU runs, as on the card without a coordinator, until measurements say that turns are
better (parts/packing.py).  Probes measure programs alone (parts/solo_probes.py).
- An interactive job is named first.  In turns, others have little unfinished work while it is active.
- Best-effort jobs have the rate of parts/harvest.py beside others.  Beside interactive jobs that want at most half of
  the GPU they run as in the card's own slices: a rate would shorten no slice.
- Where memory is short, or more than `MOST` jobs want the GPU, jobs take turns; interactive and small ones stay.  An
  interactive job waits for its turn while its owner's interactive jobs have had half of the GPU's time, as far as
  others waited.
- Batch jobs that may want more than their shares take turns as under `fair_share`.  Another limit is a rate.  A request
  of more than an equal part caps the rates of the others.
Bound: none.  Turns rotate as in parts/turns.py, and turns that leave a program with too little are undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import (
    Allotment,
    GpuView,
    Happened,
    JobClass,
    JobView,
    Measured,
    Plan,
    PolicyBase,
    TurnEnded,
)
from nvshare.scheduler_policies.fair_share import FairShare
from nvshare.scheduler_policies.parts.group_turns import next_turn, turn_of
from nvshare.scheduler_policies.parts.harvest import Harvest
from nvshare.scheduler_policies.parts.members import MOST, active_until_ns, allot, has_its_part, is_active
from nvshare.scheduler_policies.parts.packing import (
    SATURATING,
    Packing,
    Verdict,
    has_shares,
    may_want_more,
    takers_by_share,
    why_together,
)
from nvshare.scheduler_policies.parts.service import OwnerService
from nvshare.scheduler_policies.parts.solo_probes import LONGEST_NS
from nvshare.scheduler_policies.parts.turns import AHEAD, OwnerTurns, has_waited, is_over, split

SMALL: Final = 8
"""A job with at most capacity / 8 may stay where memory is short, for 1 / 4 of the capacity in all."""
HALF_NS: Final = 10_000_000_000
"""From rest an owner's interactive jobs go before others for this time."""
PATIENCE_NS: Final = 30_000_000_000
"""A best-effort job gets a turn after this time, if jobs take turns."""
_INTERACTIVE: Final = JobClass.INTERACTIVE
_BEST_EFFORT: Final = JobClass.BEST_EFFORT


class Auto(PolicyBase):
    """Keeps measurements and turns."""

    reads_progress = True

    def __init__(self) -> None:
        self._turns = OwnerTurns()
        self._packing = Packing()
        self._harvest = Harvest()
        self._urgent = OwnerService(HALF_NS)
        self._shares = FairShare()

    def observe(self, happened: Happened) -> None:
        """Notes turns and reports."""
        self._turns.observe(happened)
        self._packing.observe(happened)
        urgent = isinstance(happened, TurnEnded) and happened.job.rank.job_class is _INTERACTIVE
        self._urgent.observe(happened, counts=urgent, quiet_is_free=True)
        if not isinstance(happened, Measured) or not has_its_part(happened.job):
            self._harvest.observe(happened, lambda job: job.rank.job_class is _BEST_EFFORT)
        if not isinstance(happened, TurnEnded) or may_want_more(happened.job) or has_shares(happened.job):
            self._shares.observe(happened)

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Alone, in turns of memory, or in the running set that gives most."""
        is_crowded = gpu.exclusive or gpu.memory_short or len(jobs) > MOST
        takers = [] if is_crowded else takers_by_share(gpu, jobs)
        if len(jobs) == 1 and not takers:
            job, limit = jobs[0], jobs[0].rank.share_limit
            # At a rate it would seem to leave the GPU idle.
            watch = limit == 1.0 and self._packing.probes.wants(job.client)
            return Plan((Allotment(job.client, rate=limit, watch=watch),), why=f"{job.name} is alone")
        if is_crowded:
            return self._crowded(gpu, jobs, now_ns)
        return self._packed(gpu, jobs, takers, now_ns)

    def _packed(self, gpu: GpuView, jobs: Sequence[JobView], takers: Sequence[JobView], now_ns: int) -> Plan:
        """All but those that wait for their turn, or for the end of a probe of one of them."""
        first, probe = [job for job in jobs if job.rank.job_class is _INTERACTIVE], self._packing.probes.window(now_ns)
        seen = next((job for job in jobs if probe is not None and job.client == probe[0]), None)
        if probe is not None and seen is not None:
            urgent = [job for job in first if job is not seen and is_active(job, now_ns)]
            return self._probe(gpu, urgent, seen, jobs, probe[1], now_ns)
        spare = [job for job in jobs if job.rank.job_class is _BEST_EFFORT]
        others = [job for job in jobs if job.rank.job_class is not _BEST_EFFORT and active_until_ns(job) > now_ns]
        if all(has_its_part(job) for job in others):
            spare = []
        shared = self._shares.decide(gpu, takers, now_ns) if takers else Plan()
        verdict = Verdict() if takers else self._packing.arrange(gpu, jobs, now_ns)
        turn = turn_of(shared, takers) if takers else next_turn(verdict.groups, self._turns, gpu.quantum_ns, now_ns)
        out = turn.waiting.union(job.client for job in (*first, *spare))
        members = [*first, *(job for job in jobs if job.client not in out)]
        plan = allot(members, spare, turn.quanta, self._harvest, now_ns)
        if verdict.groups:
            plan = self._watched(plan)
        if takers:
            running = (replace(one, rate=1.0) if one.client in turn.quanta else one for one in plan.running)
            due_ns = [at_ns for at_ns in (plan.ask_again_ns, shared.ask_again_ns) if at_ns is not None]
            return Plan(tuple(running), turn.order, min(due_ns, default=None), shared.why)
        why = verdict.why(gpu.quantum_ns) if verdict.considered else why_together(jobs)
        return replace(plan, order=turn.order, why=why)

    def _probe(
        self, gpu: GpuView, urgent: list[JobView], seen: JobView, jobs: Sequence[JobView], end_ns: int, now_ns: int
    ) -> Plan:
        """One program without other batch programs, and without a limit; alone, its busy share is measured."""
        plan = allot([*urgent, seen], [], {}, self._harvest, now_ns)
        plan = replace(plan, running=(*plan.running[:-1], replace(plan.running[-1], rate=1.0, watch=not urgent)))
        others = tuple(job.client for job in jobs if job is not seen and job not in urgent)[:AHEAD]
        beside = f" beside {urgent[0].name}" if urgent else " alone"
        why = f"{seen.name} runs{beside} for at most {LONGEST_NS // 1_000_000} ms, to be measured"
        return replace(plan, order=others, ask_again_ns=min(end_ns, plan.ask_again_ns or end_ns), why=why)

    def _watched(self, plan: Plan) -> Plan:
        """The busy share of a program that runs alone is measured if that is wanted."""
        if len(plan.running) > 1:
            return plan
        one = plan.running[0]
        return replace(plan, running=(replace(one, watch=self._packing.probes.wants(one.client)),))

    def _crowded(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """Turns, the most important first; members that do not fit are left out by the engine."""
        quantum_ns = gpu.quantum_ns
        active, waiting = split(jobs)
        here = [job for job in active if not is_over(job, quantum_ns, now_ns)]
        back = [job for job in waiting if job.rank.job_class and not self._waits_its_turn(job, now_ns)]
        urgent = [job for job in (*here, *back) if job.rank.job_class is _INTERACTIVE]
        small: list[JobView] = []
        if gpu.memory_short and not gpu.exclusive:
            free = gpu.capacity_bytes // 4
            for job in (*active, *waiting[: 4 * MOST]):
                needs, is_heavy = job.memory.allocated_bytes, job.gang or job.progress.busy_alone >= SATURATING
                if needs * SMALL <= gpu.capacity_bytes and needs <= free and not is_heavy:
                    free -= needs
                    small.append(job)
        turning = [
            job for job in here if job.rank.job_class is not _BEST_EFFORT or has_waited(job, PATIENCE_NS, now_ns)
        ]
        later = {job.client for job in back}
        following = self._turns.following(waiting, next(iter((*turning, *active, *gpu.draining)), None), later)
        spare = [job for job in (*here, *back) if job.rank.job_class is _BEST_EFFORT]
        ahead = [*urgent, *turning, *following][: max(1, len(urgent))]  # small jobs run in what these leave
        named = {job.client: job for job in (*ahead, *small[: MOST // 2], *turning, *following, *active, *spare)}
        members = list(named.values())[: 1 if gpu.exclusive else MOST]
        kept = {job.client for job in small} - {job.client for job in ahead}
        quanta = {job.client: quantum_ns for job in members if job.client not in kept}
        running = {job.client for job in members}
        order = tuple(job.client for job in following if job.client not in running)
        what = "memory is short" if gpu.memory_short else "one at a time" if gpu.exclusive else "many programs wait"
        patient = [job for job in back if job.rank.job_class is _BEST_EFFORT and job.turn.waiting_since_ns is not None]
        again_ns = min([(job.turn.waiting_since_ns or 0) + PATIENCE_NS + 1 for job in patient], default=None)
        why = f"{what}: {len(jobs)} programs take turns of {quantum_ns / 1e6:.0f} ms, now {members[0].name}"
        plan = allot(members, [], quanta, self._harvest, now_ns)
        due_ns = [at_ns for at_ns in (plan.ask_again_ns, again_ns) if at_ns is not None]
        reports = bool(urgent)  # whether such a job is active decides how others are paced
        return replace(plan, order=order, ask_again_ns=min(due_ns, default=None), reports=reports, why=why)

    def _waits_its_turn(self, job: JobView, now_ns: int) -> bool:
        """An interactive job that has used much or just ended a turn, or a best-effort job that has waited long."""
        if job.rank.job_class is not _INTERACTIVE:
            return has_waited(job, PATIENCE_NS, now_ns)
        just_ended = (job.turn.waiting_since_ns or now_ns) == job.turn.last_released_ns
        return just_ended or self._urgent.is_ahead(job, now_ns)
