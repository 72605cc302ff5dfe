"""Jobs of real slurmctld and slurmd share simulated GPUs through the scripts of docs/how-to/slurm.

Slurm runs without munge, accounting and cgroups (auth/none, proctrack/linuxproc), with /dev/zero and /dev/full as its
two GPUs.  Debian: `apt-get install slurmctld slurmd slurm-client`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.system.users import user_name
from nvshare.simulated_gpu.environment import simulated_environment
from tests.chart.processes.pod import free_ports
from tests.conftest import ROOT, Built
from tests.end_to_end.conftest import Node, new_node
from tests.waiting import eventually

SCRIPTS = ROOT / "docs" / "how-to" / "slurm"
NOBODY, DAEMON = 65534, 1
GIB = 1 << 30


def missing() -> str:
    """Why these tests cannot run here, or ""."""
    found = [program for program in ("slurmctld", "slurmd", "sbatch", "scontrol") if shutil.which(program) is None]
    if found:
        return f"{', '.join(found)} missing: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "only root runs slurmd"


def others_may_read() -> bool:
    """Whether another user can run this Python and checkout; else all jobs are root's."""
    command = [sys.executable, "-c", "import nvshare"]
    try:
        done = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], env={"PYTHONPATH": str(ROOT)}, cwd="/", check=False
        )  # fmt: skip
    except PermissionError:
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@dataclass
class Slurm:
    """One node with its controller."""

    node: Node
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.node.directory

    @property
    def slots(self) -> Path:
        return self.folder / "slots"

    def write(self) -> None:
        """The documented files, with places and device files of this test."""
        host = socket.gethostname().partition(".")[0]
        controller, daemon = free_ports(2)
        theirs = (SCRIPTS / "slurm.conf").read_text().replace("/etc/slurm/nvshare", str(self.folder))
        theirs = re.sub(r"NodeName=gpu1 CPUs=\d+", f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}", theirs)
        (self.folder / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectTypeParameters=CR_Core
{theirs}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 MaxTime=INFINITE State=UP
""")
        gres = (SCRIPTS / "gres.conf").read_text().replace("/dev/nvidia0", "/dev/zero").replace("nvidia1", "full")
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\n{gres}")
        here = f"PATH={Path(sys.executable).parent}:/usr/local/bin"
        settings = f"export NVSHARE_SLOTS_DIR={self.slots} PYTHONPATH={ROOT}"
        for name in ("prolog", "task-prolog", "epilog"):
            text = (SCRIPTS / name).read_text().replace("PATH=/usr/local/bin", here)
            text = text.replace("/run/nvshare/slots", str(self.slots)).replace("HARD_MEMORY= ", "HARD_MEMORY=yes ")
            runtime = "" if name == "task-prolog" else f"; export NVSHARE_RUNTIME_DIR={self.folder}"
            (self.folder / name).write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\n{settings}{runtime}\n", 1))
            (self.folder / name).chmod(0o755)

    def start(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "spool").mkdir(mode=0o755)
        for name in ("slurmctld", "slurmd"):
            with (self.folder / f"{name}.log").open("wb") as log:
                command = [name, "-D", "-f", str(self.folder / "slurm.conf")]
                self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment()))
        eventually(lambda: self.ask("sinfo", "-h", "-o", "%T") == "idle", f"an idle node\n{self.logs()}")

    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": os.environ["PATH"]}

    def ask(self, *words: str, user: int = 0) -> str:
        """Output of one Slurm command as a user; "" where it fails."""
        done = subprocess.run(
            words, user=user, group=user, extra_groups=[], env=self.environment(), cwd="/", capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        return done.stdout.strip() if done.returncode == 0 else ""

    def submit(self, shards: str, command: str, user: int = 0, *options: str, **variables: str) -> str:
        """The id of a job that runs a command on the simulated GPUs."""
        simulated = simulated_environment(self.node.state, self.node.simulate, {})
        exports = "".join(f"export {name}='{value}'\n" for name, value in (simulated | variables).items())
        script = self.folder / f"job{len(list(self.folder.glob('job*')))}.sh"
        script.write_text(f"#!/bin/sh\n{exports}exec {command}\n")
        script.chmod(0o755)
        words = ("sbatch", "--parsable", f"--gres={shards}", "-o", "/dev/null", "-D", "/", *options, str(script))
        return eventually(lambda: self.ask(*words, user=user), f"a submitted job\n{self.logs()}")

    def clients(self) -> dict[str, dict[str, Any]]:
        """By the job's slot."""
        return {client["group"]: client for client in self.node.control("clients")["clients"] if client["seats"]}

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("slurm*.log"))

    def stop(self) -> None:
        for job in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", job)
        eventually(lambda: not self.ask("squeue", "-h", "-o", "%i"), "jobs that have ended")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()


@pytest.fixture
def slurm(built: Built) -> Iterator[Slurm]:
    """A coordinator with slots, and Slurm on the same node."""
    with new_node("2x8GiB") as node:
        node.directory.chmod(0o755)
        made = Slurm(node)
        node.start_coordinator("--slots-dir", str(made.slots))
        node.state.chmod(0o666)  # a card is open to all users
        made.write()
        try:
            made.start()
            yield made
        finally:
            made.stop()


def busy(saturate: Path) -> str:
    """The command of a job that keeps its GPU busy until it is killed."""
    saturate.parent.chmod(0o755)
    return f"{saturate} 3600 1000000 8"


def test_jobs_share_a_gpu_by_their_shards(slurm: Slurm, saturate: Path) -> None:
    """Broken: jobs with shards run outside of nvshare, nameless, or without their share; a killed one leaves a slot."""
    shutil.copy(saturate, slurm.folder / "saturate")
    work = busy(slurm.folder / "saturate")
    users = (NOBODY, DAEMON) if others_may_read() else (0, 0)
    first = slurm.submit("shard:2", work, users[0], NVSHARE_SHARE_REQUEST="0.9", NVSHARE_MEMORY_LIMIT="7GiB")
    second = slurm.submit("shard:1", work, users[1], NVSHARE_SHARE_LIMIT="0.5")
    names = {f"slurm-{first}", f"slurm-{second}"}
    eventually(lambda: slurm.clients().keys() == names, f"both jobs as clients\n{slurm.logs()}")
    found = slurm.clients()
    one, other = found[f"slurm-{first}"], found[f"slurm-{second}"]
    assert (one["user_id"], other["user_id"]) == users
    assert (one["share_request"], other["share_request"]) == (0.25, 0.125), "the environment raises nothing"
    assert other["share_limit"] == 0.5, "the environment may lower it"
    (seat,), (beside,) = one["seats"], other["seats"]
    assert seat["uuid"] == beside["uuid"], "Slurm packs shards on one GPU"
    gpus = {gpu["uuid"]: gpu for gpu in slurm.node.control("status")["gpus"]}
    assert seat["limit_bytes"] == gpus[seat["uuid"]]["capacity_bytes"] // 4
    shown = subprocess.run(
        [sys.executable, "-m", "nvshare.coordinator.cli.ctl", "clients"],
        env=slurm.node.environment(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.search(rf"saturate +{user_name(users[0])} .* slurm-{first}$", shown, re.MULTILINE), shown
    slurm.ask("scancel", first)
    eventually(lambda: slurm.clients().keys() == {f"slurm-{second}"}, "the killed job's client is gone")
    eventually(lambda: [place.name for place in slurm.slots.iterdir()] == [f"slurm-{second}"], "its slot is gone")

    def work_done() -> float:
        return float(slurm.clients()[f"slurm-{second}"]["seats"][0]["progress_work"])

    before = work_done()
    eventually(lambda: work_done() > before, "the other job runs")


def test_each_task_of_an_array_has_its_own_shards(slurm: Slurm) -> None:
    """Broken: an array drains the node, or a job's name or comment is read as its request."""
    lure = "x\n1 gres:shard:8\nTresPerNode=gres:shard:8"
    slurm.submit("shard:1", "sleep 3600", 0, "--array=1-3", f"--job-name={lure}", f"--comment={lure}")

    def shares() -> list[float]:
        return [slot["share_request"] for slot in slurm.node.control("slots")["slots"]]

    eventually(lambda: len(shares()) == 3, f"a slot for each task\n{slurm.logs()}")
    assert shares() == [0.125] * 3
    lone = slurm.submit("gpu:1", "sleep 3600", 0, f"--job-name={lure}", f"--comment={lure}")
    eventually(lambda: slurm.ask("squeue", "-h", "-t", "R", "-o", "%A", "-j", lone) == lone, "a job with a whole GPU")
    assert "drain" not in slurm.ask("sinfo", "-h", "-o", "%T")
    assert shares() == [0.125] * 3


def test_jobs_without_shards_are_left_alone(slurm: Slurm) -> None:
    """Broken: a job with a whole GPU, or with none, pays for sharing or fails."""
    said = slurm.folder / "said"
    said.mkdir()
    said.chmod(0o777)
    slurm.submit("gpu:1", f"sh -c 'env > {said}/whole'")
    whole = eventually(lambda: (said / "whole").read_text() if (said / "whole").exists() else "", "the job's variables")
    assert "CUDA_VISIBLE_DEVICES=" in whole
    assert "NVSHARE_SOCKET" not in whole
    assert not list(slurm.slots.iterdir())
