"""Memory of mode `swap` shared by cuIpcGetMemHandle: what each call answers, what stays on the card, what is left.

The exporter is told by a scripted coordinator; importers run under the hook without one.

Non-goals: two programs that share and take turns, in whatever mode (tests/end_to_end/memory/test_ipc.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, start
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.conftest import environment
from tests.hook.swap.test_swap_process import GIB, MIB, attached, hold
from tests.waiting import eventually

__all__ = ["environment"]

INVALID_VALUE, INVALID_CONTEXT, MAP_FAILED, INVALID_HANDLE = 1, 201, 205, 400
LAZY = 1

StartImporter = Callable[..., Client]


@pytest.fixture
def exporter(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> Iterator[Client]:
    """A program in mode `swap` that holds the lease of the first of two GPUs."""
    environment["NVSHARE_SIMULATE"] = "2x512MiB"
    with start(environment) as client:
        attached(client, coordinator)
        hold(client, coordinator)
        yield client


@pytest.fixture
def importer(environment: dict[str, str]) -> Iterator[StartImporter]:
    """Starts programs under the hook on the same GPU, for which there is no coordinator."""
    with ExitStack() as stack:

        def run(**changes: str) -> Client:
            alone = {**environment, "NVSHARE_SOCKET": "", **changes}
            client = stack.enter_context(start(alone))
            assert client.ask("start") == 0
            return client

        yield run


def exported(client: Client, size: int, seed: int) -> tuple[int, int]:
    """Pointer and handle of memory that holds a pattern."""
    result, pointer = client.ask("alloc", size)
    assert result == 0
    assert client.ask("write", pointer, size, seed) == 0
    result, handle = client.ask("ipc_get", pointer)
    assert result == 0
    return pointer, handle


def opened(client: Client, handle: int) -> int:
    """Address at which a handle is mapped."""
    result, pointer = client.ask("ipc_open", handle, LAZY)
    assert result == 0
    return int(pointer)


def await_pinned(coordinator: ScriptedCoordinator, size: int) -> None:
    """Until the exporter has reported so much as pinned."""
    while coordinator.state().pinned_bytes != size:
        coordinator.expect(messages.State)


def names_in(client: Client, folder: str) -> list[str]:
    """Entries of a folder of /proc/PID: threads, descriptors."""
    return [entry.name for entry in Path(f"/proc/{client.process.pid}/{folder}").iterdir()]


def secret_of(handle: int) -> tuple[bytes, bytes]:
    """(name of the exporter's socket, key) as client_hook/src/ipc/socket.h lays a handle out."""
    content = handle.to_bytes(64, "little")
    return b"\0nvshare-ipc-" + content[16:32].hex().encode(), content[32:48]


def test_both_see_the_same_bytes_while_the_rest_moves(
    coordinator: ScriptedCoordinator, exporter: Client, importer: StartImporter
) -> None:
    """Broken: shared memory moves below its importer, is a copy, or pins all that the program has."""
    shared, rest = 100 * MIB, 60 * MIB
    pointer, handle = exported(exporter, shared, 1)
    _, other = exporter.ask("alloc", rest)
    assert exporter.ask("write", other, rest, 2) == 0
    with importer() as guest:
        mapped = opened(guest, handle)
        coordinator.revoke(1)
        await_pinned(coordinator, shared)
        moved, error = coordinator.evict(GIB)
        assert (moved, error) == (rest, 0)
        assert guest.ask("same", mapped, shared, 1) is True
        assert guest.ask("write", mapped, shared, 3) == 0, "an importer works while the exporter has no lease"
        assert guest.ask("range", mapped + 5) == [0, mapped, shared]
        assert coordinator.restore(GIB) == (rest, 0)
        coordinator.grant(2)
        assert exporter.ask("same", pointer, shared, 3) is True
        assert exporter.ask("same", other, rest, 2) is True
        assert guest.ask("ipc_close", mapped) == 0
        assert exporter.ask("free", pointer) == 0
        await_pinned(coordinator, 0)


def test_a_pointer_into_an_allocation_stands_for_the_whole(exporter: Client, importer: StartImporter) -> None:
    """Broken: small allocations that share a chunk share a handle, or memory that was opened is closed by cuMemFree."""
    pointer, handle = exported(exporter, 5 * MIB, 1)
    _, of_small = exported(exporter, 3000, 2)
    assert exporter.ask("ipc_get", pointer + MIB) == [0, handle]
    guest = importer()
    assert guest.ask("same", opened(guest, handle), 5 * MIB, 1) is True
    small = opened(guest, of_small)
    assert guest.ask("same", small, 3000, 2) is True
    assert guest.ask("free", small) != 0


def test_freed_memory_has_a_new_handle(
    coordinator: ScriptedCoordinator, exporter: Client, importer: StartImporter
) -> None:
    """Broken: an old handle opens memory of somebody else that came to the same address."""
    pointer, handle = exported(exporter, 40 * MIB, 1)
    guest = importer()
    mapped = opened(guest, handle)
    assert exporter.ask("free", pointer) == 0
    assert guest.ask("same", mapped, 40 * MIB, 1) is True, "who has it open keeps it"
    assert importer().ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE, "nobody else gets it"
    coordinator.revoke(1)
    assert coordinator.state().pinned_bytes == 40 * MIB, "it takes room of the card as long as it is open"
    assert guest.ask("ipc_close", mapped) == 0
    await_pinned(coordinator, 0)
    coordinator.grant(2)
    again, new = exported(exporter, 40 * MIB, 2)
    assert new != handle
    assert guest.ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE
    assert guest.ask("same", opened(guest, new), 40 * MIB, 2) is True
    assert exporter.ask("free", again) == 0


def test_memory_freed_in_stream_order_has_a_new_handle(exporter: Client, importer: StartImporter) -> None:
    """Broken: memory that serves again on its stream keeps the handle of the allocation before."""
    result, pointer = exporter.ask("async", 4 * MIB)
    assert result == 0
    _, handle = exporter.ask("ipc_get", pointer)
    assert exporter.ask("free_async", pointer) == 0
    assert exporter.ask("async", 4 * MIB) == [0, pointer], "it serves again at once"
    assert importer().ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE
    result, new = exporter.ask("ipc_get", pointer)
    assert (result, new != handle) == (0, True)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_importer_ends(
    coordinator: ScriptedCoordinator, exporter: Client, importer: StartImporter, end: str
) -> None:
    """Broken: memory that only a dead process had open stays pinned for ever."""
    pointer, handle = exported(exporter, 20 * MIB, 1)
    guest = importer()
    opened(guest, handle)
    assert exporter.ask("free", pointer) == 0
    if end == "kill":
        guest.process.send_signal(signal.SIGKILL)
    else:
        assert guest.process.stdin is not None
        guest.process.stdin.close()
    coordinator.revoke(1)
    await_pinned(coordinator, 0)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_exporter_ends(exporter: Client, importer: StartImporter, end: str) -> None:
    """Broken: an importer loses what it has open, crashes, or opens what is gone."""
    _, handle = exported(exporter, 70 * MIB, 1)
    guest, late = importer(), importer()
    mapped = opened(guest, handle)
    if end == "kill":
        exporter.process.send_signal(signal.SIGKILL)
    else:
        assert exporter.process.stdin is not None
        exporter.process.stdin.close()
    exporter.process.wait(60)
    assert guest.ask("same", mapped, 70 * MIB, 1) is True
    assert opened(guest, handle) == mapped, "what is open needs nobody"
    assert late.ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE
    for _ in range(2):
        assert guest.ask("ipc_close", mapped) == 0
    assert guest.ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE


def test_a_reset_closes_and_voids(coordinator: ScriptedCoordinator, exporter: Client, importer: StartImporter) -> None:
    """Broken: cudaDeviceReset leaves memory pinned, mapped, or reachable by an old handle."""
    _, handle = exported(exporter, 6 * MIB, 1)
    guest = importer()
    mapped = opened(guest, handle)
    assert guest.ask("reset") == 0
    assert guest.ask("ipc_close", mapped) != 0, "it was closed with its context"
    mapped = opened(guest, handle)
    assert exporter.ask("reset") == 0
    assert guest.ask("same", mapped, 6 * MIB, 1) is True
    assert importer().ask("ipc_open", handle, LAZY)[0] == INVALID_HANDLE
    assert guest.ask("reset") == 0
    coordinator.revoke(1)
    await_pinned(coordinator, 0)


def test_a_child_is_no_importer(coordinator: ScriptedCoordinator, exporter: Client, importer: StartImporter) -> None:
    """Broken: a forked child keeps its parent's connections, so the end of the parent goes unnoticed."""
    pointer, handle = exported(exporter, 20 * MIB, 1)
    guest = importer()
    opened(guest, handle)
    child = guest.ask("fork_and_stay")
    try:
        guest.process.send_signal(signal.SIGKILL)
        assert exporter.ask("free", pointer) == 0
        coordinator.revoke(1)
        await_pinned(coordinator, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    child = exporter.ask("fork_and_stay")
    os.kill(child, signal.SIGKILL)


def test_opened_a_thousand_times(exporter: Client, importer: StartImporter) -> None:
    """Broken: a descriptor, a mapping or a connection is lost each time."""
    _, handle = exported(exporter, 70 * MIB, 1)
    before = names_in(exporter, "fd")
    assert importer().ask("ipc_cycle", handle, 1000) == [0, 0]
    eventually(lambda: len(names_in(exporter, "fd")) <= len(before), "the exporter closes what it passed on")


IMPORTS = ("cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve", "cuMemUnmap")


@pytest.mark.parametrize("function", IMPORTS)
def test_a_failing_import_leaves_nothing(exporter: Client, importer: StartImporter, function: str) -> None:
    """Broken: one refusal of the driver costs a mapping or a descriptor, or the handle cannot be opened again."""
    _, handle = exported(exporter, 6 * MIB, 1)  # two chunks
    guest = importer(NVSHARE_SIM_FAULTS=f"{function}@%3=999", NVSHARE_LOG="off")  # a log is a descriptor, too
    before, results = names_in(guest, "fd"), []
    for _ in range(12):
        result, pointer = guest.ask("ipc_open", handle, LAZY)
        results.append(result)
        if result == 0:
            assert guest.ask("same", pointer, 6 * MIB, 1) is True
            assert guest.ask("ipc_close", pointer) == 0
    assert 0 in results
    assert len(names_in(guest, "fd")) <= len(before)
    assert len(names_in(exporter, "fd")) < len(before) + 40


def test_a_failing_export_is_told(exporter: Client, importer: StartImporter) -> None:
    """Broken: an exporter whose driver gives no descriptor leaves importers waiting, or its memory shut for ever."""
    pointer, handle = exported(exporter, 20 * MIB, 1)
    assert exporter.ask("fail", int.from_bytes(b"cuMemExportToShareableHandle", "big"), 999) == 0
    guest = importer()
    assert guest.ask("ipc_open", handle, LAZY)[0] == MAP_FAILED
    assert exporter.ask("fail", 0, 0) == 0
    assert guest.ask("same", opened(guest, handle), 20 * MIB, 1) is True
    assert exporter.ask("free", pointer) == 0


def test_from_another_gpu(exporter: Client, importer: StartImporter) -> None:
    """Broken: ranks of one job, each on a GPU of its own, cannot reach each other's memory."""
    _, handle = exported(exporter, 20 * MIB, 1)
    guest = importer()
    first = opened(guest, handle)
    assert guest.ask("use", 1) == 0
    second = opened(guest, handle)
    assert second != first, "each GPU of a process has a mapping of its own"
    assert guest.ask("same", second, 20 * MIB, 1) is True
    assert guest.ask("access", second, 1) == [0, 3]
    assert guest.ask("ipc_close", second) == 0
    assert guest.ask("ipc_close", first) == 0


def test_nothing_runs_before_the_first_export(exporter: Client, importer: StartImporter) -> None:
    """Broken: every program pays for what few use."""
    process = Path(f"/proc/{exporter.process.pid}/task")
    names = [(process / task / "comm").read_text().strip() for task in names_in(exporter, "task")]
    assert "nvshare-ipc" not in names
    sockets = Path("/proc/net/unix").read_text()
    _, handle = exported(exporter, MIB, 1)
    name = secret_of(handle)[0][1:].decode()
    assert name not in sockets
    assert name in Path("/proc/net/unix").read_text()
    importer()


def test_a_silent_exporter_is_not_waited_for(exporter: Client, importer: StartImporter, tmp_path: Path) -> None:
    """Broken: a stopped process hangs all who open its memory, or what they did not get stays open there."""
    pointer, handle = exported(exporter, 4 * MIB, 1)
    guest = importer()
    exporter.process.send_signal(signal.SIGSTOP)
    try:
        threads = [Path(f"/proc/{exporter.process.pid}/task/{name}/stat") for name in names_in(exporter, "task")]
        eventually(lambda: all(") T " in thread.read_text() for thread in threads), "all its threads to be stopped")
        assert guest.ask("ipc_open", handle, LAZY)[0] == MAP_FAILED
    finally:
        exporter.process.send_signal(signal.SIGCONT)
    assert "did not answer in time" in (tmp_path / "log").read_text()
    assert guest.ask("same", opened(guest, handle), 4 * MIB, 1) is True
    assert exporter.ask("free", pointer) == 0
