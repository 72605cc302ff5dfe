"""Names of policies: built in, from other packages, unknown, broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.scheduler_policies import registry

ROOT = Path(__file__).resolve().parents[2]

THIRD_PARTY = """
from nvshare.scheduler_policies.api import Allotment, Plan, PolicyBase

class LastFirst(PolicyBase):
    def decide(self, gpu, jobs, now_ns):
        return Plan((Allotment(jobs[-1].client, 7_000_000),))
"""

PROGRAM = """
import json, sys
from nvshare.scheduler_policies import registry
from nvshare.scheduler_policies.api import GpuView, JobView, State, Turn

report = {"offers": {o.name: o.origin for o in registry.offers().values()}}
jobs = [JobView(number, "", State.WAITING, Turn(number, 0, 0)) for number in range(3)]
plan = registry.create("last_first", "GPU-0").decide(GpuView("GPU-0", 1, 1), jobs, 0)
report["named"] = [(one.client, one.quantum_ns) for one in plan.running]
for name in ("broken", "no_class", "not_a_policy", "missing"):
    try:
        registry.create(name, "GPU-0")
    except (registry.UnknownPolicyError, registry.BrokenPolicyError) as error:
        report[name] = [type(error).__name__, str(error)]
report["round_robin"] = type(registry.create("round_robin", "GPU-0")).__module__
json.dump(report, sys.stdout)
"""


def package(site: Path) -> None:
    """A distribution of another project, as pip would lay it out, with good and bad policies."""
    (site / "other_policies.py").write_text(THIRD_PARTY)
    (site / "other_broken.py").write_text("import a_package_that_nobody_has\n")
    info = site / "other_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[nvshare.policies]\n"
        "last_first = other_policies:LastFirst\n"
        "round_robin = other_policies:LastFirst\n"
        "broken = other_broken:Anything\n"
        "no_class = other_policies:Nothing\n"
        "not_a_policy = other_policies:Plan\n"
    )


def test_a_policy_of_another_package_schedules(tmp_path: Path) -> None:
    """Broken: third parties could not add policies, or a bad one would take the good ones with it."""
    package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["offers"]["last_first"] == "other-policies"
    assert report["named"] == [[2, 7_000_000]]
    assert report["broken"][0] == "BrokenPolicyError"
    assert "a_package_that_nobody_has" in report["broken"][1]
    assert "other-policies" in report["broken"][1]
    assert report["no_class"][0] == "BrokenPolicyError"
    assert report["not_a_policy"][0] == "BrokenPolicyError"
    assert report["missing"][0] == "UnknownPolicyError"
    assert report["round_robin"] == "nvshare.scheduler_policies.round_robin", "built-in names cannot be taken"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """Broken: a typing mistake would leave the user guessing."""
    with pytest.raises(registry.UnknownPolicyError, match=r"roundrobin.*known:.*priority.*round_robin"):
        registry.create("roundrobin", "GPU-0")
