"""A card that several programs share, for policies that measure: progress follows a small model of time slicing.

GPU time is divided as on the card of the virtual node.  A program that is bound by launching does nothing for
`refill_ms` of each lease.  Reports come every 100 ms and with each release, as the hook sends them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from nvshare.bench.virtual_node.card import shares
from nvshare.scheduler_policies.api import Measured, Policy
from nvshare.scheduler_policies.parts.packing import SATURATING
from tests.policies.virtual_gpu import GPU, MS, SECOND, Job, VirtualGpu

REPORT_NS = 100 * MS


class Card(VirtualGpu):
    """Programs have a busy share, and report."""

    hides_drains = True
    duty_cycles = False
    """A rate is the part of the time in which a program's gate is open, whatever the gates of others: as in the hook.
    Else it caps what the program gets."""

    def __init__(self, policy: Policy, gpu: Any = GPU) -> None:
        super().__init__(policy, gpu)
        self.busy: dict[int, float] = {}
        self.refill_ns: dict[int, int] = {}
        self.stalls: dict[int, float] = {}
        """Largest share of a program that waits for each of its results, beside a saturating one."""
        self.silent: set[int] = set()
        """Programs whose progress cannot be measured."""
        self.noise: dict[int, float] = {}
        """Relative standard deviation of a program's reports, as of a server or of a loop of long steps."""
        self.hasty: dict[int, float] = {}
        """What early solo windows say of a program's rate, over the truth."""
        self._chance = random.Random(1)
        self.work: dict[int, float] = {}
        self.alone_ns = 0
        """Time in which one program ran although others wanted to: solo windows and turns."""
        self._setting: frozenset[int] = frozenset()
        self._set_ns = 0
        self._reported: dict[int, tuple[int, float]] = {}

    def program(self, busy: float, refill_ms: float = 0.0, **job: Any) -> Job:
        """A program that always has work."""
        self.busy[self._clients + 1], self.refill_ns[self._clients + 1] = busy, int(refill_ms * MS)
        self.work[self._clients + 1] = 0.0
        return self.job(**job)

    def rates(self, span_ns: int) -> dict[int, float]:
        """Normalised progress of each over the next time."""
        before = dict(self.work)
        self.until(self.now_ns + span_ns)
        return {
            client: (work - before.get(client, 0.0)) / (span_ns / 1e9) / self.busy[client]
            for client, work in self.work.items()
        }

    def _speeds(self) -> dict[int, float]:
        rated = [job for job in self.running() if job.rate < 1.0]
        if not self.duty_cycles or not rated:
            return self._divided({job.client: job.rate for job in self.running()})
        sums = dict.fromkeys(self.busy, 0.0)
        for opened in product((0.0, 1.0), repeat=len(rated)):
            gates = dict(zip((job.client for job in rated), opened, strict=True))
            chance = prod(job.rate if gates[job.client] else 1.0 - job.rate for job in rated)
            for client, speed in self._divided(
                {job.client: gates.get(job.client, 1.0) for job in self.running()}
            ).items():
                sums[client] += chance * speed
        return sums

    def _divided(self, most: dict[int, float]) -> dict[int, float]:
        wants = {
            job.client: min(self.busy[job.client], most[job.client])
            for job in self.running()
            if job.wanted and self.now_ns >= (job.view.turn.granted_at_ns or 0) + self.refill_ns[job.client]
        }
        saturating = {client for client, want in wants.items() if want >= SATURATING}
        for client in wants.keys() & self.stalls:
            if saturating - {client}:
                wants[client] = min(wants[client], self.stalls[client])
        return dict(zip(wants, shares(list(wants.values())), strict=True))

    def _pass(self, to_ns: int) -> None:
        self._note_setting()
        for client, speed in self._speeds().items():
            self.work[client] += speed * (to_ns - self.now_ns) / 1e9
        if len(self.running()) == 1 and len(self.views()) > 1:
            self.alone_ns += to_ns - self.now_ns
        super()._pass(to_ns)
        for job in self.running():
            if job.client not in self.silent and self.now_ns >= self._reported[job.client][0] + REPORT_NS:
                self._report(job)

    def _note_setting(self) -> None:
        setting = frozenset(job.client for job in self.running())
        if setting != self._setting:
            self._setting, self._set_ns = setting, self.now_ns
            self._reported = {client: (self.now_ns, self.work[client]) for client in setting}

    def _report(self, job: Job) -> None:
        at_ns, work = self._reported[job.client]
        if self.now_ns == at_ns:
            return
        rate = (self.work[job.client] - work) / ((self.now_ns - at_ns) / 1e9)
        rate *= max(0.0, self._chance.gauss(1.0, self.noise.get(job.client, 0.0)))
        self._reported[job.client] = (self.now_ns, self.work[job.client])
        old, for_ns = job.view.progress, self.now_ns - self._set_ns
        new = replace(old, rate=rate, measured_at_ns=self.now_ns, measured_for_ns=for_ns)
        if len(self._setting) == 1 and for_ns >= 90 * MS:
            watched = any(one.watch for one in self.plan.running)
            busy = min(self.busy[job.client], job.rate)
            alone = busy * (self.hasty.get(job.client, 1.0) if self.now_ns < 3 * SECOND else 1.0)
            seen = busy if watched else old.busy_alone
            new = replace(new, alone_rate=alone, alone_at_ns=self.now_ns, busy_alone=seen)
        self.has(job=job, progress=new)
        self.tell(Measured(job.view, tuple(self._setting), self.now_ns, self.now_ns - at_ns))

    def _release(self, job: Job) -> None:
        if job.client in self._reported and job.client not in self.silent:
            self._report(job)
        super()._release(job)

    def _next_ns(self) -> int | None:
        self._note_setting()
        times = [time for time in [super()._next_ns()] if time is not None]
        for job in self.running():
            if job.client not in self.silent:
                times.append(self._reported[job.client][0] + REPORT_NS)
            fills_ns = (job.view.turn.granted_at_ns or 0) + self.refill_ns[job.client]
            if fills_ns > self.now_ns:
                times.append(fills_ns)
        return min(times, default=None)
