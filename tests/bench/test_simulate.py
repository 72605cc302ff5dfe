"""The simulator: its card, its traces and its figures by hand, worlds with all checks, and what papers report.

Non-goals: figures of a card, speed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.simulate.day import FAST_GIB_S, day
from nvshare.bench.simulate.figures import figures, jain, jct_s
from nvshare.bench.simulate.jobs import GIB, fitted, scaled, synthetic
from nvshare.bench.simulate.traces import read_trace
from nvshare.bench.virtual_node.card import shares
from nvshare.bench.virtual_node.node import Job, VirtualNode
from nvshare.coordinator.model.settings import SECOND_NS, Settings
from nvshare.scheduler_policies.api import JobClass
from nvshare.scheduler_policies.registry import BUILT_IN
from tests.daemon.processes import ROOT, environment

PHILLY = """[
 {"status": "Pass", "vc": "vc1", "jobid": "app_1", "user": "ann", "submitted_time": "2017-10-07 01:00:00", "attempts": [
  {"start_time": "2017-10-07 01:00:10", "end_time": "2017-10-07 01:01:10", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]},
  {"start_time": "2017-10-07 01:02:00", "end_time": "2017-10-07 01:02:30",
   "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]}]},
 {"status": "Killed", "vc": "vc1", "jobid": "app_2", "user": "bob", "submitted_time": "2017-10-07 02:00:00",
  "attempts": []},
 {"status": "Failed", "vc": "vc1", "jobid": "app_3", "user": "bob", "submitted_time": "2017-10-07 02:00:00",
  "attempts": [{"start_time": "2017-10-07 02:00:01", "end_time": null, "detail": []}]}
]"""
PAI = """j1,tensorflow,1.0,Terminated,100.0,160.0,600.0,29.3,50.0,MISC
j2,worker,2.0,Terminated,130.0,190.0,600.0,29.3,100.0,T4
j2,ps,1.0,Terminated,130.0,190.0,600.0,29.3,,
j3,worker,1.0,Running,140.0,,600.0,29.3,100.0,T4
"""
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-1,4000,15258,1,220,,BE,Succeeded,1000,1600,1010
pod-2,8000,32768,2,1000,,LS,Succeeded,1200,1500,1200
pod-3,8000,32768,0,0,,LS,Succeeded,1200,1500,1200
pod-4,8000,32768,1,1000,,Burstable,Pending,1300,1500,
"""


@pytest.mark.parametrize("policy", ["auto", "round_robin"])
def test_leases_are_not_taken_back_at_once(policy: str) -> None:
    """Broken: two rules of the core or of a policy undo each other's decision, and programs interrupt one another with
    every drain, although each wait ends."""
    jobs = fitted(synthetic(80, 2, 1.2, 0.9, 2), 2, 80 * GIB)
    world = VirtualNode(jobs, 2, 80 * GIB, Settings(policy=policy, quantum_ns=5 * SECOND_NS))
    world.run()
    found = figures(world)
    assert found["interrupted"] <= found["handovers"] // 50


def small_mix() -> list[Job]:
    """Two GPUs of 80 GiB with more memory than fits, a gang, a notebook, best-effort work and a deadline."""
    return [
        Job("big", 0, 40 * SECOND_NS, 1.0, 50 * GIB, user=1),
        Job("gang", SECOND_NS, 20 * SECOND_NS, 1.0, 20 * GIB, gpus=2, user=2, priority=5),
        Job("light", 2 * SECOND_NS, 20 * SECOND_NS, 0.3, 2 * GIB, user=1),
        Job("large", 3 * SECOND_NS, 30 * SECOND_NS, 1.0, 60 * GIB, user=3, deadline_ns=90 * SECOND_NS),
        Job("spare", 4 * SECOND_NS, 20 * SECOND_NS, 1.0, 40 * GIB, user=3, job_class=JobClass.BEST_EFFORT),
        Job(
            "notebook", 5 * SECOND_NS, 9 * SECOND_NS, 0.5, 30 * GIB, user=4, job_class=JobClass.INTERACTIVE,
            burst_ns=2 * SECOND_NS, think_ns=5 * SECOND_NS,
        ),
    ]  # fmt: skip


def world(policy: str, jobs: list[Job], gpus: int = 1, quantum_ns: int | None = SECOND_NS) -> VirtualNode:
    """A finished run in which the core has checked all invariants after each event."""
    settings = Settings(policy=policy, quantum_ns=quantum_ns, check_invariants=True)
    made = VirtualNode(jobs, gpus, 80 * GIB, settings)
    made.run()
    return made


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        ([], []),
        ([1.0], [1.0]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([1.0, 1.0], [0.475, 0.475]),
        ([1.0, 0.1, 1.0], [0.425, 0.1, 0.425]),
        ([1.0, 0.2], [0.8, 0.2]),
    ],
)
def test_a_card_divides_its_time(wanted: list[float], got: list[float]) -> None:
    """Broken: light programs would slow each other, or saturating ones would share without a cost."""
    assert shares(wanted) == pytest.approx(got)


def test_a_mix_has_the_load_that_was_asked_for() -> None:
    """Broken: policies would be compared at another load, or a seed would not repeat its mix."""
    jobs = synthetic(200, 4, 2.0, 0.7, 7)
    assert jobs == synthetic(200, 4, 2.0, 0.7, 7) != synthetic(200, 4, 2.0, 0.7, 8)
    busy_ns = sum(job.work_ns * job.busy * job.gpus for job in jobs)
    assert busy_ns / (4 * 7200 * SECOND_NS) == pytest.approx(0.7, rel=0.05)
    half = scaled(jobs, 0.35 * 4 * 7200)
    assert sum(job.work_ns for job in half) == pytest.approx(sum(job.work_ns for job in jobs) / 2, rel=0.05)


def test_jobs_fit_the_node() -> None:
    """Broken: a job larger than a card would never be granted, and the run would not end."""
    (job,) = fitted([Job("large", 10, SECOND_NS, memory_bytes=100 * GIB, gpus=16)], 8, 80 * GIB)
    assert (job.arrives_ns, job.gpus, job.memory_bytes) == (0, 8, 80 * GIB)


def test_philly(tmp_path: Path) -> None:
    """Broken: attempts, GPUs or users of the public format would be read wrongly."""
    path = tmp_path / "cluster_job_log"
    path.write_text(PHILLY, encoding="utf-8")
    (job,) = read_trace(path, 1)
    assert (job.name, job.work_ns, job.gpus, job.user) == ("app_1", 90 * SECOND_NS, 2, 0)
    assert 0.5 <= job.busy <= 1.0
    assert [job] == read_trace(path, 1)


@pytest.mark.parametrize(
    "head", ["", "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"]
)
def test_pai(head: str, tmp_path: Path) -> None:
    """Broken: parts of GPUs, instances, or tasks without a GPU or an end would be read wrongly."""
    path = tmp_path / "pai_task_table.csv"
    path.write_text(head + PAI, encoding="utf-8")
    half, whole = read_trace(path, 1)
    assert (half.name, half.work_ns, half.gpus, half.busy, half.memory_bytes) == (
        "j1/tensorflow", 60 * SECOND_NS, 1, 0.5, 40 * GIB,
    )  # fmt: skip
    assert (whole.gpus, whole.arrives_ns - half.arrives_ns) == (2, 30 * SECOND_NS)


def test_openb(tmp_path: Path) -> None:
    """Broken: shares, classes or waits of the public format would be read wrongly."""
    path = tmp_path / "openb_pod_list.csv"
    path.write_text(OPENB, encoding="utf-8")
    shared, whole = read_trace(path, 1)
    assert (shared.busy, shared.gpus, shared.job_class, shared.work_ns) == (
        0.22, 1, JobClass.BEST_EFFORT, 590 * SECOND_NS,
    )  # fmt: skip
    assert (whole.gpus, whole.job_class) == (2, JobClass.INTERACTIVE)


@pytest.mark.parametrize("text", ["[1]", '{"jobid": 1}', "[", "a,b,c\n1,2,3\n", "gpu_milli\n1\n"])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    """Broken: a wrong file would end in a traceback, or in a mix of nonsense."""
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"."):
        read_trace(path, 1)


def test_one_job_alone_takes_its_time() -> None:
    """Broken: the model or the core would slow a job that nobody disturbs."""
    (task,) = world("auto", [Job("one", 5 * SECOND_NS, 100 * SECOND_NS, 0.8)]).tasks
    assert jct_s(task) == pytest.approx(100.0, abs=0.05)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_every_policy_ends_a_mix_of_everything(policy: str) -> None:
    """Broken: a policy, the core or the model would lose work, or breach an invariant."""
    made = world(policy, small_mix(), gpus=2, quantum_ns=None if policy == "auto" else SECOND_NS)
    assert all(jct_s(task) >= task.job.alone_ns / 1e9 - 0.001 for task in made.tasks)
    assert figures(made)["moved_gib"] > 0


def test_figures_by_hand() -> None:
    """Broken: fairness would be computed from something else."""
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5
    found = figures(world("round_robin", [Job("a", 0, 50 * SECOND_NS, user=1), Job("b", 0, 50 * SECOND_NS, user=2)]))
    assert found["rho"]["most"] == pytest.approx(1.0, abs=0.05)
    assert found["jain_users"] == pytest.approx(1.0, abs=0.01)
    assert found["makespan_s"] == pytest.approx(100.0, abs=2.0)
    assert found["utilisation"] == pytest.approx(1.0, abs=0.02)
    assert found["by_class"].keys() == {"batch"}


@pytest.mark.parametrize(
    ("seconds", "speeds", "ttft_s", "training"),
    [(120, (FAST_GIB_S,), 0.5, 0.9), (300, (15.0, 16.0, 17.0, 18.0), 2.0, 0.75)],
)
def test_who_is_waited_for_goes_first_and_the_training_goes_on(
    seconds: int, speeds: tuple[float, ...], ttft_s: float, training: float
) -> None:
    """Broken: a request waits for seconds where memory is short, or a training computes for half of the time that the
    others leave it.  On a slow link its part of a single day is off by some percent by chance."""
    days = [day("auto", seconds=seconds, gib_s=speed) for speed in speeds]
    assert max(found["ttft_s"]["p99"] for found in days) <= ttft_s
    assert statistics.mean(found["training_of_left"] for found in days) >= training
    assert not any(found["replaced"] for found in days)


def command(*words: str) -> Any:
    """Output of the command with these options."""
    done = subprocess.run(
        [sys.executable, "-m", "nvshare.bench.simulate", "--json", *words],
        capture_output=True, text=True, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_command_runs_a_trace(tmp_path: Path) -> None:
    """Broken: jobs of a public trace could be read, but not run."""
    path = tmp_path / "trace"
    path.write_text(OPENB, encoding="utf-8")
    found = command("--trace", str(path), "--policies", "round_robin", "--gpus", "2")
    assert (found["trace"], found["jobs"]) == ("trace", 2)
    assert found["policies"]["round_robin"]["makespan_s"] > 0


def test_the_command_gives_its_figures() -> None:
    """Broken: the JSON would have other keys, or would share its stream with progress."""
    found = command("--policies", "auto,edf", "--gpus", "2", "--jobs", "12", "--hours", "0.1")
    assert found["simulated"]
    assert list(found["policies"]) == ["auto", "edf"]
    keys = {"jct_s", "makespan_s", "rho", "jain_users", "utilisation", "moved_gib", "handovers", "by_class"}
    assert keys <= found["policies"]["auto"].keys()
