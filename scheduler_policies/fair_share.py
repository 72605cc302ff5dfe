"""GPU time in proportion to weights, with guarantees and hard limits: between owners first, then between programs.

Source: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), hierarchical, with turns as packets whose length is
known afterwards; weights as in stride scheduling (Waldspurger, Weihl, MIT 1995); request and limit as in KubeShare
(Yeh, Chen, Chou, HPDC 2020) and GaiaGPU (Gu et al., ISPA 2018).
Rule: exclusive turns.  The owner with the least time by its weight is next, with its program with the least time by its
weight (parts/fair_queue.py).  Before it comes a job that has had less than its `share_request`; others that wait
keep 1 / `REST` of the time.  A job never gets more than its `share_limit`, alone too (parts/buckets.py).
Bound: w + (u - 1) (1 + R (DEBT + 3/2 + w)) quanta with w = (p - 1) (1 + r (DEBT + 3/2)), p programs of each of u
owners, r and R the ratios of their weights, without requests and limits.  (A waiting tag is at most DEBT + 1/2 turns
ahead; until virtual time reaches it, each other job gets the same virtual time, and one turn already begun.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nvshare.scheduler_policies.api import GpuView, Happened, JobLeft, JobView, Plan, PolicyBase, State, TurnEnded
from nvshare.scheduler_policies.parts.buckets import Buckets
from nvshare.scheduler_policies.parts.fair_queue import FairQueue
from nvshare.scheduler_policies.parts.turns import one_turn, split

SHORT_NS: Final = 100_000_000
"""Longest turn while somebody has a request or limit."""
SHORTEST_NS: Final = 1_000_000
"""A small limit means longer pauses, not shorter turns."""
REST: Final = 20
"""Jobs without a request keep 1 / `REST` of the time, whatever the requests sum up to."""
_COMING: Final = State.COMING


class _Limits(Buckets):
    def _share(self, job: JobView) -> float:
        return max(0.001, job.rank.share_limit)


class _Requests(Buckets):
    def _share(self, job: JobView) -> float:
        return job.rank.share_request


class FairShare(PolicyBase):
    """Keeps what each job has had."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._limits = _Limits()
        self._requests = _Requests()
        self._with_shares: set[int] = set()
        self._rest_due_ns = 0

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The job whose turn goes on, else the next one, among those that are below their limits."""
        active, waiting = split(jobs)
        shares = [job for job in jobs if (rank := job.rank).share_request or rank.share_limit < 1.0]
        quantum_ns = min(gpu.quantum_ns, SHORT_NS) if shares and not gpu.memory_short else gpu.quantum_ns
        limited = {job.client: job for job in shares if job.rank.share_limit < 1.0}
        turns_ns = {
            client: min(quantum_ns, max(SHORTEST_NS, self._limits.turn_ns(job, now_ns)))
            for client, job in limited.items()
        }
        goes_on = [job for job in active if job.state is _COMING] or [
            job for job in active if now_ns < job.turn.began_ns + turns_ns.get(job.client, quantum_ns)
        ]
        barred = {client for client, job in limited.items() if not self._limits.may_begin(job, now_ns)}
        allowed = [job for job in waiting if job.client not in barred] if barred else waiting
        ended = [job for job in active if job.client not in barred]
        running = next(iter(goes_on), None)
        following = self._queue.following([*allowed, *(() if goes_on else ended)], quantum_ns, now_ns, running)
        if not goes_on and not following:
            ready_ns = min(self._limits.ready_at_ns(limited[client], now_ns) for client in barred)
            return Plan(ask_again_ns=ready_ns, why="every program that wants the GPU has reached its limit")
        owed = [job for job in shares if job.rank.share_request and job.client not in barred]
        owed = [job for job in owed if self._requests.may_begin(job, now_ns)]
        rest = [job for job in following if not job.rank.share_request] if owed and now_ns >= self._rest_due_ns else []
        job = (goes_on or rest or owed or following)[0]
        plan = one_turn(job, turns_ns.get(job.client, quantum_ns), following, len(waiting))
        if job.client not in limited:
            return plan
        began_ns = now_ns if job.state is not State.RUNNING or not goes_on else job.turn.began_ns
        return replace(plan, ask_again_ns=max(now_ns, began_ns + turns_ns[job.client]) + 1)

    def observe(self, happened: Happened) -> None:
        """Charges a lease, or forgets a client."""
        self._queue.observe(happened)
        self._limits.observe(happened)
        self._requests.observe(happened)
        client = happened.client if isinstance(happened, JobLeft) else happened.job.client
        rank = None if isinstance(happened, JobLeft) else happened.job.rank
        if isinstance(happened, TurnEnded) and not happened.job.rank.share_request:
            self._rest_due_ns = happened.now_ns + (REST - 1) * (happened.now_ns - happened.job.turn.began_ns)
        if rank is not None and (rank.share_limit < 1.0 or rank.share_request):
            self._with_shares.add(client)
        else:
            self._with_shares.discard(client)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int | None:
        """The module docstring's bound for the weights so far; None while a client has had no turn, or has shares."""
        if self._with_shares:
            return None
        bound = self._queue.wait_bound(clients)
        return None if bound is None else bound[0] * max(gpu.quantum_ns, bound[1]) // 2
