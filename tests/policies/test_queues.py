"""Least attained service, and deadlines."""

from __future__ import annotations

from nvshare.scheduler_policies.edf import Edf
from nvshare.scheduler_policies.least_attained import FIRST_NS, LeastAttained
from nvshare.scheduler_policies.parts.levels import PATIENCE_NS
from tests.policies.virtual_gpu import MS, SECOND, VirtualGpu


def test_a_short_job_ends_before_a_long_one_goes_on() -> None:
    """Broken: a short job waits for its turns behind jobs that have had hours."""
    world = VirtualGpu(LeastAttained())
    long = world.job()
    world.until(2 * FIRST_NS)
    world.job(drain_ns=MS)
    short = world.job()
    world.play(FIRST_NS * 2 // MS)
    assert world.used_ns(short) >= FIRST_NS - SECOND
    assert world.used_ns(long) <= 2 * FIRST_NS + SECOND


def test_jobs_of_one_queue_take_turns() -> None:
    """Broken: of two new jobs one would wait until the other has its service."""
    world = VirtualGpu(LeastAttained())
    world.job(), world.job()
    world.play(950)
    assert world.turns == [1, 2] * 5


def test_a_newcomer_preempts_a_job_of_a_higher_queue() -> None:
    """Broken: a new job waits for a turn of a long one."""
    world = VirtualGpu(LeastAttained())
    for _ in range(2):
        world.job()
    world.until(2 * FIRST_NS + 2 * SECOND)
    world.play(30)
    new = world.job()
    world.play(0)
    assert world.holder() is new


def test_a_starved_job_has_its_whole_turn() -> None:
    """Broken: a long job never ends while short ones keep coming."""
    world = VirtualGpu(LeastAttained())
    old = world.job()
    world.until(3 * FIRST_NS)
    for _ in range(100):
        new = world.job()
        world.play(1_000)
        world.leave(new)
        world.job(), world.job()
    assert world.used_ns(old) >= 3 * FIRST_NS + 100 * MS
    assert PATIENCE_NS <= old.max_wait_ns <= PATIENCE_NS + 205 * 100 * MS


def test_a_program_that_connects_again_has_what_it_had() -> None:
    """Broken: a program stays in the first queue by new connections, and the other one has a fiftieth of the time."""
    world = VirtualGpu(LeastAttained())
    steady, other = world.job(owner="a"), world.job(owner="b")
    for _ in range(200):
        world.play(2_000)
        if world.used_ns(other) > 9 * SECOND:
            world.leave(other)
            other = world.job(owner="b")
    assert 0.45 <= world.used_ns(steady) / world.now_ns <= 0.55


def test_the_earliest_deadline_preempts() -> None:
    """Broken: a job misses its deadline because an easier one had its turn."""
    world = VirtualGpu(Edf())
    world.job()
    world.play(1)
    later = world.job(deadline_ns=9 * SECOND)
    world.play(10)
    assert world.holder() is later
    sooner = world.job(deadline_ns=5 * SECOND)
    world.play(2_000)
    assert world.holder() is sooner
    world.leave(sooner)
    world.play(0)
    assert world.holder() is later


def test_jobs_without_a_deadline_and_late_jobs_take_turns() -> None:
    """Broken: a deadline that has passed keeps the GPU from everybody."""
    world = VirtualGpu(Edf())
    world.job(deadline_ns=SECOND), world.job(), world.job()
    world.play(4_000)
    used = [world.used_ns(job) for job in world.jobs.values()]
    assert used[0] >= SECOND
    assert abs(used[1] - used[2]) <= 100 * MS
    assert used[1] >= 800 * MS


def test_new_deadlines_leave_other_owners_their_time() -> None:
    """Broken: an owner whose programs name a deadline each minute has all turns but one a minute."""
    world = VirtualGpu(Edf())
    without = world.job(owner="a")
    for _ in range(10):
        job = world.job(owner="b", deadline_ns=world.now_ns + 61 * SECOND)
        world.play(60_000)
        world.leave(job)
    assert world.used_ns(without) / world.now_ns >= 0.4
