"""Messages of the hook in a program's standard error.

Non-goals: messages of single parts, which stand with their tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.conftest import StartClient
from tests.hook.faults.test_fault_sweep import serve
from tests.hook.scripted import BOUND_S, ScriptedClient, ScriptedCoordinator

PROGRAMS = Path(__file__).resolve().parent / "programs"


NONBLOCKING = os.O_WRONLY | os.O_NONBLOCK
OUT_OF_MEMORY = 2
MIB = 1 << 20


def heard(coordinator: ScriptedCoordinator, environment: dict[str, str], *words: str | Path) -> tuple[str, str]:
    """Output and errors of a program that gets all that it asks for."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    reader = threading.Thread(target=serve, args=(coordinator, process))
    reader.start()
    try:
        output, errors = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
        reader.join()
    assert process.returncode == 0, errors
    return output, errors


@pytest.mark.parametrize("reader", ["ended", "sleeps"])
def test_a_standard_error_that_takes_nothing(coordinator: ScriptedCoordinator, start: StartClient, reader: str) -> None:
    """Broken: a message of the hook's kills or stops a program whose standard error nobody reads any more."""
    client = start(NVSHARE_MEMORY_LIMIT="64MiB")
    assert client.process.stderr is not None
    if reader == "ended":
        client.process.stderr.close()
    else:
        with open(
            f"/proc/{client.process.pid}/fd/2", "wb", 0, opener=lambda path, _: os.open(path, NONBLOCKING)
        ) as pipe:
            while pipe.write(b"." * 4096):
                pass
    client.tell(f"alloc {65 * MIB}")
    coordinator.welcome(limit=64 * MIB)
    assert client.answer() == f"refused {OUT_OF_MEMORY}"
    client.tell("exit")
    assert client.process.wait(BOUND_S) == 0


def complaints(client: ScriptedClient) -> list[str]:
    """Standard error of a program that has ended."""
    client.tell("exit")
    code, errors = client.ended()
    assert code == 0
    return [line.partition(": ")[2] for line in errors.splitlines()]


@pytest.mark.parametrize(
    ("own", "slot", "cause"),
    [
        ("64MiB", False, "the limit of this program is 64 MiB, from NVSHARE_MEMORY_LIMIT (nvshare-run "
         "--gpu-memory-limit); to change it now: nvshare-ctl limit scripted --memory SIZE"),
        (None, False, "the limit of this program is 64 MiB, set in the coordinator; to change it: "
         "nvshare-ctl limit scripted --memory SIZE"),
        ("64MiB", True, "the limit of this container is 64 MiB, for all of its programs together (in a pod: by its "
         "claim, or its annotation nvshare.com/memory-limit)"),
    ],
)  # fmt: skip
def test_a_limit_that_refuses_says_so_once(
    coordinator: ScriptedCoordinator, start: StartClient, own: str | None, slot: bool, cause: str
) -> None:
    """Broken: a program is out of memory on a card that is half empty, and nothing tells why."""
    client = start(NVSHARE_MEMORY_LIMIT=own)
    client.tell(f"alloc {65 * MIB}")
    coordinator.welcome(limit=64 * MIB, limit_of_slot=slot)
    assert client.answer() == f"refused {OUT_OF_MEMORY}"
    assert client.do(f"alloc {65 * MIB}") == f"refused {OUT_OF_MEMORY}"
    assert client.do(f"alloc {MIB}") == "allocated"
    assert complaints(client) == [f"65 MiB more on GPU 0 are out of memory: {cause}"]


@pytest.mark.parametrize("by_limit", [False, True])
def test_a_limit_that_others_of_a_slot_have_used_up(
    coordinator: ScriptedCoordinator, start: StartClient, by_limit: bool
) -> None:
    """Broken: a program of a container blames a limit that it keeps, or hears nothing of the one that it shares."""
    client = start()
    client.tell(f"alloc {8 * MIB}")
    coordinator.welcome(limit=64 * MIB, reserve=True, limit_of_slot=True)
    while not (answer := client.answer(0.05)):
        coordinator.receive(0.05)
        if coordinator.has_question():
            coordinator.answer(0, by_limit=by_limit)
    assert answer == f"refused {OUT_OF_MEMORY}"
    assert len(complaints(client)) == by_limit


def test_a_refusal_of_the_coordinator_is_explained_once(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: a program is out of memory because of others, and its user does not learn of whom."""
    client = start(NVSHARE_MEMORY="device")
    for _ in range(2):
        client.tell(f"alloc {8 * MIB}")
        if not coordinator.received:
            coordinator.welcome(reserve=True)
        while not (answer := client.answer(0.05)):
            coordinator.receive(0.05)
            if coordinator.has_question():
                text = "GPU 0 has 4GiB for programs, and train.py (alice) has 4GiB that cannot move"
                coordinator.send(messages.Rejected(int(messages.Rejection.OUT_OF_MEMORY), False, text))
                coordinator.answer(0)
        assert answer == f"refused {OUT_OF_MEMORY}"
    assert complaints(client) == [f"8 MiB more on GPU 0 are out of memory: {text}"]


@pytest.mark.parametrize("reader", ["none", "sleeps"])
def test_a_log_file_that_is_a_fifo(
    coordinator: ScriptedCoordinator, start: StartClient, tmp_path: Path, reader: str
) -> None:
    """Broken: a program hangs at the first line of its log because nobody reads the FIFO that it goes to."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with contextlib.ExitStack() as stack:
        if reader == "sleeps":
            pipe = stack.enter_context(
                open(fifo, "w+b", 0, opener=lambda path, _: os.open(path, os.O_RDWR | os.O_NONBLOCK))
            )
            while pipe.write(b"." * 4096):
                pass
        client = start(NVSHARE_LOG="debug", NVSHARE_LOG_FILE=str(fifo))
        client.tell("launch 1000")
        coordinator.welcome()
        coordinator.asked()
        coordinator.grant(7)
        assert client.answer() == "launched"
