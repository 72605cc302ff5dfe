"""`opportunistic` on a model of a card."""

from __future__ import annotations

import pytest

from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.opportunistic import Opportunistic
from tests.policies.card import Card
from tests.policies.virtual_gpu import SECOND


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
