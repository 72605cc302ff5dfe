"""Memory mode `swap` in a real process: the whole hook over the simulated GPU, told by a scripted coordinator.

The simulated GPU keeps what is in a chunk with the chunk: what was not copied before it was released is lost.
"""

from __future__ import annotations

from typing import Any

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory import test_memory_process
from tests.hook.memory.test_memory_process import Client, reported, start, until
from tests.hook.scripted import ScriptedCoordinator

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CAPACITY = 256 * MIB


def attached(client: Client, coordinator: ScriptedCoordinator, **settings: Any) -> None:
    """Has the program use its GPU for the first time, on a card of CAPACITY."""
    test_memory_process.attached(client, coordinator, **{"capacity_bytes": CAPACITY} | settings)


def hold(client: Client, coordinator: ScriptedCoordinator) -> None:
    """The first lease; returns when the program knows of it, for an allocation without a lease goes another way."""
    coordinator.grant(1)
    assert client.ask("held") == 0


def test_an_allocation_without_a_lease_takes_no_memory_of_the_card(
    coordinator: ScriptedCoordinator, client: Client
) -> None:
    """Broken: a program that waits takes the card from the one that runs, or has the lease without its memory."""
    result, pointer = client.ask("alloc", 100 * MIB)
    assert result == 0
    assert reported(coordinator, resident=0).allocated_bytes == 100 * MIB
    client.tell(f"write {pointer} {100 * MIB} 7")
    coordinator.expect(messages.Request)
    assert coordinator.state().host_bytes == 100 * MIB, "else nothing would be ordered to be restored"
    assert coordinator.restore(100 * MIB) == (100 * MIB, 0)
    coordinator.grant(1)
    assert client.result() == 0
    assert client.ask("same", pointer, 100 * MIB, 7) is True
    assert reported(coordinator, resident=100 * MIB).host_bytes == 0


def test_without_room_the_lease_goes_back(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: the program hangs for ever, or runs without its memory, when somebody else has taken the card."""
    crowded = {**environment, "NVSHARE_SIM_FAULTS": "cuMemCreate@2-=2"}
    with start(crowded) as client:
        attached(client, coordinator, capacity_bytes=1 << 40)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", 60 * MIB)
        assert client.ask("write", pointer, 60 * MIB, 3) == 0
        assert client.ask("alloc", 60 * MIB)[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        moved, error = coordinator.evict(60 * MIB)
        assert (moved, error) == (60 * MIB, 0)
        assert coordinator.restore(60 * MIB) == (0, OUT_OF_MEMORY)
        coordinator.grant(2)
        assert coordinator.expect(messages.Release).lease_id == 2, "so that others may make room"
        assert client.ask("free", pointer) == 0, "who has nothing to wait for does not"
        coordinator.grant(3)
        assert client.ask("info")[1] == 1 << 40 or client.ask("synchronize") == 0


def test_growth_under_a_lease_asks_for_room(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: a client takes memory while it runs that the coordinator has promised to others."""
    with start(environment) as client:
        attached(client, coordinator, reserve=True)
        _, first = client.ask("alloc", 2 * MIB)
        client.tell(f"write {first} {2 * MIB} 1")
        coordinator.expect(messages.Request)
        assert coordinator.restore(2 * MIB) == (2 * MIB, 0)
        coordinator.grant(1)
        assert client.result() == 0, "from here on the program knows that it holds the lease"
        client.tell(f"alloc {100 * MIB}")
        asked = coordinator.question()
        assert 102 * MIB <= asked <= 106 * MIB
        coordinator.answer(asked)
        assert client.result()[0] == 0
        client.tell(f"alloc {20 * MIB}")
        for exact in (False, True):
            asked = coordinator.question()
            assert not exact or asked == 122 * MIB
            coordinator.answer(102 * MIB)
            if asked == 122 * MIB:
                break
        assert client.result()[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        assert coordinator.state().allocated_bytes == 102 * MIB
        assert coordinator.state().error == 0, "an answer is no target"
        assert client.ask("alloc", 20 * MIB)[0] == 0, "without a lease nobody needs to be asked"


def test_what_comes_in_at_a_grant_asks_for_room(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: granted without its memory (a late switch), a client brings it in beside what others have there."""
    _, pointer = holder.ask("alloc", 60 * MIB)
    assert holder.ask("write", pointer, 60 * MIB, 5) == 0
    coordinator.revoke(1)
    assert coordinator.evict(60 * MIB) == (60 * MIB, 0)
    coordinator.settings(capacity_bytes=CAPACITY, reserve=True)
    holder.tell(f"same {pointer} {60 * MIB} 5")
    coordinator.expect(messages.Request)
    coordinator.grant(2)
    for _ in range(2):  # in a whole step, and then no more than is needed
        asked = coordinator.question()
        assert 60 * MIB <= asked <= 64 * MIB
        coordinator.answer(0)
        if asked == 60 * MIB:
            break
    assert coordinator.expect(messages.Release).lease_id == 2, "refused: the lease goes back, so that room is made"
    assert coordinator.state().resident_bytes == 0
    coordinator.grant(3)
    coordinator.answer(coordinator.question())
    assert holder.result() is True


def test_what_could_not_be_evicted_is_not_admitted(
    coordinator: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    """Broken: memory is handed out for which there is no place on the host when another program's turn comes."""
    with start({**environment, "NVSHARE_HOST_LIMIT": "64MiB"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", 50 * MIB)
        assert client.ask("alloc", 50 * MIB)[0] == OUT_OF_MEMORY
        assert client.ask("free", pointer) == 0
        _, pointer = client.ask("alloc", 60 * MIB)
        assert client.ask("write", pointer, 60 * MIB, 3) == 0
        assert client.ask("alloc", 60 * MIB)[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        assert coordinator.evict(60 * MIB) == (60 * MIB, 0)
        coordinator.grant(2)
        assert client.ask("same", pointer, 60 * MIB, 3) is True


def test_pointers_look_like_plain_device_memory(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: a framework that asks about a pointer gets another answer while its memory is evicted."""
    memory_type, host_pointer, is_managed, ordinal, ipc_capable, start_of, size_of = 2, 4, 8, 9, 10, 11, 12
    _, pointer = holder.ask("alloc", 5 * MIB)
    _, small = holder.ask("alloc", 1000)
    for turn in range(2):
        inside = pointer + MIB + 3
        assert holder.ask("attribute", is_managed, inside) == [0, 0, 0, 0]
        assert holder.ask("attribute", memory_type, inside) == [0, 2, 0, 2]
        assert holder.ask("attribute", ordinal, inside) == [0, 0, 0, 0]
        assert holder.ask("attribute", ipc_capable, inside) == [0, 1, 0, 1]
        assert holder.ask("attribute", start_of, inside) == [0, pointer, 0, pointer]
        assert holder.ask("attribute", size_of, small + 999) == [0, 1000, 0, 1000]
        assert holder.ask("attribute", host_pointer, inside)[0] == INVALID_VALUE
        assert holder.ask("range", inside) == [0, pointer, 5 * MIB]
        assert holder.ask("range", small + 1) == [0, small, 1000]
        if turn == 0:
            coordinator.revoke(1)
            assert coordinator.evict(GIB)[1] == 0


CALLS = (
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAddressReserve", "cuMemcpyDtoHAsync"),
    *("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuEventCreate", "cuStreamCreate"),
    *("cuMemHostRegister",),
)


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_call_loses_no_data(
    coordinator: ScriptedCoordinator, environment: dict[str, str], function: str
) -> None:
    """Broken: one refusal of the driver costs data, or leaves the figures wrong for good."""
    with start({**environment, "NVSHARE_SIM_FAULTS": f"{function}@%11=999"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        held = []
        for number in range(12):
            size = 5 * MIB + number
            result, pointer = client.ask("alloc", size)
            if result == 0 and client.ask("write", pointer, size, number) == 0:
                held.append((pointer, size, number))
            elif result == 0:
                assert client.ask("free", pointer) == 0
        assert held
        coordinator.revoke(1)
        for _ in range(2):
            everything = coordinator.state().allocated_bytes
            settle(coordinator, resident=0)
            settle(coordinator, resident=everything)
        coordinator.grant(2)
        for pointer, size, number in held:
            assert any(client.ask("same", pointer, size, number) for _ in range(3)), number
        for pointer, _, _ in held:
            assert client.ask("free", pointer) == 0


def test_the_memory_of_a_full_card_can_leave(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: a program that has filled the card can never be evicted, as the driver makes no stream on a full card."""
    card = {"NVSHARE_SIMULATE": "1x258MiB", "NVSHARE_SIM_CONTEXT_BYTES": str(2 * MIB)}
    with start(environment | card) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        result, pointer = client.ask("alloc", CAPACITY)
        assert result == 0
        assert client.ask("write", pointer, CAPACITY, 3) == 0
        coordinator.revoke(1)
        assert coordinator.evict(CAPACITY) == (CAPACITY, 0)


def settle(coordinator: ScriptedCoordinator, *, resident: int) -> None:
    """Sets a target again and again until it is reached; in between the figures fit what was told to have moved."""
    for _ in range(40):
        before = coordinator.state().resident_bytes
        moved, error = coordinator.move(resident)
        after = coordinator.state().resident_bytes
        assert abs(after - before) == moved
        if after == resident:
            return
        assert error != 0
        print(resident, before, moved, error, after)
    pytest.fail("it never all moved")


def test_what_may_be_refused_is_in_no_report(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a program reports memory that it waits for, is taken to have it, and gets it beyond its slot's limit."""
    coordinator.settings(capacity_bytes=CAPACITY, limit=64 * MIB, reserve=True, limit_of_slot=True)
    until(client, "info", [0, 64 * MIB, 64 * MIB, 64 * MIB])
    client.tell(f"alloc {16 * MIB}")
    for number, allowed in ((1, False), (2, False), (3, True)):
        asked = coordinator.question()
        assert asked >= 16 * MIB
        coordinator.evict(MIB)  # its end reports the memory
        assert coordinator.state().allocated_bytes == 0
        coordinator.answer(asked if allowed else 0)
        if number == 2:
            assert client.result()[0] == OUT_OF_MEMORY
            client.tell(f"alloc {16 * MIB}")
    assert client.result()[0] == 0
    coordinator.evict(MIB)
    assert coordinator.state().allocated_bytes == 16 * MIB
