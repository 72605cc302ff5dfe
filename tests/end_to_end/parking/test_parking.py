"""Idle programs that leave their GPU altogether, by the simulated driver's checkpoint, and come back at a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.daemon.processes import ctl
from tests.end_to_end.conftest import Node, new_node
from tests.waiting import eventually

PROGRAM = Path(__file__).with_name("parked.py")


def start(node: Node, *options: str) -> subprocess.Popen[str]:
    """The program, idle, with memory on the GPU."""
    program = node.run([sys.executable, str(PROGRAM)], "--memory=swap", "--name=parked", *options)
    assert said(program) == "ready"
    return program


def said(program: subprocess.Popen[str]) -> str:
    """Its next line.  It says why it ended, if it has."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, f"exit code {program.wait()}\n{program.communicate()[1]}"
    return line.strip()


def begin(program: subprocess.Popen[str], word: str) -> None:
    assert program.stdin is not None
    program.stdin.write(word + "\n")
    program.stdin.flush()


def tell(program: subprocess.Popen[str], word: str) -> str:
    """The answer to a word."""
    begin(program, word)
    return said(program)


def parking(node: Node) -> str:
    (client,) = node.control("clients")["clients"]
    return str(client["parking"])


def park(node: Node) -> None:
    assert node.control("park", "parked")["parking"] == "parked"


def helpers(node: Node) -> list[int]:
    """The processes that make the driver's calls."""
    assert node.coordinator is not None
    children = Path(f"/proc/{node.coordinator.pid}/task/{node.coordinator.pid}/children").read_text().split()
    return are_helpers(map(int, children))


def are_helpers(processes: Iterable[int]) -> list[int]:
    """Those of them that live, and make the driver's calls."""
    paths = {process: Path(f"/proc/{process}/cmdline") for process in processes}
    return [process for process, path in paths.items() if path.exists() and b"checkpoints" in path.read_bytes()]


@pytest.fixture(scope="module")
def serving(built: Built) -> Iterator[Node]:
    """A coordinator for all tests that leave it as it is."""
    with new_node() as node:
        node.start_coordinator()
        yield node


@pytest.fixture
def shared(serving: Node) -> Iterator[Node]:
    """It has no programs before the test and after it."""
    yield serving
    serving.end_programs()
    eventually(lambda: not serving.control("clients")["clients"], "no program to be left")


ANSWERS = {"read": "0 True", "launch": "0 True", "make": "0 0", "free": "0 True", "query": "0 0", "wait": "0 0"}


def test_the_next_call_or_the_operator_brings_it_back(shared: Node) -> None:
    """Broken: a call of a parked program fails, crashes, waits for ever, or finds other memory; or `unpark` says that
    it is done, and is not."""
    program = start(shared)
    for word, answer in ANSWERS.items():
        park(shared)
        assert shared.charged_bytes() == 0
        assert tell(program, word) == answer
        assert tell(program, "read") == "0 True"
        assert parking(shared) == "running"
    park(shared)
    assert shared.control("unpark", "parked")["parking"] == "running"
    assert tell(program, "query") == "0 0"


def test_by_itself(node: Node) -> None:
    """Broken: `park_after` does nothing in a coordinator."""
    node.start_coordinator("--park-after=100ms")
    program = start(node)
    eventually(lambda: parking(node) == "parked", "the program to be parked")
    assert tell(program, "read") == "0 True"


def test_a_parked_program_ends(shared: Node) -> None:
    """Broken: the end of a parked program waits in the driver, or leaves something."""
    program = start(shared)
    park(shared)
    assert program.stdin is not None
    program.stdin.close()
    assert said(program) == "end"
    assert program.wait(60) == 0
    killed = start(shared)
    park(shared)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    eventually(lambda: not shared.control("clients")["clients"], "its seat to go")
    assert shared.charged_bytes() == 0
    eventually(lambda: not helpers(shared), "its helper to end")


def test_what_a_helper_has_of_the_coordinator(node: Node) -> None:
    """Broken: a user reads root's secrets or writes to its log, a helper stays for ever, or a kill of the coordinator
    leaves it or its tracebacks."""
    node.start_coordinator(variables={"PASSWORD": "secret"})
    program = start(node)
    for _ in range(2):
        park(node)
        (helper,) = helpers(node)
        proc = Path(f"/proc/{helper}")
        assert b"secret" not in (proc / "environ").read_bytes()
        assert str((proc / "fd" / "2").readlink()) == "/dev/null"
        assert tell(program, "read") == "0 True"
        eventually(lambda: not helpers(node), "it to end")
    park(node)
    (helper,) = helpers(node)
    node.kill_coordinator()
    eventually(lambda: not are_helpers([helper]), "it to end")
    assert "Traceback" not in node.log()


def test_a_stopped_program(shared: Node) -> None:
    """Broken: `park` hangs while a program is stopped, or the program is never parked afterwards."""
    program = start(shared)
    client = shared.control("clients")["clients"][0]
    os.kill(client["process_id"], signal.SIGSTOP)
    done = ctl(shared.directory, "park", "parked")
    assert (done.returncode, "it parks when it continues" in done.stdout) == (1, True), done.stdout
    os.kill(client["process_id"], signal.SIGCONT)
    eventually(lambda: parking(shared) == "parked", "it to be parked")
    assert tell(program, "read") == "0 True"


def test_managed_memory_of_its_own(shared: Node) -> None:
    """Broken: a program that the driver refuses for its memory is told to upgrade the driver."""
    program = start(shared)
    assert tell(program, "managed") == "0 True"
    done = ctl(shared.directory, "park", "parked")
    assert "managed memory" in done.stdout
    assert tell(program, "read") == "0 True"


def test_a_coordinator_that_dies_meanwhile(node: Node) -> None:
    """Broken: nobody wakes a program that an earlier coordinator has parked."""
    node.start_coordinator()
    program = start(node)
    park(node)
    node.kill_coordinator()
    node.start_coordinator()
    eventually(lambda: len(node.control("clients")["clients"]) == 1, "the program to connect again")
    assert parking(node) == "parked"
    assert tell(program, "read") == "0 True"


def test_a_helper_that_dies(shared: Node) -> None:
    """Broken: the death of the process that calls the driver leaves its programs parked."""
    program = start(shared)
    park(shared)
    (helper,) = helpers(shared)
    os.kill(helper, signal.SIGKILL)
    assert tell(program, "read") == "0 True"


def test_two_share_a_card_that_holds_one(shared: Node) -> None:
    """Broken: memory of a parked program keeps others out, or is not its own afterwards."""
    first, second = start(shared), start(shared, "--name=other")
    for _ in range(3):
        park(shared)
        assert tell(second, "read") == "0 True"
        assert tell(first, "read") == "0 True"


@pytest.mark.parametrize("step", ["Checkpoint", "Restore"])
def test_a_program_that_the_driver_loses(shared: Node, step: str) -> None:
    """Broken: a program whose checkpoint or return failed in its midst hangs, or its return is tried for ever."""
    faults = {"NVSHARE_SIM_FAULTS": f"cuCheckpointProcess{step}@1=999"}
    program = shared.run([sys.executable, str(PROGRAM)], "--memory=swap", "--name=parked", variables=faults)
    assert said(program) == "ready"
    done = ctl(shared.directory, "park", "parked")
    assert ("cannot repeat it" in done.stdout) is (step == "Checkpoint"), done.stdout
    assert tell(program, "read").startswith("999 "), "its calls fail"
    assert parking(shared) == "running"
    program.kill()
    eventually(lambda: not shared.control("clients")["clients"], "its seat to go")
    assert shared.charged_bytes() == 0
