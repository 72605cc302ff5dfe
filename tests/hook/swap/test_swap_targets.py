"""Targets of memory while other things happen: new targets, grants, lost connections, ends of contexts and processes.

A pass below a target that rises stands still, with the mover in the middle of it.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, start, until
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.test_swap_process import MIB, OUT_OF_MEMORY, attached, hold
from tests.waiting import eventually

HELD = 48 * MIB
NOT_PERMITTED, FAILED = 800, 999
LOST_DEVICE = 46


def evicted(client: Client, coordinator: ScriptedCoordinator) -> int:
    """Its memory, written and off the GPU; returns where it is."""
    hold(client, coordinator)
    result, pointer = client.ask("alloc", HELD)
    assert result == 0
    assert client.ask("write", pointer, HELD, 7) == 0
    coordinator.revoke(1)
    assert coordinator.move(0) == (HELD, 0)
    return int(pointer)


def stands_at(coordinator: ScriptedCoordinator, size: int) -> None:
    """The client has brought in so much, says that it is at rest, and is."""
    state = coordinator.rests()
    assert (state.resident_bytes, state.moved_in_bytes, state.error) == (size, size, 0)


def is_whole(client: Client, coordinator: ScriptedCoordinator, pointer: int, lease: int) -> None:
    """With a new lease all data is there."""
    coordinator.grant(lease)
    assert client.ask("same", pointer, HELD, 7) is True


def test_no_more_comes_in_than_the_target(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: two programs have more on the card than fits, or a grant waits for room that never comes."""
    pointer = evicted(client, coordinator)
    coordinator.target(30 * MIB, rises=True)
    coordinator.target(41 * MIB, rises=True)
    coordinator.grant(2)
    stands_at(coordinator, 40 * MIB)
    assert client.ask("same", pointer, HELD, 7) is True


def test_it_goes_on_to_the_end_as_the_target_rises(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: memory stays away although the room is there, or everything else waits for it."""
    pointer = evicted(client, coordinator)
    coordinator.target(0, rises=True)
    coordinator.settings(capacity_bytes=200 * MIB)
    until(client, "info", [0, 200 * MIB - HELD, 200 * MIB, 200 * MIB])
    assert client.ask("alloc", 10 * MIB)[0] == 0, "without a lease, beside the move"
    for size in range(0, HELD + 1, 16 * MIB):
        coordinator.target(size, rises=size < HELD)
    stands_at(coordinator, HELD)
    is_whole(client, coordinator, pointer, 2)


def test_a_target_that_rises_late(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a mover that has waited long enough does not go on, or goes on below a target that it has given up."""
    pointer = evicted(client, coordinator)
    coordinator.target(17 * MIB, rises=True)
    stands_at(coordinator, 16 * MIB)
    coordinator.target(29 * MIB, rises=True)
    stands_at(coordinator, 28 * MIB)
    coordinator.target(HELD)
    stands_at(coordinator, HELD)
    is_whole(client, coordinator, pointer, 2)


def test_who_is_at_rest_brings_nothing_in(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a client that waits says that it is at rest, its room goes to another one, and then it uses the room.

    Of the missing memory the larger piece is next, and only the smaller one would fit.
    """
    hold(client, coordinator)
    assert [client.ask("alloc", size)[0] for size in (4 * MIB, 2 * MIB)] == [0, 0]
    coordinator.revoke(1)
    assert coordinator.move(0) == (6 * MIB, 0)
    coordinator.target(3 * MIB, rises=True)
    stands_at(coordinator, 0)
    coordinator.grant(2)
    assert coordinator.expect(messages.State).resident_bytes == 0, "the end of the waiting"
    assert client.ask("held") == 0
    coordinator.revoke(2)
    assert coordinator.move(0) == (6 * MIB, 0)
    assert coordinator.move(3 * MIB) == (2 * MIB, 0), "what fits, if no rise is in view"


def test_a_lower_target_ends_the_waiting(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: an eviction stands behind a pass that waits for the room which it is to make, or leaves what came in
    meanwhile."""
    pointer = evicted(client, coordinator)
    coordinator.target(17 * MIB, rises=True)
    stands_at(coordinator, 16 * MIB)
    assert coordinator.move(0) == (16 * MIB, 0)
    for _ in range(10):  # at any moment of a restoration
        before = coordinator.state()
        coordinator.target(17 * MIB, rises=True)
        coordinator.target(0)
        state = coordinator.rests()
        assert (state.resident_bytes, state.error) == (0, 0)
        brought = state.moved_in_bytes - before.moved_in_bytes
        assert brought <= 16 * MIB
        assert state.moved_out_bytes - before.moved_out_bytes == brought
    is_whole(client, coordinator, pointer, 2)


def test_targets_that_cross(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a target that comes while memory moves costs data, or is never reached."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    pointer = evicted(client, coordinator)
    for _ in range(120):
        coordinator.target(dice.randrange(HELD), rises=dice.random() < 0.5)
        if dice.random() < 0.2:
            coordinator.expect(messages.State)
    coordinator.target(0)
    state = coordinator.rests()
    assert (state.resident_bytes, state.error) == (0, 0)
    assert state.moved_out_bytes - state.moved_in_bytes == HELD
    is_whole(client, coordinator, pointer, 2)


def test_with_a_lease_a_target_is_refused(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: memory moves below work that runs, or the coordinator waits for it."""
    _, pointer = holder.ask("alloc", HELD)
    assert holder.ask("write", pointer, HELD, 7) == 0
    for size in (0, 2 * HELD):
        assert coordinator.move(size) == (0, NOT_PERMITTED)
    assert coordinator.state().resident_bytes == HELD
    assert holder.ask("same", pointer, HELD, 7) is True
    coordinator.revoke(1)
    assert coordinator.move(0) == (HELD, 0)


@pytest.mark.parametrize(
    ("mode", "out", "slow"),
    [
        ("swap", True, "cuMemUnmap"),
        ("swap", False, "cuMemMap"),
        ("managed", True, "cuMemPrefetchAsync"),
        ("managed", False, "cuMemPrefetchAsync"),
    ],
)
def test_what_moves_counts_as_there(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str, out: bool, slow: str
) -> None:
    """Broken: in the middle of a move a client says that it has less on the card than it has."""
    with start({**environment, "NVSHARE_MEMORY": mode, "NVSHARE_SIM_FAULTS": f"slow:{slow}={25 * 10**6}"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        for _ in range(12):
            assert client.ask("alloc", HELD // 12)[0] == 0
        coordinator.revoke(1)
        if not out:
            assert coordinator.move(0) == (HELD, 0)
        seen = len(coordinator.received)
        assert coordinator.move(0 if out else HELD) == (HELD, 0)
        states = [m for m in coordinator.received[seen:] if isinstance(m, messages.State) and not m.at_rest]
        if out:  # the figures are a little newer than the sums
            there = [m.resident_bytes >= HELD - m.moved_out_bytes for m in states if 0 < m.moved_out_bytes < HELD]
            assert sum(there) > len(there) / 2
        else:
            assert all(m.resident_bytes >= m.moved_in_bytes for m in states)
            assert any(m.resident_bytes > m.moved_in_bytes > 0 for m in states), "what is about to come in"


def test_a_lost_coordinator_ends_it(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: after a coordinator's restart the mover waits for its predecessor, or memory is lost or miscounted."""
    pointer = evicted(client, coordinator)
    coordinator.target(9 * MIB, rises=True)
    coordinator.stop()
    coordinator.received.clear()
    coordinator.restart()
    attach = coordinator.welcome()
    assert attach.allocated_bytes == HELD
    assert attach.resident_bytes <= 8 * MIB
    is_whole(client, coordinator, pointer, 2)
    coordinator.revoke(2)
    assert {m.target for m in coordinator.received if isinstance(m, messages.State)} == {0}
    assert HELD - attach.resident_bytes <= coordinator.state().moved_in_bytes <= HELD, "since AttachGpu"
    assert coordinator.state().moved_out_bytes == 0
    assert coordinator.move(0) == (HELD, 0)


def test_what_is_there_stays_when_the_connection_ends(
    coordinator: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    """Broken: a client goes on to a target of which the coordinator that is there now knows nothing."""
    with start({**environment, "NVSHARE_SIM_FAULTS": f"slow:cuMemMap@25-={300 * 10**6}"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        pointers = [client.ask("alloc", 4 * MIB)[1] for _ in range(24)]
        for pointer in pointers[::2]:  # else several are mapped in one step
            assert client.ask("free", pointer) == 0
        coordinator.revoke(1)
        assert coordinator.move(0) == (HELD, 0)
        coordinator.target(HELD)
        while coordinator.expect(messages.State).moved_in_bytes == 0:
            pass
        coordinator.stop()
        coordinator.restart()
        coordinator.welcome()
        while coordinator.receive(1.0) is not None:
            pass
        assert 0 < coordinator.state().resident_bytes < HELD
        assert coordinator.restore(4 * MIB) == (4 * MIB, 0)


def test_a_context_may_end_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a program that resets its device hangs until somebody else makes room."""
    evicted(client, coordinator)
    coordinator.target(5 * MIB, rises=True)
    client.tell("reset")
    assert coordinator.rests().moved_in_bytes <= 4 * MIB
    assert client.result() == 0
    until(client, "info", [0, 256 * MIB, 256 * MIB, 256 * MIB])


def test_memory_may_be_freed_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: what a program gives back while it moves is counted for ever, or used after it is gone."""
    pointer = evicted(client, coordinator)
    coordinator.target(9 * MIB, rises=True)
    assert client.ask("free", pointer) == 0
    coordinator.target(HELD)
    assert coordinator.rests().error == 0
    coordinator.grant(2)
    assert client.ask("alloc", 256 * MIB)[0] == 0, "all of the card is free again"
    coordinator.revoke(2)
    assert coordinator.state().allocated_bytes == 256 * MIB


def test_forks_and_exits_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: the child of a fork inherits a lock that nobody opens, or exit() waits for the mover."""
    evicted(client, coordinator)
    coordinator.target(5 * MIB, rises=True)
    assert client.ask("fork") == 0
    assert client.finish()[0] == 0


def test_a_lost_device_comes_to_rest(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: with the card gone a program hangs, or claims to have made room."""
    calls = ("cuMemcpyDtoHAsync@9-", "cuEventSynchronize@9-", "cuStreamSynchronize", "cuMemUnmap", "cuMemCreate@30-")
    faults = ",".join(f"{call}={LOST_DEVICE}" for call in calls)
    with start({**environment, "NVSHARE_SIM_FAULTS": faults}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", HELD)
        assert client.ask("write", pointer, HELD, 7) == 0
        coordinator.revoke(1)
        before = coordinator.state().resident_bytes
        moved, error = coordinator.move(0)
        assert error == FAILED
        assert moved < HELD
        assert coordinator.state().resident_bytes == before - moved
        assert coordinator.move(HELD)[1] == 0, "nothing had left"
        coordinator.grant(2)
        assert client.ask("free", pointer) in {0, LOST_DEVICE}


def test_no_host_memory(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: a machine without memory or threads costs a program its data."""
    _, pointer = holder.ask("alloc", HELD)
    assert holder.ask("write", pointer, HELD, 7) == 0
    coordinator.revoke(1)
    size = next(
        int(line.split()[1]) << 10
        for line in Path(f"/proc/{holder.process.pid}/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    bounds = resource.prlimit(holder.process.pid, resource.RLIMIT_AS)
    resource.prlimit(holder.process.pid, resource.RLIMIT_AS, (size + MIB, bounds[1]))
    assert coordinator.move(0) == (0, OUT_OF_MEMORY)
    resource.prlimit(holder.process.pid, resource.RLIMIT_AS, bounds)
    assert coordinator.move(0) == (HELD, 0)
    is_whole(holder, coordinator, pointer, 2)


def test_managed_memory_obeys_its_target(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: in mode `managed` more is brought in than has room, so that others are pushed out by page faults."""
    with start({**environment, "NVSHARE_MEMORY": "managed"}) as client:
        attached(client, coordinator)
        pointer = evicted(client, coordinator)
        coordinator.target(30 * MIB, rises=True)
        coordinator.grant(2)
        stands_at(coordinator, 30 * MIB)
        assert client.ask("same", pointer, HELD, 7) is True
        coordinator.revoke(2)
        coordinator.target(30 * MIB, rises=True)
        coordinator.target(HELD)
        stands_at(coordinator, HELD)
        coordinator.target(HELD, rises=True)
        assert coordinator.move(28 * MIB) == (20 * MIB, 0)
        is_whole(client, coordinator, pointer, 3)


# --- the budget of host memory ---------------------------------------------------------------------------------------


def reserved(coordinator: ScriptedCoordinator, wanted: int, granted: int) -> None:
    """The next question about host memory, answered."""
    assert coordinator.question(messages.HOST) == wanted
    coordinator.answer(granted, messages.HOST)


def share_becomes(coordinator: ScriptedCoordinator, wanted: int) -> None:
    """The program gives back what it does not use, in one question or several."""
    size = -1
    while size != wanted:
        size = coordinator.question(messages.HOST)
        coordinator.answer(size, messages.HOST)


def with_budget(client: Client, coordinator: ScriptedCoordinator) -> None:
    """As `attached`, with a coordinator that has a budget."""
    coordinator.has_host_budget = True
    attached(client, coordinator, capacity_bytes=1 << 40)
    reserved(coordinator, 0, 0)


def test_host_memory_is_asked_for_in_steps(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: programs promise to evict to host memory that the node does not have, or keep what they do not need."""
    with start(environment) as client:
        with_budget(client, coordinator)
        client.tell(f"alloc {50 * MIB}")
        reserved(coordinator, 50 * MIB * 3 // 2, 50 * MIB * 3 // 2)
        result, first = client.result()
        assert result == 0
        assert client.ask("alloc", 12 * MIB)[0] == 0, "within the step nobody is asked"
        share_becomes(coordinator, 62 * MIB)
        client.tell(f"alloc {300 * MIB}")
        reserved(coordinator, 362 * MIB * 3 // 2, 62 * MIB)
        reserved(coordinator, 362 * MIB, 62 * MIB)
        assert client.result()[0] == OUT_OF_MEMORY
        client.tell(f"alloc {1938 * MIB}")
        reserved(coordinator, 2256 * MIB, 2256 * MIB)
        result, large = client.result()
        assert result == 0
        assert client.ask("free", large) == 0
        share_becomes(coordinator, 62 * MIB)
        assert client.ask("free", first) == 0
        share_becomes(coordinator, 12 * MIB)
        coordinator.stop()
        coordinator.received.clear()
        coordinator.restart()
        coordinator.expect(messages.Hello)
        coordinator.send(messages.Welcome(1))
        reserved(coordinator, 12 * MIB, 12 * MIB)


def test_a_share_is_not_given_back_before_it_is_taken(
    coordinator: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    """Broken: the agent returns what was just granted for a large allocation, which then finds no memory."""
    with start(environment) as client:
        with_budget(client, coordinator)
        for _ in range(5):
            client.tell(f"alloc {600 * MIB}")
            reserved(coordinator, 856 * MIB, 856 * MIB)
            result, pointer = client.result()
            assert result == 0
            assert client.ask("free", pointer) == 0
            share_becomes(coordinator, 0)


def resident_bytes(client: Client) -> int:
    """Resident memory of the whole process."""
    pages = int(Path(f"/proc/{client.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_is_made_ready(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: the first eviction has to find its memory first."""
    before = resident_bytes(client)
    result, pointer = client.ask("alloc", HELD)
    assert result == 0
    assert resident_bytes(client) < before + HELD // 2, "nothing before it is asked for"
    coordinator.settings(capacity_bytes=256 * MIB, prepare_host_bytes=HELD)
    eventually(lambda: resident_bytes(client) >= before + HELD, "host memory is there")
    coordinator.settings(capacity_bytes=256 * MIB, prepare_host_bytes=HELD * 1000, prepare_now=True)
    while coordinator.expect(messages.State).prepared_bytes < HELD:
        pass
    assert client.ask("free", pointer) == 0
    assert resident_bytes(client) < before + 2 * HELD, "never more than could be needed"
