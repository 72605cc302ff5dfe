"""Orders to move memory while other things happen: credit, grants, lost connections, ends of contexts and processes.

A restoration without credit stands still for as long as a test wants, with the mover in the middle of it.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, finished, last_report, order, start, until
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.test_swap_process import MIB, OUT_OF_MEMORY, attached, hold, settings
from tests.waiting import eventually

HELD = 48 * MIB
FAILED = 999
LOST_DEVICE = 46


def evicted(client: Client, coordinator: ScriptedCoordinator) -> int:
    """Its memory, written and off the GPU; returns where it is."""
    hold(client, coordinator)
    result, pointer = client.ask("alloc", HELD)
    assert result == 0
    assert client.ask("write", pointer, HELD, 7) == 0
    coordinator.revoke(1)
    assert order(coordinator, messages.Evict, 1, HELD) == (HELD, 0)
    return int(pointer)


def restore(coordinator: ScriptedCoordinator, number: int, credit: int) -> None:
    """Everything, of which so much has room."""
    coordinator.send(messages.Restore(gpu=0, order_id=number, bytes=HELD, credit_bytes=credit))


def is_whole(client: Client, coordinator: ScriptedCoordinator, pointer: int, lease: int) -> None:
    """With a new lease all data is there."""
    coordinator.grant(lease)
    assert client.ask("same", pointer, HELD, 7) is True


def test_no_more_comes_in_than_there_is_credit_for(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: two programs have more on the card than fits, or a grant waits for credit that never comes."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 30 * MIB)
    coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=41 * MIB))
    coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=10 * MIB))  # it never shrinks
    coordinator.send(messages.MoveCredit(gpu=0, order_id=99, credit_bytes=HELD))  # of no order that there is
    coordinator.grant(2)
    assert finished(coordinator, 2) == (40 * MIB, 0)
    assert client.ask("same", pointer, HELD, 7) is True


def test_credit_lets_it_go_on_to_the_end(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a restoration stands still although the room is there, or everything else waits for it."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 0)
    settings(coordinator, capacity=200 * MIB)
    until(client, "info", [0, 200 * MIB - HELD, 200 * MIB, 200 * MIB])
    assert client.ask("alloc", 10 * MIB)[0] == 0, "without a lease, beside the move"
    for credit in range(0, HELD + 1, 16 * MIB):
        coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=credit))
    assert finished(coordinator, 2) == (HELD, 0)
    is_whole(client, coordinator, pointer, 2)


def stands_at(coordinator: ScriptedCoordinator, number: int, moved: int) -> None:
    """The restoration has moved so much and goes no further, as its credit does not rise."""
    while (told := coordinator.expect(messages.MoveProgress)).moved_bytes != moved:
        assert told.moved_bytes < moved
    assert (told.order_id, told.finished) == (number, False)


def test_credit_that_comes_late(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a mover that has waited long enough for more credit does not go on when it comes."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 17 * MIB)
    stands_at(coordinator, 2, 16 * MIB)
    coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=29 * MIB))
    stands_at(coordinator, 2, 28 * MIB)
    coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=HELD))
    assert finished(coordinator, 2) == (HELD, 0)
    is_whole(client, coordinator, pointer, 2)


def test_another_order_ends_the_waiting(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: an eviction stands behind a restoration that waits for the room which it is to make, or leaves what came
    in meanwhile."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 17 * MIB)
    stands_at(coordinator, 2, 16 * MIB)
    coordinator.send(messages.Evict(gpu=0, order_id=3, bytes=HELD))
    assert finished(coordinator, 2) == (16 * MIB, 0)
    assert finished(coordinator, 3) == (16 * MIB, 0)
    for number in range(4, 24, 2):  # at any moment of a restoration
        restore(coordinator, number, 17 * MIB)
        coordinator.send(messages.Evict(gpu=0, order_id=number + 1, bytes=HELD))
        brought, error = finished(coordinator, number)
        assert (brought <= 16 * MIB, error) == (True, 0)
        assert finished(coordinator, number + 1)[1] == 0
        assert last_report(coordinator).resident_bytes == 0
    is_whole(client, coordinator, pointer, 2)


def test_orders_that_cross(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: an order that comes while memory moves costs data, or is answered twice or never."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    pointer = evicted(client, coordinator)
    for number in range(10, 50):
        if dice.random() < 0.5:
            coordinator.send(messages.Evict(gpu=0, order_id=number, bytes=dice.randrange(HELD)))
            continue
        restore(coordinator, number, dice.randrange(HELD))
        for credit in (dice.randrange(HELD), HELD):
            coordinator.send(messages.MoveCredit(gpu=0, order_id=number, credit_bytes=credit))
    coordinator.send(messages.Evict(gpu=0, order_id=50, bytes=HELD))
    for number in range(10, 51):
        assert finished(coordinator, number)[1] == 0
    assert last_report(coordinator).resident_bytes == 0
    is_whole(client, coordinator, pointer, 2)


def test_a_lost_coordinator_ends_it(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: after a coordinator's restart the mover waits for its predecessor, or memory is lost or miscounted."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 9 * MIB)
    coordinator.stop()
    coordinator.received.clear()
    coordinator.restart()
    attach = coordinator.welcome()
    assert attach.allocated_bytes == HELD
    assert attach.resident_bytes <= 8 * MIB
    is_whole(client, coordinator, pointer, 2)
    coordinator.revoke(2)
    assert not any(isinstance(message, messages.MoveProgress) for message in coordinator.received)
    assert order(coordinator, messages.Evict, 5, HELD) == (HELD, 0)


def test_a_context_may_end_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a program that resets its device hangs until somebody else makes room."""
    evicted(client, coordinator)
    restore(coordinator, 2, 5 * MIB)
    client.tell("reset")
    assert finished(coordinator, 2)[0] <= 4 * MIB
    assert client.result() == 0
    until(client, "info", [0, 256 * MIB, 256 * MIB, 256 * MIB])


def test_memory_may_be_freed_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: what a program gives back while it moves is counted for ever, or used after it is gone."""
    pointer = evicted(client, coordinator)
    restore(coordinator, 2, 9 * MIB)
    assert client.ask("free", pointer) == 0
    coordinator.send(messages.MoveCredit(gpu=0, order_id=2, credit_bytes=HELD))
    assert finished(coordinator, 2)[1] == 0
    coordinator.grant(2)
    assert client.ask("alloc", 256 * MIB)[0] == 0, "all of the card is free again"
    coordinator.revoke(2)
    assert last_report(coordinator).allocated_bytes == 256 * MIB


def test_forks_and_exits_meanwhile(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: the child of a fork inherits a lock that nobody opens, or exit() waits for the mover."""
    evicted(client, coordinator)
    restore(coordinator, 2, 5 * MIB)
    assert client.ask("fork") == 0
    assert client.finish()[0] == 0


def test_a_lost_device_ends_every_order(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: with the card gone a program hangs, or claims to have made room."""
    calls = ("cuMemcpyDtoHAsync@9-", "cuEventSynchronize@9-", "cuStreamSynchronize", "cuMemUnmap", "cuMemCreate@30-")
    faults = ",".join(f"{call}={LOST_DEVICE}" for call in calls)
    with start({**environment, "NVSHARE_SIM_FAULTS": faults}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", HELD)
        assert client.ask("write", pointer, HELD, 7) == 0
        coordinator.revoke(1)
        before = last_report(coordinator).resident_bytes
        moved, error = order(coordinator, messages.Evict, 1, HELD)
        assert error == FAILED
        assert moved < HELD
        assert last_report(coordinator).resident_bytes == before - moved
        assert order(coordinator, messages.Restore, 2, HELD)[1] == 0, "nothing had left"
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
    moved, error = order(coordinator, messages.Evict, 1, HELD)
    assert (moved, error) == (0, OUT_OF_MEMORY)
    resource.prlimit(holder.process.pid, resource.RLIMIT_AS, bounds)
    assert order(coordinator, messages.Evict, 2, HELD) == (HELD, 0)
    is_whole(holder, coordinator, pointer, 2)


def test_managed_memory_obeys_credit(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: in mode `managed` more is brought in than has room, so that others are pushed out by page faults."""
    with start({**environment, "NVSHARE_MEMORY": "managed"}) as client:
        assert client.ask("start") == 0
        client.tell("info")
        coordinator.welcome()
        assert client.result()[0] == 0
        pointer = evicted(client, coordinator)
        restore(coordinator, 2, 30 * MIB)
        coordinator.grant(2)
        assert finished(coordinator, 2) == (30 * MIB, 0)
        assert client.ask("same", pointer, HELD, 7) is True
        coordinator.revoke(2)
        restore(coordinator, 3, 0)
        coordinator.send(messages.MoveCredit(gpu=0, order_id=3, credit_bytes=HELD))
        _, error = finished(coordinator, 3)
        assert (last_report(coordinator).resident_bytes, error) == (HELD, 0)
        restore(coordinator, 4, 0)
        coordinator.send(messages.Evict(gpu=0, order_id=5, bytes=20 * MIB))
        assert finished(coordinator, 4) == (0, 0)
        assert finished(coordinator, 5) == (20 * MIB, 0)
        is_whole(client, coordinator, pointer, 3)


# --- the budget of host memory ---------------------------------------------------------------------------------------


def reserved(coordinator: ScriptedCoordinator, wanted: int, granted: int) -> None:
    """The next question about host memory, answered."""
    asked = coordinator.expect(messages.ReserveHost)
    assert asked.bytes == wanted
    coordinator.send(messages.HostReserved(sequence=asked.sequence, bytes=granted))


def share_becomes(coordinator: ScriptedCoordinator, wanted: int) -> None:
    """The program gives back what it does not use, in one question or several."""
    size = -1
    while size != wanted:
        asked = coordinator.expect(messages.ReserveHost)
        size = asked.bytes
        coordinator.send(messages.HostReserved(sequence=asked.sequence, bytes=size))


def with_budget(client: Client, coordinator: ScriptedCoordinator) -> None:
    """As `attached`, with a coordinator that has a budget."""
    coordinator.has_host_budget = True
    attached(client, coordinator, capacity=1 << 40)
    first = next(message for message in coordinator.received if isinstance(message, messages.ReserveHost))
    assert first.bytes == 0
    coordinator.send(messages.HostReserved(sequence=first.sequence, bytes=0))


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
        coordinator.send(messages.Welcome(messages.PROTOCOL_VERSION, 1))
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
    while coordinator.expect(messages.MemoryReport).prepared_bytes < HELD:
        pass
    assert client.ask("free", pointer) == 0
    assert resident_bytes(client) < before + 2 * HELD, "never more than could be needed"
