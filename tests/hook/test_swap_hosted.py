"""Memory that is used from the host for want of room on the GPU: oversubscription, and a bound on what is resident.

May not go here: moving between programs (test_swap_process.py).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import BOUND_S, ScriptedCoordinator
from tests.hook.test_memory_process import Client, reported, start, until
from tests.hook.test_swap_process import CAPACITY, GIB, MIB, attached, environment, hold, last_report, order, settle
from tests.hook.test_swap_vmm import mapped

__all__ = ["environment"]

OUT_OF_MEMORY = 2


@pytest.fixture
def oversubscribed(environment: dict[str, str]) -> dict[str, str]:
    """What `nvshare-run --oversubscribe` sets."""
    return {**environment, "NVSHARE_OVERSUBSCRIBE": "1", "NVSHARE_SIMULATE": "1x256MiB"}


def bound(coordinator: ScriptedCoordinator, resident: int, limit: int = 0) -> None:
    """GpuSettings with a bound on what may be resident."""
    coordinator.send(
        messages.GpuSettings(
            gpu=0, memory_limit_bytes=limit, capacity_bytes=CAPACITY, reserve=False, pacing_budget_ns=0,
            idle_release_ns=0, drain_deadline_ns=10**10, sharing=0, resident_limit_bytes=resident,
        )
    )  # fmt: skip


def stranger(environment: dict[str, str], tmp_path: Path) -> Client:
    """The same program on the same card without the hook, with a context."""
    elsewhere = tmp_path / "stranger"
    elsewhere.mkdir()
    client = start({k: v for k, v in environment.items() if k not in {"LD_PRELOAD", "NVSHARE_SOCKET"}}, elsewhere)
    assert client.ask("start") == 0
    return client


def filled(client: Client, sizes: dict[int, int]) -> dict[int, int]:
    """Allocations with contents: seed -> pointer."""
    pointers = {}
    for seed, size in sizes.items():
        result, pointers[seed] = client.ask("alloc", size)
        assert result == 0
        assert client.ask("write", pointers[seed], size, seed) == 0
    return pointers


def intact(client: Client, sizes: dict[int, int], pointers: dict[int, int]) -> None:
    """Every allocation holds what was written to it."""
    for seed, size in sizes.items():
        assert client.ask("same", pointers[seed], size, seed) is True, seed


def test_one_program_may_have_more_than_the_card(
    coordinator: ScriptedCoordinator, oversubscribed: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a program that asked for it runs out of memory at the card's size, or its data is lost beyond it."""
    sizes = {1: 150 * MIB, 2: 200 * MIB, 3: 5000, 4: 40 * MIB}
    held = 150 * MIB + 200 * MIB + 2 * MIB + 40 * MIB
    with start(oversubscribed, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        pointers = filled(client, sizes)
        assert client.ask("info")[1:3] == [0, CAPACITY], "the card looks as large as it is, and full"
        coordinator.revoke(1)
        report = last_report(coordinator)
        assert (report.allocated_bytes, report.resident_bytes) == (held, CAPACITY)
        assert (report.mapped_bytes, report.host_bytes) == (held - CAPACITY, held - CAPACITY)
        assert order(coordinator, messages.Evict, 1, GIB) == (CAPACITY, 0), "what is on the host already costs nothing"
        assert reported(coordinator, resident=0).mapped_bytes == held - CAPACITY
        assert order(coordinator, messages.Restore, 2, 100 * MIB)[1] == 0
        coordinator.grant(2)
        intact(client, sizes, pointers)
        assert last_report(coordinator).host_bytes >= held - CAPACITY
        for pointer in pointers.values():
            assert client.ask("free", pointer) == 0
        until(client, "info", [0, CAPACITY, CAPACITY, CAPACITY])


def test_without_being_asked_for_the_card_is_the_end(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a program crawls over the link though nobody asked for it, instead of being out of memory at once."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        assert client.ask("alloc", CAPACITY)[0] == 0
        assert client.ask("alloc", 1)[0] == OUT_OF_MEMORY
        assert client.ask("create", 2 * MIB)[0] == OUT_OF_MEMORY


def test_what_others_hold_is_left_to_them(
    coordinator: ScriptedCoordinator, oversubscribed: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a program that may run from the host is refused, or hangs, where the card has no room for it now."""
    sizes = {1: 90 * MIB, 2: 3 * MIB, 3: 30 * MIB}
    with start(oversubscribed, tmp_path) as client, stranger(oversubscribed, tmp_path) as other:
        attached(client, coordinator)
        assert other.ask("alloc", 200 * MIB)[0] == 0
        result, pointer = client.ask("alloc", 70 * MIB)
        assert result == 0
        coordinator.grant(1)
        assert client.ask("write", pointer, 70 * MIB, 9) == 0
        pointers = filled(client, sizes)
        coordinator.revoke(1)
        report = last_report(coordinator)
        assert report.resident_bytes <= 56 * MIB
        assert report.resident_bytes + report.mapped_bytes == report.allocated_bytes == 194 * MIB
        assert order(coordinator, messages.Evict, 1, GIB)[1] == 0
        coordinator.grant(2)
        intact(client, sizes | {9: 70 * MIB}, pointers | {9: pointer})


def test_no_more_than_its_bound_is_resident(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a client keeps more of the card than the operator allows, or loses data when the bound changes."""
    sizes = {1: 60 * MIB, 2: 30 * MIB, 3: 700, 4: 20 * MIB}
    with start(environment, tmp_path) as client, stranger(environment, tmp_path) as other:
        attached(client, coordinator)
        hold(client, coordinator)
        pointers = filled(client, {1: sizes[1], 2: sizes[2]})
        bound(coordinator, 64 * MIB)
        assert client.ask("info")[0] == 0
        coordinator.revoke(1)
        assert last_report(coordinator).resident_bytes == 90 * MIB, "not under work that may run"
        assert order(coordinator, messages.Evict, 1, MIB)[1] == 0
        assert last_report(coordinator).resident_bytes <= 64 * MIB
        assert order(coordinator, messages.Restore, 2, GIB)[1] == 0
        coordinator.grant(2)
        intact(client, {1: sizes[1], 2: sizes[2]}, pointers)
        pointers |= filled(client, {3: sizes[3], 4: sizes[4]})
        coordinator.revoke(2)
        report = last_report(coordinator)
        assert report.resident_bytes <= 64 * MIB
        assert report.resident_bytes + report.mapped_bytes == report.allocated_bytes == 112 * MIB
        assert other.ask("info")[1] == 512 * MIB - report.resident_bytes, "the rest takes nothing of the card"
        bound(coordinator, 0)
        assert order(coordinator, messages.Restore, 3, GIB)[1] == 0, "what was hosted comes back when it may"
        report = last_report(coordinator)
        assert (report.resident_bytes, report.mapped_bytes) == (112 * MIB, 0)
        assert other.ask("info")[1] == 512 * MIB - 112 * MIB
        coordinator.grant(3)
        intact(client, sizes, pointers)


def test_a_limit_below_what_is_in_use(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a program is killed, or allocates on, when its limit falls below what it has; frees must work."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        pointers = filled(client, {1: 50 * MIB, 2: 20 * MIB})
        bound(coordinator, 0, limit=30 * MIB)
        until(client, "info", [0, 0, 30 * MIB, 30 * MIB])
        assert client.ask("alloc", 1)[0] == OUT_OF_MEMORY
        assert client.ask("create", 2 * MIB)[0] == OUT_OF_MEMORY
        assert client.ask("async", 1)[0] == OUT_OF_MEMORY
        assert client.ask("same", pointers[1], 50 * MIB, 1) is True
        assert client.ask("free", pointers[1]) == 0
        assert client.ask("alloc", 9 * MIB)[0] == 0
        assert client.ask("alloc", 9 * MIB)[0] == OUT_OF_MEMORY


def test_mapped_handles_run_from_the_host_too(
    coordinator: ScriptedCoordinator, oversubscribed: dict[str, str], tmp_path: Path
) -> None:
    """Broken: a framework with an allocator of its own cannot oversubscribe, or shares what is not on the card."""
    size, one = 200 * MIB, 1
    with start(oversubscribed, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        places = []
        for seed in (1, 2):
            result, handle = client.ask("create", size)
            assert result == 0
            places.append(mapped(client, handle, size))
            assert client.ask("write", places[-1], size, seed) == 0
        result, hosted = client.ask("create_as", 4 * MIB, one, 0)
        assert result == 0
        assert client.ask("export", hosted, one)[0] == OUT_OF_MEMORY
        coordinator.revoke(1)
        assert order(coordinator, messages.Evict, 1, GIB)[1] == 0
        coordinator.grant(2)
        for seed, address in zip((1, 2), places, strict=True):
            assert client.ask("same", address, size, seed) is True


CALLS = (
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamSynchronize",
)


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_call_loses_no_data(
    coordinator: ScriptedCoordinator, oversubscribed: dict[str, str], tmp_path: Path, function: str
) -> None:
    """Broken: one refusal of the driver costs data on its way between card and host."""
    with start({**oversubscribed, "NVSHARE_SIM_FAULTS": f"{function}@%17=999"}, tmp_path) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        held = []
        for number in range(30):
            size = 11 * MIB + number
            result, pointer = client.ask("alloc", size)
            if result == 0 and client.ask("write", pointer, size, number) == 0:
                held.append((pointer, size, number))
        assert len(held) > 24, "more than the card holds"
        coordinator.revoke(1)
        numbers = iter(range(1, 1000))
        settle(coordinator, messages.Evict, numbers, GIB, resident=0)
        order(coordinator, messages.Restore, next(numbers), 150 * MIB)
        lease = 2
        coordinator.grant(lease)
        client.tell(f"same {held[0][0]} {held[0][1]} {held[0][2]}")
        deadline = time.monotonic() + BOUND_S
        while not client.answer(0.05):  # it gives the lease back while something is missing
            assert time.monotonic() < deadline, "the program waits for its lease"
            if isinstance(coordinator.receive(0.05), messages.Release):
                lease += 1
                coordinator.grant(lease)
        for pointer, size, number in held:
            assert any(client.ask("same", pointer, size, number) for _ in range(3)), number
        for pointer, _, _ in held:
            assert client.ask("free", pointer) == 0
