"""Host functions in a program's queues: a turn ends while only they are left; what is behind them runs in a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from nvshare.simulated_gpu.trace import read_trace
from tests.hook.coord.test_agent import MS, hold
from tests.hook.scripted import NEVER_NS, ScriptedClient, ScriptedCoordinator
from tests.waiting import eventually

NOT_PERMITTED = 800
"""The driver's answer to a call in a host function."""
FUNCTION, CALLBACK, CAPTURED, NODE = KINDS = range(4)


def hosting(coordinator: ScriptedCoordinator, client: ScriptedClient, kind: int = FUNCTION) -> None:
    """A host function runs until `unblock`; a kernel is behind it."""
    hold(coordinator, client)
    assert client.do(f"host {kind}") == "blocked"
    eventually(lambda: client.do("driven") == "driven 1", "the host function runs")


@pytest.mark.parametrize("kind", KINDS, ids=["function", "callback", "captured", "node"])
def test_a_turn_ends_beside_a_host_function(
    coordinator: ScriptedCoordinator, client: ScriptedClient, hook_env: dict[str, str], kind: int
) -> None:
    """Broken: a drain waits for what waits for the closed gate; or work behind a host function runs without a lease."""
    hosting(coordinator, client, kind)
    coordinator.received.clear()
    release = coordinator.revoke(7)
    assert (release.drained, release.wanted) == (True, False)
    assert client.do("unblock") == "unblocked"
    assert coordinator.expect(messages.Request).gpu == 0, "for the work behind"
    assert client.do("driven") == f"driven {NOT_PERMITTED}", "its own calls pass the gate"
    assert len(read_trace(Path(hook_env["NVSHARE_SIM_STATE"]))) == 1, "the work before the host function"
    coordinator.grant(8)
    assert client.do("sync") == "synchronised"
    assert client.do(f"host {kind}") == "blocked", "the next run"
    assert client.do("unblock") == "unblocked"
    assert client.do("sync") == "synchronised"
    assert coordinator.revoke(8).drained


def test_kernels_beside_a_host_function_are_drained(
    coordinator: ScriptedCoordinator, client: ScriptedClient, hook_env: dict[str, str]
) -> None:
    """Broken: a kernel of another stream runs on in the next program's turn, and the release does not say so."""
    hosting(coordinator, client)
    assert client.do(f"launch {50 * MS}") == "launched"
    drained = coordinator.revoke(7).drained
    assert len(read_trace(Path(hook_env["NVSHARE_SIM_STATE"]))) == 2 or not drained
    assert client.do("unblock") == "unblocked"


@pytest.mark.parametrize("command", ["behind", "block-apart"])
def test_work_that_may_wait_for_a_host_function(
    coordinator: ScriptedCoordinator, client: ScriptedClient, command: str
) -> None:
    """Broken: a stream that waits for a host function of another one holds the turn for the whole deadline, or counts
    as drained; or work in a per-thread default stream is not seen beside a host function."""
    hosting(coordinator, client)
    assert client.do(command) in ("launched", "blocked")
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=NEVER_NS))
    assert not coordinator.expect(messages.Release).drained
    assert client.do("unblock") == "unblocked"


def test_a_call_that_waits_for_a_host_function_ends(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a call inside the gate waits for a host function, and that waits for the next lease."""
    hold(coordinator, client)
    assert client.do("copy-behind") == "begun"
    eventually(lambda: client.do("driven") == "driven 1", "the host function runs")
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=NEVER_NS))
    eventually(lambda: client.do("state").startswith("state 3"), "the lease is being given back")
    client.tell("unblock")
    assert {client.answer(), client.answer()} == {"unblocked", "copied"}
    assert coordinator.expect(messages.Release).drained


@pytest.mark.sanitizer
def test_under_sanitizers(
    client_program: Path, sanitized_env: dict[str, str], coordinator: ScriptedCoordinator
) -> None:
    """Broken: a host function uses what its launch has freed, or a drain what its end has changed."""
    with ScriptedClient(client_program, sanitized_env) as client:
        hosting(coordinator, client)
        coordinator.received.clear()
        assert coordinator.revoke(7).drained
        assert client.do("unblock") == "unblocked"
        coordinator.expect(messages.Request)
        coordinator.grant(8)
        assert client.do("sync") == "synchronised"
        assert client.finish() == (0, "")
