"""The agent when things go wrong: the coordinator dies or talks nonsense, processes fork and die."""

from __future__ import annotations

import os
import random
import signal

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.conftest import StartClient
from tests.hook.coord.test_agent import MS, SHORT_S, hold
from tests.hook.scripted import NEVER_NS, ScriptedClient, ScriptedCoordinator
from tests.unit.protocol import codec


def test_holder_goes_on_and_claims(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: the death of the coordinator stops a program, or its restart makes two holders."""
    hold(coordinator, client, waiters=1, idle_release_ns=100_000 * MS)
    coordinator.stop()
    for _ in range(3):
        assert client.do("launch 1000") == "launched"
    coordinator.restart()
    attach = coordinator.welcome(idle_release_ns=100_000 * MS)
    assert attach.lease_id == 7
    coordinator.grant(7, waiters=1)
    assert client.do("launch 1000") == "launched"
    assert coordinator.revoke(7).submissions == 5


def test_waiter_waits_and_asks_again(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program that waited when the coordinator died waits for ever, or runs without a lease."""
    client.tell("launch 1000")
    coordinator.welcome()
    coordinator.asked()
    coordinator.stop()
    assert client.answer(SHORT_S) == ""
    coordinator.restart()
    attach = coordinator.welcome()
    assert (attach.lease_id, attach.wanted) == (0, True)
    coordinator.grant(20)
    assert client.answer() == "launched"


def test_runs_on_loss_if_asked_to(start: StartClient, coordinator: ScriptedCoordinator) -> None:
    """Broken: NVSHARE_ON_LOSS=run waits, or goes on without a lease when the coordinator is back."""
    client = start(NVSHARE_ON_LOSS="run", NVSHARE_LOSS_TIMEOUT="50ms")
    coordinator.stop()
    assert client.do("launch 1000") == "launched"
    assert client.do("state").startswith("state 4 0")
    coordinator.restart()
    attach = coordinator.welcome()
    assert attach.lease_id == 0
    client.tell("background 1000")
    assert client.answer() == "begun"
    assert client.answer(SHORT_S) == ""
    coordinator.grant(1)
    assert client.answer() == "background launched"
    client.tell("exit")
    assert "running without a lease" in client.ended()[1]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x92\x42",
        messages.encode(messages.Grant(31, 9, 0)),
        messages.encode(messages.Revoke(255, 7, 1)),
        b"x" * 3000,
    ],
    ids=["empty", "no-msgpack", "short", "gpu-not-attached", "gpu-out-of-range", "too-long"],
)
def test_garbage(coordinator: ScriptedCoordinator, client: ScriptedClient, frame: bytes) -> None:
    """Broken: what a coordinator must not send crashes or stops a program, or loses its lease."""
    hold(coordinator, client)
    coordinator.send_bytes(frame)
    attach = coordinator.welcome()
    assert attach.lease_id == 7
    assert client.do("launch 1000") == "launched"


def test_unknown_message_is_skipped(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a newer coordinator cannot talk to this hook."""
    hold(coordinator, client)
    coordinator.send_bytes(b"\x92\xcc\xc8\x81\xa1x\x90")
    assert client.do("launch 1000") == "launched"
    assert coordinator.revoke(7).submissions == 2
    assert not [m for m in coordinator.received[1:] if isinstance(m, messages.Hello)]


def test_random_frames(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: some sequence of odd frames kills the program or makes it hang at exit."""
    rng = random.Random(3)
    client.tell("background 1000")
    assert client.answer() == "begun"
    for _ in range(5):
        coordinator.expect(messages.Hello)
        for _ in range(200):
            coordinator.send_bytes(codec.random_frame(rng))
    client.tell("exit")
    while (answer := client.answer()) != "":
        assert answer in ("background launched", "background failed"), "the driver may have ended"
    assert client.ended()[0] == 0


def test_child_of_a_holder(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a child that uses CUDA runs under its parent's lease, or disturbs its parent's connection."""
    client.tell("fork")
    coordinator.expect(messages.Hello)
    child = coordinator.peer
    coordinator.send(messages.Welcome(1))
    coordinator.expect(messages.AttachGpu)
    coordinator.settings()
    coordinator.grant(3)
    assert client.answer() == "child 0"
    hold(coordinator, client)
    assert coordinator.peer != child
    assert coordinator.revoke(7).drained


@pytest.mark.parametrize("state", ["held", "waiting", "ending"])
def test_child_does_not_keep_the_connection(
    coordinator: ScriptedCoordinator, client: ScriptedClient, state: str
) -> None:
    """Broken: a killed holder goes unnoticed as long as one of its children lives."""
    if state == "waiting":
        assert client.do("background 1000") == "begun"
        coordinator.welcome()
        coordinator.asked()
    else:
        hold(coordinator, client)
    if state == "ending":
        assert client.do("block") == "blocked"
        coordinator.send(messages.Revoke(0, 7, NEVER_NS))
        while not client.do("state").startswith("state 3"):
            pass
    assert client.do("idle-child").startswith("child ")
    client.process.kill()
    coordinator.disconnected()


def test_stopped_client_goes_on(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program that was stopped by a signal for a while has lost its place."""
    hold(coordinator, client)
    client.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, client.process.pid, os.WSTOPPED)  # all of its threads
    coordinator.send(messages.Revoke(0, 7, NEVER_NS))
    assert coordinator.receive(SHORT_S) is None
    client.process.send_signal(signal.SIGCONT)
    assert coordinator.expect(messages.Release).drained


def test_exec_ends_the_connection(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a holder that becomes another program keeps the lease for ever."""
    hold(coordinator, client)
    client.tell("exec")
    coordinator.disconnected()
    assert client.process.poll() is None


def test_says_what_it_waits_for(start: StartClient) -> None:
    """Broken: a program without a coordinator seems to hang, and nobody says why."""
    client = start()
    client.tell("launch 1000")
    assert "start nvshare-coordinator" in client.error_line()


def test_memory_without_a_coordinator(start: StartClient) -> None:
    """Broken: an allocation hangs for ever when nobody can be asked."""
    client = start()
    assert client.do(f"alloc {64 << 20}") == "allocated"
    assert client.do(f"alloc {64 << 20}") == "allocated"


def test_reservation_is_asked_again_after_a_loss(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: an allocation that was waiting for its answer when the coordinator died fails or hangs."""
    hold(coordinator, client, reserve=True)
    client.tell(f"alloc {64 << 20}")
    asked = coordinator.question()
    coordinator.stop()
    coordinator.restart()
    coordinator.welcome(reserve=True)
    assert coordinator.question() == asked
    coordinator.answer(asked)
    assert client.answer() == "allocated"
