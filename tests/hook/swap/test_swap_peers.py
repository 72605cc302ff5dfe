"""Memory mode `swap` in a process that uses two GPUs: once one of them reaches the other's memory they have one turn.

The memory of both moves, because nothing of the program runs while it lacks one of the leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.end_to_end.two_gpus import COPIES
from tests.hook.memory.test_memory_process import Client, start
from tests.hook.scripted import ScriptedCoordinator

MIB = 1 << 20
SIZE = 8 * MIB
CAPACITY = 256 * MIB
READ_WRITE = 3


@pytest.fixture
def client(environment: dict[str, str]) -> Iterator[Client]:
    """A program on two GPUs."""
    with start(environment | {"NVSHARE_LOG": "info", "NVSHARE_SIMULATE": "2x512MiB"}) as program:
        yield program


def both(client: Client, coordinator: ScriptedCoordinator) -> tuple[int, int]:
    """The program has both leases and memory on each GPU, that of GPU 0 filled; the pointers.  GPU 1 is current."""
    assert client.ask("start") == 0
    client.tell("info")
    coordinator.expect(messages.Hello)
    coordinator.send(messages.Welcome(1))
    pointers = []
    for gpu in (0, 1):
        assert coordinator.expect(messages.AttachGpu).gpu == gpu
        coordinator.settings(gpu=gpu, capacity_bytes=CAPACITY)
        assert client.result()[0] == 0
        client.tell(f"alloc {SIZE}")
        result, pointer = client.result()
        assert result == 0
        pointers.append(pointer)
        client.tell(f"write {pointer} {SIZE} {gpu + 1}")
        assert coordinator.expect(messages.Request).gpu == gpu
        assert coordinator.restore(SIZE, gpu)[1] == 0
        coordinator.grant(10 + gpu, gpu=gpu)
        assert client.result() == 0
        if gpu == 0:
            assert client.ask("use", 1) == 0
            client.tell("info")
    return pointers[0], pointers[1]


def leave(coordinator: ScriptedCoordinator, lease_id: int) -> None:
    """The lease of GPU 0 is taken back, and that of GPU 1 follows: its work may reach the memory of GPU 0."""
    coordinator.revoke(lease_id, gpu=0)
    assert coordinator.expect(messages.Release).gpu == 1


def bring_back(client: Client, coordinator: ScriptedCoordinator, size: int = SIZE) -> None:
    """The program's call waits for the lease and the memory of GPU 0, and ends well."""
    assert coordinator.expect(messages.Request).gpu == 0
    assert coordinator.restore(size) == (size, 0)
    coordinator.grant(12, gpu=0)
    assert client.result() == 0


@pytest.mark.parametrize("call", ["set {0} {1} 7", "write {0} {1} 7", "read {0} {1}", "write_value {0} 7"])
def test_a_call_on_the_other_gpus_memory_finds_what_was_evicted(
    coordinator: ScriptedCoordinator, client: Client, tmp_path: Path, call: str
) -> None:
    """Broken: a fill, a value or a copy with the host fails when the GPU that is current is not the memory's."""
    there, _ = both(client, coordinator)
    coordinator.revoke(10, gpu=0)
    assert coordinator.move(0) == (SIZE, 0)
    client.tell(call.format(there, SIZE))
    bring_back(client, coordinator)
    assert coordinator.state().linked
    leave(coordinator, 12)
    assert coordinator.move(0) == (SIZE, 0)
    assert "they have one turn" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("name", "links"), [("Node", False), ("GeneralNode", False), ("ChangedNode", True)])
def test_an_edit_waits_for_the_memory_that_it_names(
    coordinator: ScriptedCoordinator, client: Client, name: str, links: bool
) -> None:
    """Broken: a graph cannot be built while its memory is off the card, because the driver knows no such address.

    A node that is told addresses without a context may be of any GPU.
    """
    there, _ = both(client, coordinator)
    assert client.ask("use", 0) == 0
    coordinator.revoke(10, gpu=0)
    assert coordinator.move(0) == (SIZE, 0)
    half = SIZE // 2
    client.tell(f"copy_between {COPIES[name]} {there + half} {there} {half}")
    bring_back(client, coordinator)
    if links:
        leave(coordinator, 12)
    else:
        coordinator.revoke(12, gpu=0)
    assert coordinator.move(0) == (SIZE, 0)


def test_a_graph_over_two_gpus_finds_its_memory(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a graph faults on memory of another GPU than the one it is launched on, which was moved away."""
    there, _ = both(client, coordinator)
    assert client.ask("spread", there, SIZE) == 0
    leave(coordinator, 10)
    assert coordinator.move(0) == (SIZE, 0)
    client.tell("launch_spread")
    assert {coordinator.expect(messages.Request).gpu for _ in range(2)} == {0, 1}
    coordinator.grant(13, gpu=1)
    assert coordinator.restore(SIZE) == (SIZE, 0)
    coordinator.grant(12, gpu=0)
    assert client.result() == 0


def test_a_pool_is_opened_after_it_gave_memory(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: what a pool gave before another GPU was let in faults in that one's kernels."""
    _, here = both(client, coordinator)
    assert client.ask("use", 0) == 0
    result, there = client.ask("async", SIZE)
    assert result == 0
    assert client.ask("use", 1) == 0
    assert client.ask("pool_allow", 0, 1) == 0
    assert client.ask("kernel_copy", there, here, SIZE) == 0
    leave(coordinator, 10)
    assert coordinator.move(0) == (2 * SIZE, 0)


def test_gpus_side_by_side_have_turns_of_their_own(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: a program that sees several GPUs waits for all of them, though each works on its own."""
    there, here = both(client, coordinator)
    assert client.ask("copy_between", 1, here, here + SIZE // 2, SIZE // 2) == 0
    coordinator.revoke(11, gpu=1)
    assert client.ask("use", 0) == 0
    assert client.ask("set", there, SIZE, 7) == 0
    assert coordinator.move(0, 1) == (SIZE, 0)
    assert coordinator.restore(SIZE, 1) == (SIZE, 0)


def test_a_handle_that_another_gpu_may_use_moves(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: JAX's or PyTorch's own mappings, which GPUs share by cuMemSetAccess, move under a kernel."""
    both(client, coordinator)
    result, address = client.ask("map_released", SIZE)
    assert result == 0
    assert client.ask("allow", address, SIZE, 0, READ_WRITE) == 0
    coordinator.revoke(10, gpu=0)
    assert coordinator.move(0) == (2 * SIZE, 0), "its own GPU may"
    client.tell(f"allow {address} {SIZE} 1 {READ_WRITE}")
    assert client.result() == 0
    client.tell(f"copy_between 1 {address} {address + SIZE // 2} {SIZE // 2}")
    bring_back(client, coordinator, 2 * SIZE)
    leave(coordinator, 12)
    assert coordinator.move(0) == (2 * SIZE, 0)


def test_a_pool_that_another_gpu_may_use_stays_the_drivers(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: cuMemPoolSetAccess is forgotten, and a kernel of the other GPU faults on memory of the pool."""
    both(client, coordinator)
    assert client.ask("use", 0) == 0
    assert client.ask("pool_allow", 0, 1) == 0
    result, _ = client.ask("async", 2 * MIB)
    assert result == 0
    coordinator.revoke(10, gpu=0)
    assert coordinator.state().pinned_bytes == 2 * MIB
    assert coordinator.move(0) == (SIZE, 0)
