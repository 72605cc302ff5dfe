"""The application's own virtual memory management in mode `swap`: what each call answers, its memory there or not.

Non-goals: random sequences (tests/end_to_end/memory/test_swap_vmm.py).
"""

from __future__ import annotations

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, start, until
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.test_swap_process import GIB, MIB, attached, hold, settle

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
DESCRIPTOR = 1
NONE, READ_WRITE = 0, 3


def mapped(client: Client, handle: int, size: int) -> int:
    """Address of a new mapping that this GPU may use."""
    result, address = client.ask("reserve", size)
    assert result == 0
    assert client.ask("map", address, size, 0, handle) == 0
    assert client.ask("allow", address, size, 0, READ_WRITE) == 0
    return int(address)


def test_without_a_lease_a_handle_takes_no_memory_of_the_card(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a program that waits takes the card from the one that runs, or gets memory with the wrong contents."""
    size = 40 * MIB
    result, handle = client.ask("create", size)
    assert result == 0
    address = mapped(client, handle, size)
    client.tell(f"write {address} {size} 7")
    coordinator.expect(messages.Request)
    assert coordinator.state().resident_bytes == 0
    assert coordinator.state().allocated_bytes == size
    assert coordinator.restore(size) == (size, 0)
    coordinator.grant(1)
    assert client.result() == 0
    assert client.ask("same", address, size, 7) is True


@pytest.mark.parametrize("there", [True, False])
def test_questions_are_answered_as_the_driver_would(
    coordinator: ScriptedCoordinator, environment: dict[str, str], there: bool
) -> None:
    """Broken: an allocator built on virtual memory fails, or believes nonsense, because its memory is evicted."""
    size, two = 24 * MIB, {**environment, "NVSHARE_SIMULATE": "2x512MiB"}
    with start(two) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, handle = client.ask("create_as", size, DESCRIPTOR, 1)
        address = mapped(client, handle, size)
        assert client.ask("write", address, size, 5) == 0
        if not there:
            coordinator.revoke(1)
            assert coordinator.evict(GIB)[1] == 0
        inside = address + 5 * MIB
        assert client.ask("retain", inside) == [0, handle]
        assert client.ask("release", handle) == 0
        assert client.ask("properties", handle) == [0, DESCRIPTOR, 0]
        assert client.ask("range", inside) == [0, address, size]
        assert client.ask("access", inside, 0) == [0, READ_WRITE]
        assert client.ask("access", inside, 1) == [0, NONE]
        if there:  # else it waits for the lease: test_swap_peers.py
            assert client.ask("allow", address, size, 1, READ_WRITE) == 0
            assert client.ask("access", inside, 1) == [0, READ_WRITE]
        assert client.ask("allow", address, size, 9, READ_WRITE) != 0
        assert client.ask("allow", address, size // 2, 0, READ_WRITE) == INVALID_VALUE, "only whole mappings"
        assert client.ask("unmap_only", address, size // 2) == INVALID_VALUE
        assert client.ask("unreserve", address, size) == INVALID_VALUE, "something is mapped there"
        assert client.ask("map", address, size, 0, handle) == INVALID_VALUE, "something is mapped there"
        assert client.ask("map", address + 64 * size, size, 0, handle) == INVALID_VALUE, "not reserved"
        _, other = client.ask("reserve", size)
        assert client.ask("map", other, size, 2 * MIB, handle) == INVALID_VALUE
        assert client.ask("map", other, size, 0, handle + 1) == INVALID_VALUE
        for attribute, value in (
            (2, 2),
            (9, 0),
            (11, address),
            (12, size),
            (14, DESCRIPTOR),
            (16, READ_WRITE),
            (18, size),
            (19, address),
        ):
            assert client.ask("attribute", attribute, inside) == [0, value, 0, value], attribute
        assert client.ask("descriptor", address, size) == NOT_SUPPORTED
        if not there:
            assert coordinator.restore(GIB)[1] == 0
            coordinator.grant(2)
            assert client.ask("allow", address, size, 1, READ_WRITE) == 0
        assert client.ask("access", inside, 1) == [0, READ_WRITE]
        client.tell(f"same {address} {size} 5")  # with the lease of GPU 1 too, which may reach it
        assert coordinator.expect(messages.AttachGpu).gpu == 1
        coordinator.settings(gpu=1, capacity_bytes=GIB)
        assert coordinator.expect(messages.Request).gpu == 1
        coordinator.grant(3, gpu=1)
        assert client.result() is True
        assert client.ask("unmap_only", address, size) == 0
        assert client.ask("release", handle) == 0
        assert client.ask("release", handle) == INVALID_VALUE, "it is gone"
        assert client.ask("properties", handle)[0] == INVALID_VALUE


FABRIC, NOT_PERMITTED, UNKNOWN = 8, 800, 999


def imported_is(client: Client, descriptor: int, size: int, seed: int) -> None:
    """What another mapping of the exported memory shows."""
    result, other = client.ask("import", descriptor)
    assert result == 0
    seen = mapped(client, other, size)
    assert client.ask("same", seen, size, seed) is True
    assert client.ask("unmap", seen, size) == 0
    assert client.ask("release", other) == 0


@pytest.mark.parametrize("there", [True, False])
def test_what_may_be_exported_moves_until_it_is(coordinator: ScriptedCoordinator, holder: Client, there: bool) -> None:
    """Broken: JAX's one allocation of 75 % of the card stays there, or an export loses data, mappings or rights."""
    size, capacity = 96 * MIB, 128 * MIB
    coordinator.settings(capacity_bytes=capacity)
    until(holder, "info", [0, capacity, capacity, capacity])
    result, handle = holder.ask("create_as", size, DESCRIPTOR | FABRIC, 1)
    assert result == 0
    _, plain = holder.ask("create", 2 * MIB)
    assert holder.ask("export", plain, DESCRIPTOR)[0] == INVALID_VALUE, "it was not asked for at creation"
    assert holder.ask("release", plain) == 0
    first, second = mapped(holder, handle, size), mapped(holder, handle, size)
    assert holder.ask("write", first, size, 3) == 0
    coordinator.revoke(1)
    assert coordinator.state().pinned_bytes == 0
    moved, error = coordinator.evict(50 * MIB)
    assert (50 * MIB <= moved < 60 * MIB, error) == (True, 0), "in parts"
    if there:
        coordinator.grant(2)
        assert holder.ask("same", second, size, 3) is True
        result, descriptor = holder.ask("export", handle, DESCRIPTOR)
    else:
        assert coordinator.evict(GIB)[1] == 0
        holder.tell(f"export {handle} {DESCRIPTOR}")
        coordinator.expect(messages.Request)
        coordinator.grant(2)
        result, descriptor = holder.result()
    assert result == 0
    assert holder.ask("properties", handle) == [0, DESCRIPTOR | FABRIC, 0]
    assert holder.ask("access", second, 0) == [0, READ_WRITE]
    imported_is(holder, descriptor, size, 3)
    assert holder.ask("write", second, size, 4) == 0
    imported_is(holder, descriptor, size, 4)
    assert holder.ask("same", first, size, 4) is True
    coordinator.revoke(2)
    report = coordinator.state()
    assert (report.allocated_bytes, report.resident_bytes, report.pinned_bytes) == (size, size, size)
    assert coordinator.evict(GIB) == (0, 0)
    for address in (first, second):
        assert holder.ask("unmap", address, size) == 0
    assert holder.ask("release", handle) == 0
    until(holder, "info", [0, capacity, capacity, capacity])


def test_an_export_waits_for_work_that_uses_the_memory(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: memory is taken from below a kernel that runs, because another thread exports it."""
    size = 16 * MIB
    _, handle = holder.ask("create_as", size, DESCRIPTOR, 0)
    address = mapped(holder, handle, size)
    assert holder.ask("write", address, size, 1) == 0
    assert holder.ask("busy", 300_000_000) == 0
    result, descriptor = holder.ask("export", handle, DESCRIPTOR)
    assert result == 0
    coordinator.nothing(messages.Release)  # it keeps its lease
    imported_is(holder, descriptor, size, 1)


def test_what_the_driver_forbids_is_refused_at_creation(
    coordinator: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    """Broken: without a fabric manager a framework believes that it has fabric memory, and fails at the export."""
    with start({**environment, "NVSHARE_SIM_FAULTS": "cuMemCreate@1=800,cuMemCreate@3=2"}) as client:
        attached(client, coordinator)
        assert client.ask("create_as", 16 * MIB, FABRIC, 0)[0] == NOT_PERMITTED
        assert client.ask("create_as", 16 * MIB, DESCRIPTOR, 0)[0] == 0
        assert client.ask("create_as", 16 * MIB, FABRIC, 0)[0] == 0, "a full card is no answer"
        assert client.ask("create_as", 16 * MIB, 2, 0)[0] == INVALID_VALUE, "no such kind on this system"


@pytest.mark.parametrize(
    "fault", ["cuMemCreate@6", "cuMemMap@9", "cuMemMap@10", "cuMemSetAccess@3", "cuMemcpyHtoDAsync@1", "cuMemUnmap@6"]
)
def test_a_failing_export_loses_nothing(
    coordinator: ScriptedCoordinator, environment: dict[str, str], fault: str
) -> None:
    """Broken: one refusal of the driver while memory becomes one allocation costs its contents, or pins it for good."""
    size = 16 * MIB
    with start({**environment, "NVSHARE_SIM_FAULTS": f"{fault}={UNKNOWN}"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        _, handle = client.ask("create_as", size, DESCRIPTOR, 0)
        address = mapped(client, handle, size)
        assert client.ask("write", address, size, 5) == 0
        assert client.ask("export", handle, DESCRIPTOR)[0] == UNKNOWN
        assert client.ask("same", address, size, 5) is True
        coordinator.revoke(1)
        assert coordinator.state().pinned_bytes == 0
        assert coordinator.evict(GIB)[1] == 0
        assert coordinator.state().resident_bytes == 0
        coordinator.grant(2)
        result, descriptor = client.ask("export", handle, DESCRIPTOR)
        assert result == 0
        imported_is(client, descriptor, size, 5)
        assert client.ask("same", address, size, 5) is True


def test_attributes_survive_a_move(coordinator: ScriptedCoordinator, holder: Client) -> None:
    """Broken: a setting of a pointer is lost with the memory that it was made on, or copies go wrong."""
    sync_memops = 6
    _, pointer = holder.ask("alloc", 6 * MIB)
    _, other = holder.ask("alloc", 6 * MIB)
    assert holder.ask("attribute", sync_memops, pointer)[:2] == [0, 0]
    assert holder.ask("set_sync", pointer, 1) == 0
    assert holder.ask("write", pointer, 6 * MIB, 1) == 0
    coordinator.revoke(1)
    assert coordinator.evict(GIB)[1] == 0
    assert holder.ask("attribute", sync_memops, pointer)[:2] == [0, 1]
    assert holder.ask("set_sync", other, 1) == 0, "also while it is not there"
    coordinator.grant(2)
    assert holder.ask("peer_copy", other, pointer, 6 * MIB) == 0
    assert holder.ask("same", other, 6 * MIB, 1) is True
    assert holder.ask("attribute", sync_memops, other)[:2] == [0, 1]
    assert holder.ask("descriptor", pointer, 2 * MIB) == NOT_SUPPORTED


CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRetainAllocationHandle", "cuMemRelease")


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_call_loses_no_data(
    coordinator: ScriptedCoordinator, environment: dict[str, str], function: str
) -> None:
    """Broken: one refusal of the driver costs data of a mapping, or leaves the figures wrong for good."""
    size = 6 * MIB
    with start({**environment, "NVSHARE_SIM_FAULTS": f"{function}@%13=999"}) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        held = []
        for number in range(8):
            result, handle = client.ask("create", size)
            if result != 0:
                continue
            places = []
            for _ in range(2):
                _, address = client.ask("reserve", size)
                if client.ask("map", address, size, 0, handle) != 0:
                    continue
                while client.ask("allow", address, size, 0, READ_WRITE) != 0:
                    pass
                places.append(address)
            if places and client.ask("write", places[0], size, number) == 0:
                held.append((handle, places, number))
        assert len(held) > 4
        coordinator.revoke(1)
        for _ in range(2):
            everything = coordinator.state().allocated_bytes
            settle(coordinator, resident=0)
            settle(coordinator, resident=everything)
        coordinator.grant(2)
        for handle, places, number in held:
            for address in places:
                assert client.ask("same", address, size, number) is True
                assert any(client.ask("unmap_only", address, size) == 0 for _ in range(3))
            assert client.ask("release", handle) == 0
