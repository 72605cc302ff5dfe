"""`--simulate`: the coordinator finds the simulated GPUs through NVML's double, as it would find real ones."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.conftest import Built
from tests.daemon.processes import BOUND_S, Coordinators, Running, environment


def simulated(base: Path, *words: str, built: Built) -> Running:
    ready, report = os.pipe()
    log = base / "simulated.log"
    command = [sys.executable, "-m", "nvshare.coordinator.daemon.main", *words, "--runtime-dir", str(base / "run")]
    env = environment(NVSHARE_SIM_LIBRARY_DIR=str(built.sim_dir))
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(report)], pass_fds=(report,), stdout=output, stderr=output, text=True, env=env
        )
    os.close(report)
    readable, _, _ = select.select([ready], [], [], BOUND_S)
    came_up = bool(readable) and os.read(ready, 1) != b""
    os.close(ready)
    assert came_up, log.read_text()
    return Running(process, RuntimeDir(base / "run"), log)


@pytest.mark.parametrize(
    ("flag", "gpus", "total_bytes"), [("--simulate", 1, 16 << 30), ("--simulate=2x8GiB", 2, 8 << 30)]
)
def test_simulated_cards_are_served(
    coordinators: Coordinators, built: Built, flag: str, gpus: int, total_bytes: int
) -> None:
    """Broken if the coordinator did not see the cards that programs of the same directory see."""
    running = simulated(coordinators.base, flag, built=built)
    coordinators.started.append(running)
    status = running.status()
    assert status["simulated"]
    assert [gpu["total_bytes"] for gpu in status["gpus"]] == [total_bytes] * gpus
    assert len({gpu["uuid"] for gpu in status["gpus"]}) == gpus
    assert running.directory.simulated_gpu.exists()


def test_cards_that_cannot_be_simulated_are_a_wrong_command_line(coordinators: Coordinators, built: Built) -> None:
    """Broken if a misspelt simulation ran on something else."""
    command = [sys.executable, "-m", "nvshare.coordinator.daemon.main", "--simulate=twoxbig"]
    command += ["--runtime-dir", str(coordinators.base / "run")]
    env = environment(NVSHARE_SIM_LIBRARY_DIR=str(built.sim_dir))
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=BOUND_S, check=False)
    assert done.returncode == 2
    assert "GPUS[xCAPACITY]" in done.stderr
