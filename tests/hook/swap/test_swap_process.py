"""Memory mode `swap` in a real process: the whole hook over the simulated GPU, told by a scripted coordinator.

The simulated GPU keeps what is in a chunk with the chunk: what was not copied before it was released is lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, finished, reported, start, until
from tests.hook.scripted import ScriptedCoordinator

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CAPACITY = 256 * MIB


def settings(
    coordinator: ScriptedCoordinator, capacity: int = CAPACITY, reserve: bool = False, pacing: int = 0
) -> None:
    """GpuSettings for GPU 0."""
    coordinator.settings(capacity_bytes=capacity, reserve=reserve, pacing_budget_ns=pacing)


def attached(client: Client, coordinator: ScriptedCoordinator, **values: Any) -> None:
    """Has the program use its GPU for the first time."""
    assert client.ask("start") == 0
    client.tell("info")
    coordinator.expect(messages.Hello)
    coordinator.send(messages.Welcome(messages.PROTOCOL_VERSION, 1))
    coordinator.expect(messages.AttachGpu)
    settings(coordinator, **values)
    if not any(isinstance(message, messages.ReserveHost) for message in coordinator.received):
        coordinator.expect(messages.ReserveHost)
    assert client.result()[0] == 0


def hold(client: Client, coordinator: ScriptedCoordinator) -> None:
    """The first lease; returns when the program knows of it, for an allocation without a lease goes another way."""
    coordinator.grant(1)
    assert client.ask("held") == 0


def order(
    coordinator: ScriptedCoordinator, kind: type[messages.Evict] | type[messages.Restore], number: int, size: int
) -> tuple[int, int]:
    """(bytes moved, CUresult) of an order."""
    coordinator.send(kind(gpu=0, order_id=number, bytes=size))
    return finished(coordinator, number)


def last_report(coordinator: ScriptedCoordinator) -> messages.MemoryReport:
    """The newest report that was read."""
    return [m for m in coordinator.received if isinstance(m, messages.MemoryReport)][-1]


def test_data_survives_eviction(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: a client's bytes differ after a switch, or it claims to have made room that it did not make."""
    sizes = {1: 3 * MIB, 2: 96 * MIB, 3: 4097, 4: 1}
    pointers = {}
    for seed, size in sizes.items():
        result, pointers[seed] = holder.ask("alloc", size)
        assert result == 0
        assert holder.ask("write", pointers[seed], size, seed) == 0
    coordinator.revoke(1)
    held = 4 * MIB + 96 * MIB + 2 * MIB
    report = last_report(coordinator)
    assert (report.allocated_bytes, report.resident_bytes, report.pinned_bytes) == (held, held, 0)
    assert order(coordinator, messages.Evict, 5, held) == (held, 0)
    assert reported(coordinator, resident=0).host_bytes == held
    assert order(coordinator, messages.Restore, 6, held) == (held, 0)
    coordinator.grant(2)
    for seed, size in sizes.items():
        assert holder.ask("same", pointers[seed], size, seed) is True
        assert holder.ask("free", pointers[seed]) == 0
    assert holder.ask("info")[1] == CAPACITY


def test_an_allocation_without_a_lease_takes_no_memory_of_the_card(
    coordinator: ScriptedCoordinator, client: Client
) -> None:
    """Broken: a program that waits takes the card from the one that runs, or has the lease without its memory."""
    result, pointer = client.ask("alloc", 100 * MIB)
    assert result == 0
    assert reported(coordinator, resident=0).allocated_bytes == 100 * MIB
    client.tell(f"write {pointer} {100 * MIB} 7")
    coordinator.expect(messages.Request)
    assert last_report(coordinator).host_bytes == 100 * MIB, "else nothing would be ordered to be restored"
    assert order(coordinator, messages.Restore, 1, 100 * MIB) == (100 * MIB, 0)
    coordinator.grant(1)
    assert client.result() == 0
    assert client.ask("same", pointer, 100 * MIB, 7) is True
    assert reported(coordinator, resident=100 * MIB).host_bytes == 0


def test_the_gate_opens_with_all_memory_there(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: a grant without a restoration lets a kernel run into memory that is not mapped."""
    _, pointer = holder.ask("alloc", 80 * MIB)
    assert holder.ask("write", pointer, 80 * MIB, 3) == 0
    coordinator.revoke(1)
    assert order(coordinator, messages.Evict, 1, 30 * MIB)[1] == 0
    coordinator.grant(2)
    assert holder.ask("same", pointer, 80 * MIB, 3) is True


def test_without_room_the_lease_goes_back(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: the program hangs for ever, or runs without its memory, when somebody else has taken the card."""
    crowded = {**environment, "NVSHARE_SIM_FAULTS": "cuMemCreate@2-=2"}
    with start(crowded, tmp_path) as client:
        attached(client, coordinator, capacity=1 << 40)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", 60 * MIB)
        assert client.ask("write", pointer, 60 * MIB, 3) == 0
        assert client.ask("alloc", 60 * MIB)[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        moved, error = order(coordinator, messages.Evict, 1, 60 * MIB)
        assert (moved, error) == (60 * MIB, 0)
        assert order(coordinator, messages.Restore, 2, 60 * MIB) == (0, OUT_OF_MEMORY)
        coordinator.grant(2)
        assert coordinator.expect(messages.Release).lease_id == 2, "so that others may make room"
        assert client.ask("free", pointer) == 0, "who has nothing to wait for does not"
        coordinator.grant(3)
        assert client.ask("info")[1] == 1 << 40 or client.ask("synchronize") == 0


def test_growth_under_a_lease_asks_for_room(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a client takes memory while it runs that the coordinator has promised to others."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator, reserve=True)
        _, first = client.ask("alloc", 2 * MIB)
        client.tell(f"write {first} {2 * MIB} 1")
        coordinator.expect(messages.Request)
        assert order(coordinator, messages.Restore, 1, 2 * MIB) == (2 * MIB, 0)
        coordinator.grant(1)
        assert client.result() == 0, "from here on the program knows that it holds the lease"
        client.tell(f"alloc {100 * MIB}")
        asked = coordinator.expect(messages.ReserveMemory)
        assert 102 * MIB <= asked.bytes <= 106 * MIB
        coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=asked.bytes))
        assert client.result()[0] == 0
        client.tell(f"alloc {20 * MIB}")
        for exact in (False, True):
            asked = coordinator.expect(messages.ReserveMemory)
            assert not exact or asked.bytes == 122 * MIB
            coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=102 * MIB))
            if asked.bytes == 122 * MIB:
                break
        assert client.result()[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        assert last_report(coordinator).allocated_bytes == 102 * MIB
        assert client.ask("alloc", 20 * MIB)[0] == 0, "without a lease nobody needs to be asked"


def test_what_comes_in_at_a_grant_asks_for_room(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: granted without its memory (a late switch), a client brings it in beside what others have there."""
    _, pointer = holder.ask("alloc", 60 * MIB)
    assert holder.ask("write", pointer, 60 * MIB, 5) == 0
    coordinator.revoke(1)
    assert order(coordinator, messages.Evict, 1, 60 * MIB) == (60 * MIB, 0)
    settings(coordinator, reserve=True)
    holder.tell(f"same {pointer} {60 * MIB} 5")
    coordinator.expect(messages.Request)
    coordinator.grant(2)
    for _ in range(2):  # in a whole step, and then no more than is needed
        asked = coordinator.expect(messages.ReserveMemory)
        assert 60 * MIB <= asked.bytes <= 64 * MIB
        coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=0))
        if asked.bytes == 60 * MIB:
            break
    assert coordinator.expect(messages.Release).lease_id == 2, "refused: the lease goes back, so that room is made"
    assert last_report(coordinator).resident_bytes == 0
    coordinator.grant(3)
    asked = coordinator.expect(messages.ReserveMemory)
    coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=asked.bytes))
    assert holder.result() is True


def test_what_could_not_be_evicted_is_not_admitted(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: memory is handed out for which there is no place on the host when another program's turn comes."""
    with start({**environment, "NVSHARE_HOST_LIMIT": "64MiB"}, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, pointer = client.ask("alloc", 50 * MIB)
        assert client.ask("alloc", 50 * MIB)[0] == OUT_OF_MEMORY
        assert client.ask("free", pointer) == 0
        _, pointer = client.ask("alloc", 60 * MIB)
        assert client.ask("write", pointer, 60 * MIB, 3) == 0
        assert client.ask("alloc", 60 * MIB)[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        assert order(coordinator, messages.Evict, 1, 60 * MIB) == (60 * MIB, 0)
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
            assert order(coordinator, messages.Evict, 1, GIB)[1] == 0


def test_a_reset_gives_everything_back(holder: Client) -> None:
    """Broken: memory that the driver would have freed with its context is lost until the program ends."""
    for size in (100 * MIB, 1000, 3 * MIB):
        assert holder.ask("alloc", size)[0] == 0
    assert holder.ask("async", 5 * MIB)[0] == 0
    assert holder.ask("reset") == 0
    assert holder.ask("info")[1] == CAPACITY
    assert holder.ask("alloc", CAPACITY)[0] == 0


def test_stream_ordered_memory(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: stream-ordered memory is lost in an eviction, freed twice, or spoils a capture."""
    result, pointer = holder.ask("async", 2 * MIB)
    assert result == 0
    assert holder.ask("write", pointer, 2 * MIB, 9) == 0
    coordinator.revoke(1)
    assert order(coordinator, messages.Evict, 1, GIB)[1] == 0
    coordinator.grant(2)
    assert holder.ask("same", pointer, 2 * MIB, 9) is True
    assert holder.ask("free_async", pointer) == 0
    assert holder.ask("async", 2 * MIB) == [0, pointer], "its own stream has it again at once"
    assert holder.ask("free_async", pointer) == 0
    assert holder.ask("synchronize") == 0
    assert holder.ask("capture", 1) == 0
    result, pointer = holder.ask("async", MIB)
    assert result == 0
    assert holder.ask("free_async", pointer) == 0
    assert holder.ask("capture", 0) == 0, "the capture is still valid"
    until(holder, "info", [0, CAPACITY, CAPACITY, CAPACITY])


def test_threads_and_forks(holder: Client) -> None:
    """Broken: concurrent allocation loses bytes, or a forked child hangs in the hook."""
    assert holder.ask("storm", 4, 200) == 0
    assert holder.ask("info")[1] == CAPACITY
    assert holder.ask("alloc", MIB)[0] == 0
    assert holder.ask("fork") == 0
    assert holder.ask("info")[1] == CAPACITY - MIB


def test_data_survives_many_partial_moves(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: some order of evictions, restorations, allocations and frees loses bytes or miscounts them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    held: dict[int, tuple[int, int]] = {}
    for turn in range(1, 41):
        coordinator.grant(turn)
        assert turn > 1 or client.ask("held") == 0
        for number, (pointer, size) in list(held.items()):
            assert client.ask("same", pointer, size, number) is True, f"seed {seed}, turn {turn}"
            if dice.random() < 0.3:
                assert client.ask(dice.choice(["free", "free_async"]), pointer) == 0
                del held[number]
        for number in range(turn * 10, turn * 10 + 3):
            size = dice.choice([1, 700, 70_000, 1_900_000, 3 * MIB + 1, 9 * MIB])
            result, pointer = client.ask(dice.choice(["alloc", "async"]), size)
            assert result == 0
            assert client.ask("write", pointer, size, number) == 0
            held[number] = pointer, size
        assert client.ask("synchronize") == 0
        coordinator.revoke(turn)
        partial_moves(coordinator, dice, turn)
        for number in [n for n in held if dice.random() < 0.1]:  # without a lease, wherever it is
            assert client.ask("free", held.pop(number)[0]) == 0
    coordinator.grant(1000)
    for pointer, _ in held.values():
        assert client.ask("free", pointer) == 0
    until(client, "info", [0, CAPACITY, CAPACITY, CAPACITY])


def partial_moves(coordinator: ScriptedCoordinator, dice: random.Random, turn: int) -> None:
    """An eviction and a restoration of anything up to everything; what is told agrees."""
    before = last_report(coordinator)
    wanted = dice.randrange(1, 2 * before.allocated_bytes)
    out, error = order(coordinator, messages.Evict, 2 * turn, wanted)
    after = last_report(coordinator)
    assert error == 0
    assert out >= min(wanted, before.resident_bytes - before.pinned_bytes)
    assert out < wanted + 32 * MIB
    assert after.resident_bytes == before.resident_bytes - out
    wanted = dice.randrange(1, 2 * before.allocated_bytes)
    back, error = order(coordinator, messages.Restore, 2 * turn + 1, wanted)
    assert error == 0
    assert back <= wanted
    assert last_report(coordinator).resident_bytes == after.resident_bytes + back


CALLS = (
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAddressReserve", "cuMemcpyDtoHAsync"),
    *("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuEventCreate", "cuStreamCreate"),
    *("cuMemHostRegister",),
)


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_call_loses_no_data(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, function: str
) -> None:
    """Broken: one refusal of the driver costs data, or leaves the figures wrong for good."""
    with start({**environment, "NVSHARE_SIM_FAULTS": f"{function}@%11=999"}, tmp_path) as client:
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
        numbers = iter(range(1, 1000))
        for _ in range(4):
            everything = last_report(coordinator).allocated_bytes
            settle(coordinator, messages.Evict, numbers, everything, resident=0)
            settle(coordinator, messages.Restore, numbers, everything, resident=everything)
        coordinator.grant(2)
        for pointer, size, number in held:
            assert any(client.ask("same", pointer, size, number) for _ in range(3)), number
        for pointer, _, _ in held:
            assert client.ask("free", pointer) == 0


def test_the_memory_of_a_full_card_can_leave(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a program that has filled the card can never be evicted, as the driver makes no stream on a full card."""
    card = {"NVSHARE_SIMULATE": "1x258MiB", "NVSHARE_SIM_CONTEXT_BYTES": str(2 * MIB)}
    with start(environment | card, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        result, pointer = client.ask("alloc", CAPACITY)
        assert result == 0
        assert client.ask("write", pointer, CAPACITY, 3) == 0
        coordinator.revoke(1)
        assert order(coordinator, messages.Evict, 1, CAPACITY) == (CAPACITY, 0)


def settle(
    coordinator: ScriptedCoordinator,
    kind: type[messages.Evict] | type[messages.Restore],
    numbers: Iterator[int],
    size: int,
    *,
    resident: int,
) -> None:
    """Gives an order again and again until all has moved; in between the figures fit what was told to have moved."""
    for _ in range(40):
        before = last_report(coordinator).resident_bytes
        moved, error = order(coordinator, kind, next(numbers), size)
        after = last_report(coordinator).resident_bytes
        assert after == before - moved if kind is messages.Evict else after == before + moved
        if after == resident:
            return
        assert error != 0
        print(kind.__name__, before, moved, error, after)
    pytest.fail("it never all moved")
