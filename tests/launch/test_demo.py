"""nvshare-demo on the simulated GPU: it passes when programs take turns, and fails when they do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.simulated_gpu.environment import simulated_environment
from tests.launch.conftest import command_lines


def demo(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nvshare.coordinator.cli.demo", *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_three_programs_take_turns(environ: dict[str, str]) -> None:
    """Else the tool would not do what it is for."""
    done = demo(environ, "--simulate", "--seconds", "1", "--quantum", "20ms", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert list(result) == ["simulated", "gpus", "clients", "handovers", "violations"]
    assert (result["simulated"], result["gpus"], result["violations"]) == (True, 1, 0)
    assert sorted(client["name"] for client in result["clients"]) == ["bursty", "copies", "steady"]
    for client in result["clients"]:
        assert list(client) == ["name", "leases", "gpu_seconds", "max_wait_ms"]
        assert client["leases"] > 0
        assert client["gpu_seconds"] > 0
        assert client["max_wait_ms"] > 0
    assert result["handovers"] >= 3


def test_without_the_hook_the_check_fails(environ: dict[str, str]) -> None:
    """Else the demo would praise anything."""
    done = demo(environ | {"NVSHARE_DISABLE": "1"}, "--simulate", "--seconds", "1", "--json")
    result = json.loads(done.stdout)
    assert result["violations"] > 0
    assert done.returncode == 1
    assert "overlapped" in done.stderr
    assert [client["leases"] for client in result["clients"]] == [0, 0, 0]


def test_without_times_from_the_kernels_nothing_counts_as_proved(environ: dict[str, str], runtime: RuntimeDir) -> None:
    """Else a card whose log stayed empty would pass for one without overlap."""
    as_if_real = simulated_environment(runtime.simulated_gpu, None, environ)
    done = demo(as_if_real, "--seconds", "1", "--json")
    result = json.loads(done.stdout)
    assert (result["simulated"], result["violations"]) == (False, 0)
    assert done.returncode == 1
    assert "overlaps may be missed" in done.stderr


def test_nothing_is_left_of_a_demo_that_was_terminated(environ: dict[str, str]) -> None:
    """Else each interrupted demo would leave programs, a coordinator and a directory behind."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as place:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "nvshare.coordinator.cli.demo", "--simulate", "--seconds", "50"],
            env=environ | {"TMPDIR": place},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"Three programs on one simulated GPU")
        process.terminate()
        process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
        assert list(Path(place).iterdir()) == []
        assert not [words for words in command_lines().values() if os.fsencode(place) in b" ".join(words)]


def test_what_cannot_be_is_said(environ: dict[str, str]) -> None:
    """Else a typing mistake would end in a traceback, or in a demo of something else."""
    for words, status in ((["--quantum", "banana"], 2), (["--policy", "no_such_policy"], 1)):
        done = demo(environ | {"COLUMNS": "200"}, "--simulate", "--seconds", "1", *words)
        assert done.returncode == status
        assert words[1] in done.stderr
        assert "Traceback" not in done.stderr
