"""`nvshare-run --gpu` with real starts on simulated GPUs: who gets which GPU, and for how long."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.cli import run
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.cli.gpu_option import _name
from nvshare.coordinator.cli.views.explain import explanation, lines
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.launch.conftest import run_command
from tests.waiting import eventually

SHELL = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read end")
"""A program that has not used CUDA yet: tells its GPUs, and ends with its input."""
CUDA = ("--", sys.executable, "-m", "nvshare.bench.workloads.busy", "--seconds=600")
Place = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def place(environ: dict[str, str]) -> Iterator[Place]:
    """Starts `nvshare-run` with these arguments on the simulated GPUs of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, gpus: int = 2, **variables: str) -> subprocess.Popen[str]:
        command = run_command(f"--simulate={gpus}x8GiB", *arguments, simulate=False)
        pipe = subprocess.PIPE
        made = subprocess.Popen(command, env=environ | variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(made)
        return made

    yield start
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            each.kill()
        each.communicate()


def gpus(program: subprocess.Popen[str]) -> list[int]:
    """What the shell tells, as indices."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    return [int(uuid[-1]) for uuid in line.strip().split(",")]


def refusal(program: subprocess.Popen[str]) -> str:
    err = program.communicate()[1]
    assert program.returncode == 1, err
    return err


def end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.wait()


def clients(runtime: RuntimeDir) -> Any:
    """The programs that use a GPU."""
    with contextlib.suppress(NoCoordinatorError):  # it is being started
        return [client for client in call(runtime, api.Status())["clients"] if client["seats"]]
    return []


def test_a_program_that_dies_before_it_uses_cuda_leaves_no_trace(place: Place) -> None:
    """Broken: a start that failed keeps its GPU, for others or for ever."""
    lonely = place("--alone", "--name", "bench", *SHELL, gpus=1)
    assert gpus(lonely) == [0]
    assert f"GPU 0: bench ({lonely.pid}) is alone there" in refusal(place("--gpu", "auto", *SHELL, gpus=1))
    assert gpus(place("--gpu", "0", *SHELL, gpus=1)) == [0], "a GPU that is named is not refused"
    end(lonely)
    assert gpus(place("--gpu", "auto", *SHELL, gpus=1)) == [0]


def test_placed_programs_are_seen_by_their_names(place: Place, runtime: RuntimeDir) -> None:
    """Broken: `--with` and `--apart` know no running program, or `explain` cannot say why one is where it is."""
    place("--name", "server", "--gpu", "auto", *CUDA)
    (server,) = eventually(lambda: clients(runtime), "the program uses its GPU")
    assert gpus(place("--with", "server", *SHELL)) == [0]
    assert gpus(place("--apart", "server", *SHELL)) == [1]
    assert "GPU 0: server" in refusal(place("--gpu", "0", "--alone", *SHELL))
    assert "there is no program named client" in refusal(place("--with", "client", *SHELL))
    status = call(runtime, api.Status())
    told = "cheapest: GPU 0 (0.00: busy 0%, memory 0%), then GPU 1 (0.00: busy 0%, memory 0%)"
    assert server["placed_why"] == told
    assert any(told in line for line in lines(explanation(status), status["now_ns"]))


def test_a_program_is_alone_as_long_as_one_of_its_processes_lives(place: Place, runtime: RuntimeDir) -> None:
    """Broken: the wish to be alone ends when the shell that started the program does, or at its first CUDA call."""
    script = f"{sys.executable} -m nvshare.bench.workloads.busy --seconds=600 </dev/null >/dev/null 2>&1 & echo $!"
    shell = place("--alone", "--", "sh", "-c", script, gpus=1)
    assert shell.stdout is not None
    child = int(shell.stdout.readline())
    try:
        assert shell.wait() == 0
        (client,) = eventually(lambda: clients(runtime), "the child uses its GPU")
        assert (client["process_id"], client["placed_alone"]) == (child, True)
        assert "is alone there" in refusal(place("--gpu", "auto", *SHELL, gpus=1))
    finally:
        subprocess.run(["kill", "-KILL", str(child)], check=True)
    eventually(lambda: not clients(runtime), "the child has ended")
    assert gpus(place("--gpu", "auto", *SHELL, gpus=1)) == [0]


def test_waiting_for_a_gpu(place: Place) -> None:
    """Broken: `--wait` fails at once, or does not notice that a GPU is free."""
    lonely = place("--alone", *SHELL, gpus=1)
    gpus(lonely)
    waiting = place("--alone", "--wait", *SHELL, gpus=1)
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("nvshare-run: waiting: no GPU to place sh on: GPU 0: sh (")
    end(lonely)
    assert gpus(waiting) == [0]
    assert "can be chosen: 1; wanted: 2" in refusal(place("--gpu=auto:2", "--wait", *SHELL, gpus=1))


def test_a_launcher_inside_of_a_placed_program(place: Place) -> None:
    """Broken: a script that is alone cannot place its own programs, or these leave its GPUs."""
    inner = " ".join(run_command("--simulate", "--gpu", "auto", simulate=False))
    shell = place("--alone", "--gpu", "1", "--", "sh", "-c", f"{inner} -- sh -c 'echo $CUDA_VISIBLE_DEVICES'; read end")
    assert gpus(shell) == [1]
    assert gpus(place("--gpu", "auto", *SHELL)) == [0], "it is still alone"


def test_among_which_gpus_is_chosen(place: Place) -> None:
    """Broken: a program leaves the GPUs that its user has allowed, or a list loses its order."""
    for option, visible, found in (
        ("--gpu=auto", {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ("--gpu=auto:2", {}, [0, 1]),
        ("--gpu=1,0", {"CUDA_VISIBLE_DEVICES": "0"}, [1, 0]),
        ("--gpu=GPU-51a15eed-0000-4000-8000-000000000001", {}, [1]),
    ):
        program = place(option, *SHELL, **visible)
        assert gpus(program) == found, (option, visible)
        end(program)


def test_a_choice_that_cannot_be_made_says_why(place: Place) -> None:
    """Broken: the program runs on other GPUs than its user thinks."""
    for options, visible, text in (
        (["--gpu=7"], {}, "'7' is not a GPU of this coordinator; the GPUs are 0 (GPU-"),
        (["--gpu=0,0"], {}, "names a GPU twice"),
        (["--gpu=auto"], {"CUDA_VISIBLE_DEVICES": ""}, "can be chosen: 0; wanted: 1"),
        (["--gpu=auto"], {"CUDA_VISIBLE_DEVICES": "-1"}, "can be chosen: 0; wanted: 1"),
        (["--gpu=auto", "--gpu-memory-limit=9GiB"], {}, "GPU 1: it has 8GiB, and 9GiB are wanted"),
    ):
        assert text in refusal(place(*options, *SHELL, **visible))


@pytest.mark.parametrize(
    "options", [["--gpu", word] for word in ("", "first", "auto:0", "auto:33", "0,", "-1", "auto,1")] + [["--with", ""]]
)
def test_a_wrong_choice_of_gpus_is_a_usage_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a slip of the pen becomes some choice."""
    with pytest.raises(SystemExit) as ended:
        run.main([f"{options[0]}={options[1]}", "--", "true"])
    assert ended.value.code == 2
    assert f"argument {options[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["./train"], "train"),
        (["/usr/bin/python3", "-u", "src/train.py", "--fast"], "train.py"),
        (["python", "-m", "package.train"], "package.train"),
        (["python3"], "python3"),
        (["a\nb"], "a?b"),
        (["é" * 40], "é" * 31),
    ],
)
def test_the_name_of_a_program_that_has_not_started(command: list[str], name: str) -> None:
    """Broken: `--apart train.py` does not see a `train.py` that starts at the same time."""
    assert _name(None, command) == name
    assert _name("given", command) == "given"


def test_a_directory_whose_control_socket_is_closed(place: Place, runtime: RuntimeDir, tmp_path: Path) -> None:
    """Broken: in a container with a slot `--gpu` hangs, or ends with a traceback."""
    holder = place("--gpu", "auto", *SHELL)
    gpus(holder)
    runtime.control_socket.rename(tmp_path / "away")
    assert f"--gpu needs {runtime.control_socket}, which this user or container may not use" in refusal(
        place("--gpu", "auto", *SHELL)
    )
