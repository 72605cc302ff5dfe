"""`auto` on a model of a card: it ends in the better arrangement, measures little, and looks again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvshare.scheduler_policies.api import JobClass, Memory, State, TurnEnded
from nvshare.scheduler_policies.auto import Auto
from tests.policies.card import Card
from tests.policies.virtual_gpu import GPU, MS, SECOND, VirtualGpu

GEMM, SMALL, DECODER, TRAINING, CNN, INFER = (1.0, 0), (0.55, 14), (0.5, 14), (0.99, 14), (0.8, 5), (0.02, 0)


def settled(*programs: tuple[float, float], **gpu: Any) -> tuple[Card, list[float]]:
    """A card after 10 s, and the progress of each program over the next 20."""
    world = Card(Auto(), replace(GPU, **gpu))
    for busy, refill_ms in programs:
        world.program(busy, refill_ms, drain_ns=MS // 5)
    world.until(10 * SECOND)
    return world, list(world.rates(20 * SECOND).values())


@pytest.mark.parametrize("count", [2, 3])
def test_saturating_programs_take_turns(count: int) -> None:
    """Broken: two saturating products lose 5 % to the card's own slicing."""
    world, progress = settled(*[GEMM] * count)
    assert sum(progress) >= 0.99
    assert min(progress) >= 0.97 / count
    assert "take turns of 100 ms" in world.plan.why


@pytest.mark.parametrize(
    ("programs", "least"),
    [
        ([SMALL, SMALL], 1.7),
        ([CNN, CNN], 1.18),
        ([DECODER, TRAINING], 1.49),
        ([TRAINING, TRAINING], 0.955),  # in turns of 100 ms: 0.86
        ([GEMM, SMALL, SMALL], 1.45),
    ],
)
def test_programs_that_leave_the_gpu_idle_run_side_by_side(programs: list[tuple[float, float]], least: float) -> None:
    """Broken: programs that are bound by launching are better off without a coordinator."""
    world, progress = settled(*programs)
    assert sum(progress) >= least
    assert len(world.plan.running) == len(programs)


def test_saturating_programs_take_turns_beside_a_server() -> None:
    """Broken: a small server waits for the turns of two saturating jobs, or they lose 5 % for its sake."""
    world, progress = settled(GEMM, GEMM, INFER)
    assert progress[2] >= 0.99
    assert sum(progress[:2]) >= 0.97
    assert len(world.plan.running) == 2


def test_drains_do_not_change_the_arrangement() -> None:
    """Broken: a job that drains is not seen, so those that are left run side by side until it is seen again: four jobs
    interrupt one another with every drain."""
    world = Card(Auto())
    for _ in range(4):
        world.program(*GEMM, drain_ns=MS)
    world.play(10_000)
    first, second, *rest = world.views()
    few = (first, second)
    together = world.policy.decide(GPU, few, world.now_ns)
    assert len(together.running) == 2, "the two have not been measured without the others"
    drained = world.policy.decide(replace(GPU, draining=tuple(rest)), few, world.now_ns)
    assert len(drained.running) == 1


def test_turns_never_leave_a_program_with_less() -> None:
    """Broken: two saturating jobs that take turns beside a launch-bound one have less than side by side with it."""
    world, progress = settled(GEMM, GEMM, SMALL)
    assert min(progress) >= 0.31
    assert len(world.plan.running) == 3


def test_turns_are_decided_within_two_seconds() -> None:
    """Broken: short jobs are over before it is known how to share."""
    world = Card(Auto())
    world.program(*GEMM, drain_ns=MS), world.program(*GEMM, drain_ns=MS)
    world.play(1700)
    assert 0 < world.alone_ns <= 500 * MS
    assert not any(world.policy._packing.probes.wants(client) for client in (1, 2))  # type: ignore[attr-defined]
    world.play(300)
    assert len(world.plan.running) == 1
    assert sum(world.rates(2 * SECOND).values()) >= 0.98


def test_a_stream_of_newcomers_does_not_stop_the_others() -> None:
    """Broken: a loop of short programs has each of them run alone, and a long job has half of the time."""
    world = Card(Auto())
    world.program(*CNN, drain_ns=MS // 5)
    for _ in range(60):
        short = world.program(*CNN, drain_ns=MS // 5)
        world.play(1000)
        world.leave(short)
    assert world.alone_ns <= 60 * SECOND * 0.1 + 1.5 * SECOND


def test_programs_in_one_another_s_way_run_as_a_group() -> None:
    """Broken: two programs that wait for each of their results get little beside a saturating one, which could have
    the GPU to itself for its part of the time."""
    world = Card(Auto())
    world.program(*GEMM, drain_ns=MS // 5)
    for _ in range(2):
        light = world.program(0.45, 5, drain_ns=MS // 5)
        world.stalls[light.client] = 0.1
    world.until(10 * SECOND)
    heavy, *lights = world.rates(30 * SECOND).values()
    assert heavy >= 0.3
    assert min(lights) >= 0.55, "side by side each of them has 0.22"
    assert "take turns" in world.plan.why
    world.stalls.clear()
    world.until(300 * SECOND)
    assert sum(world.rates(30 * SECOND).values()) >= 1.6


def test_measuring_alone_costs_less_than_a_hundredth() -> None:
    """Broken: looking costs more than it gains."""
    world = Card(Auto())
    for busy in (0.9, 0.8, 0.6):
        world.program(busy, drain_ns=MS // 5)
    world.until(5 * SECOND)
    start_ns = world.alone_ns
    world.until(305 * SECOND)
    assert 0 < world.alone_ns - start_ns <= 3 * SECOND


def test_a_new_phase_is_seen() -> None:
    """Broken: a program that has become bound by its data keeps its turns, in which the GPU idles."""
    world = Card(Auto())
    world.program(*GEMM), world.program(*GEMM)
    world.until(30 * SECOND)
    assert len(world.plan.running) == 1
    world.busy |= {1: 0.5, 2: 0.5}
    world.until(60 * SECOND)
    assert sum(world.rates(10 * SECOND).values()) >= 1.95
    world.busy |= {1: 1.0, 2: 1.0}
    world.until(220 * SECOND)
    assert sum(world.rates(10 * SECOND).values()) >= 0.98


def test_a_program_is_not_judged_by_its_start_up() -> None:
    """Broken: a program that was alone while it warmed up counts as one that leaves the GPU idle, for two minutes."""
    world = Card(Auto())
    world.program(0.6)
    world.play(400)
    world.busy[1] = 1.0
    world.program(*GEMM)
    world.play(5_000)
    assert sum(world.rates(10 * SECOND).values()) >= 0.98
    assert "take turns" in world.plan.why


def test_a_program_that_starts_up_beside_another_is_not_looked_at() -> None:
    """Broken: the look falls into its start-up, and it counts as one that leaves the GPU idle."""
    world = Card(Auto())
    world.program(*GEMM), world.program(0.1)
    world.play(800)
    assert world.alone_ns == 0
    world.busy[2] = 1.0
    world.play(3_000)
    assert "take turns" in world.plan.why


def test_a_program_that_paused_is_looked_at_again() -> None:
    """Broken: a notebook that was idle during looks shares for two minutes as the card would once it computes."""
    world = Card(Auto())
    world.program(*GEMM, drain_ns=MS)
    notebook = world.program(*GEMM, drain_ns=MS)
    for _ in range(30):
        world.play(60)
        world.idle(notebook)
        world.play(2_000)
        world.want(notebook)
    world.play(5_000)
    assert "take turns" in world.plan.why


@pytest.mark.parametrize(("busy", "switch_ms"), [(1.0, 0), (1.0, 8), (0.45, 0)])
def test_nobody_starves_beside_long_kernels(busy: float, switch_ms: int) -> None:
    """Broken: under MPS a program gets a hundredth of the GPU beside long kernels, since turns would gain nothing, or
    would leave the other one a little less than half."""
    world = Card(Auto(), replace(GPU, switch_cost_ns=switch_ms * MS))
    world.program(*GEMM, drain_ns=MS // 5)
    starved = world.program(busy, 5, drain_ns=MS // 5)
    world.stalls[starved.client] = 0.02
    world.play(10_000)
    assert min(world.rates(20 * SECOND).values()) >= 0.45
    assert "take turns" in world.plan.why
    assert "(too little of it for job 2)" in world.plan.why


def test_a_drain_is_no_loss() -> None:
    """Broken: two saturating jobs with long queues stay side by side for the sake of drains in which the GPU works."""
    world = Card(Auto(), replace(GPU, quantum_ns=60 * MS, switch_cost_ns=MS // 4))
    world.program(*GEMM, drain_ns=3 * MS), world.program(*GEMM, drain_ns=3 * MS)
    world.play(10_000)
    assert "take turns" in world.plan.why


def test_turns_are_tried_where_a_short_look_said_too_little() -> None:
    """Broken: two saturating jobs stay side by side for ever, since a short look saw no more of each than they have."""
    world = Card(Auto())
    world.hasty |= {1: 0.945, 2: 0.945}
    world.program(*GEMM, drain_ns=MS // 5), world.program(*GEMM, drain_ns=MS // 5)
    world.play(10_000)
    assert sum(world.rates(10 * SECOND).values()) >= 0.98


def test_a_program_that_seems_faster_than_alone_proves_nothing() -> None:
    """Broken: a look at a program that happened to be idle makes the other one seem to starve, and both take turns in
    which the GPU idles."""
    world = Card(Auto())
    world.hasty |= {1: 1.55, 2: 0.5}
    world.program(0.99, drain_ns=MS // 5), world.program(0.5, drain_ns=MS // 5)
    world.play(2_500)
    assert len(world.plan.running) == 2
    assert "take turns" not in world.plan.why


def test_unmeasured_programs_share_as_the_card_would() -> None:
    """Broken: a program whose progress cannot be seen is stopped to be measured, or loses its part."""
    world = Card(Auto())
    world.silent |= {1, 2}
    world.program(*GEMM), world.program(*GEMM)
    world.until(20 * SECOND)
    assert len(world.plan.running) == 2
    assert world.alone_ns == 0


def test_an_interactive_job_is_there_at_once() -> None:
    """Broken: a server waits for a turn or a measurement, or short queues cost the others and shorten no slice."""
    world = Card(Auto())
    world.program(*GEMM), world.program(*GEMM)
    world.until(20 * SECOND)
    server = world.program(*INFER, job_class=JobClass.INTERACTIVE)
    world.play(0)
    assert world.plan.running[0].client == server.client
    assert server.max_wait_ns == 0
    assert [one.pacing_ns for one in world.plan.running] == [None, None, None]


def test_batch_jobs_are_measured_beside_an_active_interactive_job() -> None:
    """Broken: beside a server two saturating jobs never take turns, or the server is stopped to measure them."""
    world = Card(Auto())
    server = world.program(*INFER, job_class=JobClass.INTERACTIVE)
    world.play(500)
    world.program(*GEMM, drain_ns=MS), world.program(*GEMM, drain_ns=MS)
    world.play(3000)
    served, *batch = world.rates(10 * SECOND).values()
    assert served >= 0.99
    assert sum(batch) >= 0.96
    assert server.leases == 1
    assert [one.pacing_ns for one in world.plan.running] == [None, MS], "in turns others shrink"


def test_batch_jobs_are_measured_while_an_interactive_job_rests() -> None:
    """Broken: a notebook that is used now and then keeps two saturating jobs side by side, or waits for a look."""
    world = Card(Auto())
    notebook = world.program(0.3, job_class=JobClass.INTERACTIVE, wanted=False)
    world.program(*GEMM), world.program(*GEMM)
    for _ in range(20):
        world.play(330)
        world.want(notebook)
        world.play(110)
        world.idle(notebook)
    assert notebook.max_wait_ns == 0
    assert sum(progress for client, progress in world.rates(SECOND).items() if client > 1) >= 0.98
    assert "take turns" in world.plan.why


def test_a_member_of_a_gang_is_not_measured_alone() -> None:
    """Broken: a program that waits for its other GPUs counts as one that leaves this GPU idle, or keeps others from
    taking turns."""
    world = Card(Auto())
    rank = world.program(0.6)
    rank.view = replace(rank.view, gang="ranks")
    world.program(0.6)
    world.until(5 * SECOND)
    assert world.alone_ns == 0
    assert "gang ranks" in world.plan.why
    world.program(*GEMM), world.program(*GEMM)
    world.play(10_000)
    assert rank.leases <= 4, "a probe of each of the others, but none of itself"
    probed = [client for client in world.jobs if not world.policy._packing.probes.wants(client)]  # type: ignore[attr-defined]
    assert probed == [2, 3, 4]


def test_best_effort_work_leaves_the_others_their_progress() -> None:
    """Broken: work that should be free costs a batch job more than 1 %, or nothing is left to it."""
    world = Card(Auto())
    world.program(0.8)
    spare = world.program(*GEMM, job_class=JobClass.BEST_EFFORT)
    world.until(30 * SECOND)
    batch, harvest = world.rates(60 * SECOND).values()
    assert batch >= 0.985
    assert harvest >= 0.8 * 0.2
    for job in list(world.jobs.values()):
        if job is not spare:
            world.leave(job)
    assert world.plan.running[0].rate == 1.0


def test_noise_is_no_loss() -> None:
    """Broken: a program's irregular reports count as losses, and the best-effort job's rate falls to nothing."""
    world = Card(Auto())
    batch = world.program(0.5)
    world.noise[batch.client] = 0.15
    world.program(*GEMM, job_class=JobClass.BEST_EFFORT)
    world.until(60 * SECOND)
    kept, harvest = world.rates(60 * SECOND).values()
    assert kept >= 0.95
    assert harvest >= 0.8 * 0.5


def test_what_a_start_up_reported_is_measured_again() -> None:
    """Broken: rates from a program's start-up count as its rate alone, and no loss beside others shows."""
    world = Card(Auto())
    batch = world.program(0.6)
    world.noise[batch.client] = 0.6
    world.until(SECOND // 2)
    world.noise.clear()
    world.program(*GEMM, job_class=JobClass.BEST_EFFORT)
    world.until(10 * SECOND)
    kept, _ = world.rates(15 * SECOND).values()
    assert kept >= 0.985


def test_where_memory_is_short_the_heavy_ones_take_turns() -> None:
    """Broken: heavy programs wait for each other's memory, or a small server is evicted for each of their turns."""
    world = Card(Auto(), replace(GPU, memory_short=True))
    heavy = [world.program(*GEMM) for _ in range(3)]
    small = world.program(*INFER)
    for job in heavy:
        world.has(job=job, memory=Memory(60))
    world.has(job=small, memory=Memory(5))
    world.ask()
    world.until(6 * SECOND)
    assert small.leases == 1
    assert max(job.leases for job in heavy) - min(job.leases for job in heavy) <= 1
    assert min(world.used_ns(job) for job in heavy) >= 1.8 * SECOND


def test_best_effort_work_that_waited_long_has_a_whole_turn() -> None:
    """Broken: while its memory comes it is named last again, does not fit beside small programs, and waits for ever."""
    world = VirtualGpu(Auto(), replace(GPU, memory_short=True))
    for _ in range(3):
        world.has(job=world.job(), memory=Memory(8))
    spare = world.job(job_class=JobClass.BEST_EFFORT)
    world.has(job=spare, memory=Memory(84))
    world.ask()
    world.play(100)

    def first(state: State, waited_s: int, now_s: int) -> int:
        granted_ns = now_s * SECOND if state is State.RUNNING else None
        waiting_ns = None if granted_ns else (now_s - waited_s) * SECOND
        turn = replace(spare.view.turn, waiting_since_ns=waiting_ns, granted_at_ns=granted_ns, began_ns=granted_ns or 0)
        views = [view for view in world.views() if view.client != spare.client]
        jobs = (*views, replace(spare.view, state=state, turn=turn))
        return world.policy.decide(world.gpu, jobs, now_s * SECOND).running[0].client

    assert first(State.COMING, 5, 31) != spare.client
    assert first(State.COMING, 31, 31) == spare.client
    assert first(State.RUNNING, 31, 31) == spare.client


def test_an_interactive_owner_has_half_of_the_turns() -> None:
    """Broken: a program that says that it is interactive, and is idle for a moment at the end of each turn, has 98 % of
    the time where programs take turns."""
    world = VirtualGpu(Auto(), replace(GPU, exclusive=True))
    claims = world.job(owner="a", job_class=JobClass.INTERACTIVE)
    others = [world.job(owner=owner) for owner in ("b", "c")]
    for _ in range(60_000 // 10):
        world.play(10)
        if world.holder() is claims and world.now_ns - claims.view.turn.began_ns >= 90 * MS:
            world.idle(claims)
            world.play(1)
            world.want(claims)
    assert min(world.used_ns(other) for other in others) >= 0.15 * world.now_ns


@pytest.mark.parametrize("quiet_s", [60, 0])
def test_time_that_no_other_job_wanted_is_no_debt(quiet_s: int) -> None:
    """Broken: a notebook that kept an idle lease for a minute while nobody waited waits for its turn."""
    world = VirtualGpu(Auto(), replace(GPU, exclusive=True))
    notebook = world.job(job_class=JobClass.INTERACTIVE, wanted=False)
    used = replace(notebook.view, turn=replace(notebook.view.turn, used_ns=60 * SECOND))
    world.play(60_000)
    world.tell(TurnEnded(used, world.now_ns, quiet_ns=quiet_s * SECOND))
    other = world.job()
    world.play(10)
    world.want(notebook)
    world.play(10)
    assert world.holder() is (notebook if quiet_s else other)


def shared(*programs: tuple[float, dict[str, Any]], drain_ms: int = 1, after_s: int = 2) -> tuple[Card, list[float]]:
    """Progress over 20 s of programs with shares."""
    world = Card(Auto())
    world.duty_cycles = True
    for busy, rank in programs:
        world.program(busy, drain_ns=drain_ms * MS, **rank)
    world.until(after_s * SECOND)
    return world, list(world.rates(20 * SECOND).values())


@pytest.mark.parametrize("drain_ms", [1, 13])
@pytest.mark.parametrize("limits", [(0.3, 0.7), (0.2, 0.3, 0.5), (0.3, 0.4), (0.3, 1.0)])
def test_limits_of_saturating_programs_are_exact(limits: tuple[float, ...], drain_ms: int) -> None:
    """Broken: gates that open for 30 and 70 % of the time are open together, and closed together, a fifth of the time:
    the programs get 20 and 60 %, also where a queue of graphs drains for long."""
    progress = shared(*((1.0, {"share_limit": limit}) for limit in limits), drain_ms=drain_ms)[1]
    for got, limit in zip(progress, limits, strict=True):
        assert got == pytest.approx(limit if limit < 1.0 else 0.7, abs=0.02)
    assert sum(progress) >= min(1.0, sum(limits)) - 0.03


def test_a_lone_limited_program_keeps_its_limit() -> None:
    """Broken: a program that is alone gets the whole GPU, or pays for that once another one comes."""
    world, (alone,) = shared((1.0, {"share_limit": 0.3}))
    assert alone == pytest.approx(0.3, abs=0.01)
    world.program(*GEMM, drain_ns=MS, share_limit=0.7)
    progress = list(world.rates(5 * SECOND).values())
    assert progress == [pytest.approx(0.3, abs=0.02), pytest.approx(0.7, abs=0.03)]


@pytest.mark.parametrize("job_class", [JobClass.BATCH, JobClass.INTERACTIVE])
def test_light_programs_run_beside_the_turns_of_limited_ones(job_class: JobClass) -> None:
    """Broken: a server waits for turns because two jobs have limits, or they lose their shares by it."""
    _, progress = shared(
        (1.0, {"share_limit": 0.3}), (1.0, {"share_limit": 0.7}), (0.02, {"job_class": job_class}), after_s=10
    )
    *limited, light = progress
    assert light >= 0.99
    assert limited == [pytest.approx(0.3, abs=0.02), pytest.approx(0.7, abs=0.03)]


def test_a_guarantee_holds_beside_a_limit() -> None:
    """Broken: a guarantee means nothing where programs run side by side."""
    _, (limited, sure, rest) = shared((1.0, {"share_limit": 0.3}), (1.0, {"share_request": 0.6}), (1.0, {}))
    assert limited <= 0.31
    assert sure >= 0.59
    assert limited + sure + rest >= 0.97


def test_best_effort_work_runs_in_slices_beside_a_server() -> None:
    """Broken: a rate takes three quarters of a best-effort job, and shortens no request of a server by it."""
    world = Card(Auto())
    server = world.program(*INFER, job_class=JobClass.INTERACTIVE)
    world.noise[server.client] = 0.2
    world.play(1_000)
    world.program(*GEMM, job_class=JobClass.BEST_EFFORT)
    served, spare = world.rates(10 * SECOND).values()
    assert served >= 0.99
    assert spare >= 0.95
    assert "`nvshare-coordinator --mps` prevents this" in world.plan.why
    for job in world.jobs.values():
        job.view = replace(job.view, spatial=True)
    world.ask()
    assert "--mps" not in world.plan.why


def test_best_effort_work_leaves_a_busy_notebook_its_progress() -> None:
    """Broken: a notebook that computes for minutes shares the GPU in halves with spare work."""
    world = Card(Auto())
    notebook = world.program(0.9, job_class=JobClass.INTERACTIVE)
    world.play(1_000)
    assert notebook.view.progress.busy_alone == 0.9
    world.program(*GEMM, job_class=JobClass.BEST_EFFORT)
    world.until(30 * SECOND)
    assert next(iter(world.rates(10 * SECOND).values())) >= 0.985
