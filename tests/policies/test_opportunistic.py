"""`opportunistic` on a model of a card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvshare.scheduler_policies.api import JobClass, Memory
from nvshare.scheduler_policies.opportunistic import Opportunistic
from tests.policies.card import Card
from tests.policies.virtual_gpu import GPU, SECOND, VirtualGpu


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_production_keeps_its_progress_and_the_rest_is_used(busy: float) -> None:
    """Broken: the other job costs production more than 1 %, or gets less than 80 % of what is left."""
    world = Card(Opportunistic())
    world.program(busy, priority=5)
    world.program(1.0)
    world.until(60 * SECOND)
    production, other = world.rates(60 * SECOND).values()
    assert production >= 0.985
    assert other >= 0.8 * (1.0 - busy)


@pytest.mark.parametrize("busy", [0.05, 0.5])
def test_noise_is_no_loss(busy: float) -> None:
    """Broken: a server's irregular reports count as losses, and the other job's rate falls to nothing."""
    world = Card(Opportunistic())
    production = world.program(busy, priority=5)
    world.program(1.0)
    world.noise[production.client] = 0.15
    world.until(60 * SECOND)
    kept, other = world.rates(60 * SECOND).values()
    assert kept >= 0.95
    assert other >= 0.8 * (1.0 - busy)


def test_what_a_start_up_reported_is_measured_again() -> None:
    """Broken: rates from a program's start-up count as its rate alone, and no loss beside others shows."""
    world = Card(Opportunistic())
    production = world.program(0.6, priority=5)
    world.noise[production.client] = 0.6
    world.until(SECOND // 2)
    world.noise.clear()
    world.program(1.0)
    world.until(10 * SECOND)
    kept, _ = world.rates(15 * SECOND).values()
    assert kept >= 0.985


def test_the_others_have_the_gpu_while_production_is_idle() -> None:
    """Broken: the GPU idles for jobs that want nothing."""
    world = Card(Opportunistic())
    production = world.program(1.0)
    spare = world.program(1.0, job_class=JobClass.BEST_EFFORT)
    world.until(5 * SECOND)
    world.leave(production)
    assert world.plan.running[0].client == spare.client
    assert world.plan.running[0].rate == 1.0


def test_a_job_that_does_not_fit_beside_production_has_turns() -> None:
    """Broken: it starves, so the engine replaces the policy."""
    world = VirtualGpu(Opportunistic(), replace(GPU, memory_short=True))
    production = world.job(wanted=False)
    spare = world.job(job_class=JobClass.BEST_EFFORT, wanted=False)
    for job in (production, spare):
        world.has(job=job, memory=Memory(60, 60))
    world.want(production)
    world.want(spare)
    world.play(200_000)
    assert spare.leases >= 3
    assert spare.max_wait_ns <= 61 * SECOND
    assert world.used_ns(production) >= 0.99 * world.now_ns
