"""May it run, and if not, why: one state and one reason for every view."""

from __future__ import annotations

from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import MILLISECOND_NS, Sharing
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import ScriptedClient, contended, one_gpu

SETTINGS = {"sharing": Sharing.EXCLUSIVE, "quantum_ns": 100 * MILLISECOND_NS}


def stands(client: ScriptedClient) -> tuple[str, str, int]:
    found = client.seat().standing
    return found.state, found.reason, found.blocker


def test_turns() -> None:
    """Broken: a view calls a program running that waits, or names no program that it waits for."""
    harness, holder, other = contended(**SETTINGS)
    idle = harness.client()
    assert [stands(each) for each in (holder, other, idle)] == [
        ("running", "", 0),
        ("waiting", "turn", holder.client),
        ("idle", "", 0),
    ]


def test_a_paused_program_waits_for_nobody() -> None:
    """Broken: `status` counts it among those that wait, and `explain` says that the other one is alone."""
    harness, holder, other = contended(**SETTINGS)
    harness.handle(events.Set("paused", True, client=other.client))
    assert stands(other) == ("paused", "paused", 0)
    assert other.seat().turn.waiting_since_ns is None
    assert harness.gpu_snapshot().leases.waiting == 0
    harness.handle(events.Set("paused", False, client=other.client))
    assert stands(other) == ("waiting", "turn", holder.client)


def test_debt_is_the_reason() -> None:
    """Broken: after a slow drain a program waits, and its user reads that it is the next one."""
    harness = one_gpu(**SETTINGS)
    slow, other = harness.client(wanted=True, user_id=1), harness.client(wanted=True, user_id=2)
    harness.until(lambda: slow.seat().phase == "revoking")
    harness.milliseconds(3000)
    slow.release(wanted=True)
    assert stands(slow) == ("in debt", "debt", 0)
    assert stands(other)[0] == "running"


def test_memory_that_moves_is_the_reason() -> None:
    """Broken: while memory moves for one program the others read that no program holds the GPU."""
    harness = one_gpu(100, **SETTINGS)
    following, third = (harness.client(mode=MemoryMode.SWAP, resident=0, host=60) for _ in range(2))
    following.request()
    third.request()
    assert stands(following) == ("next", "moving", 0)
    assert stands(third) == ("waiting", "next", following.client)


def test_a_recovery_is_the_reason() -> None:
    """Broken: after a restart a program waits for an earlier one, which nobody names."""
    harness = one_gpu(**SETTINGS)
    harness.gpu("GPU-1", next_lease_id=7, expected_holder=77)
    waiter = harness.client(attach=False)
    waiter.attach("GPU-1", wanted=True)
    assert stands(waiter) == ("waiting", "recovering", 0)
    harness.handle(events.Look((77,)))
    assert waiter.seat().standing.blocker_stopped
