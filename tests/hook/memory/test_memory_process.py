"""The memory side in a real process: the whole hook over a driver, told by a scripted coordinator.

Over the simulated GPU, and where there is a card, over that too: the scripted coordinator makes it one of 16 GiB.

Invariant: on a card a program never has more than 128 MiB of managed memory, and tests run there one at a time.  Sizes
that matter only in relation to a limit come from the fixture `unit`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import JsonClient, ScriptedCoordinator
from tests.waiting import eventually

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
PROGRAM = Path(__file__).resolve().parent / "programs" / "memory_program.py"
Client = JsonClient


@pytest.fixture
def simulated(hook_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Environment of a program under the hook in mode `managed`, on a simulated GPU."""
    hook_env["NVSHARE_MEMORY"] = "managed"
    return hook_env | {"NVSHARE_LOG_FILE": str(tmp_path / "log")}


@pytest.fixture(params=["simulated", pytest.param("card", marks=pytest.mark.gpu)])
def environment(request: pytest.FixtureRequest, simulated: dict[str, str]) -> dict[str, str]:
    """The same, on each kind of GPU."""
    if request.param == "simulated":
        return simulated
    real = {name: value for name, value in simulated.items() if not name.startswith("NVSHARE_SIM")}
    return {**real, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}


@pytest.fixture
def unit(environment: dict[str, str]) -> int:
    """Bytes in which limits and what is measured against them are counted; no test holds more than four at a time.

    1 GiB where memory is simulated and costs nothing, 32 MiB on a card, because it may be managed memory.
    """
    return GIB if "NVSHARE_SIM_STATE" in environment else 32 * MIB


def start(environment: dict[str, str], tmp_path: Path) -> Client:
    """The program, as an executable file: the loader of the script is the Python that runs the tests."""
    script = tmp_path / "program.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S {PROGRAM}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Client(script, environment)


def attached(client: Client, coordinator: ScriptedCoordinator, **settings: Any) -> None:
    """Has the program use its GPU for the first time, and grants the lease."""
    assert client.ask("start") == 0
    client.tell("info")
    coordinator.welcome(**settings)
    assert client.result()[0] == 0


@pytest.fixture
def client(coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path) -> Iterator[Client]:
    """A program that the coordinator knows."""
    with start(environment, tmp_path) as program:
        attached(program, coordinator)
        yield program


@pytest.mark.parametrize("mode", ["managed", "device"])
def test_data_survives_eviction(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, mode: str
) -> None:
    """Broken: a client's bytes differ after a switch, or it claims to have made room that it did not make."""
    with start({**environment, "NVSHARE_MEMORY": mode}, tmp_path) as client:
        attached(client, coordinator)
        coordinator.grant(1)
        sizes = {1: 3 * MIB, 2: 96 * MIB, 3: 4097}
        pointers = {}
        for seed, size in sizes.items():
            result, pointers[seed] = client.ask("alloc", size)
            assert result == 0
            assert client.ask("write", pointers[seed], size, seed) == 0
        coordinator.revoke(1)
        report = reported_last(coordinator)
        charged = 99 * MIB + 4608
        movable = charged if mode == "managed" else 0
        assert (report.allocated_bytes, report.pinned_bytes) == (charged, charged - movable)
        coordinator.send(messages.Evict(gpu=0, order_id=5, bytes=charged))
        assert finished(coordinator, 5) == (movable, 0)
        assert reported(coordinator, resident=charged - movable).host_bytes == movable
        coordinator.send(messages.Restore(gpu=0, order_id=6, bytes=charged))
        assert finished(coordinator, 6) == (movable, 0)
        coordinator.grant(2)
        for seed, size in sizes.items():
            assert client.ask("same", pointers[seed], size, seed) is True
            assert client.ask("free", pointers[seed]) == 0
        assert client.ask("info")[1] == 16 * GIB


def test_data_survives_many_partial_moves(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: some order of partial evictions, restorations, allocations and frees loses bytes or miscounts them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    held: dict[int, tuple[int, int]] = {}
    own: set[int] = set()  # pointers of the application's own managed memory, which has no stream-ordered free
    for turn in range(1, 25):
        coordinator.grant(turn)
        for number, (pointer, size) in list(held.items()):
            assert client.ask("same", pointer, size, number) is True
            if dice.random() < 0.3 or sum(size for _, size in held.values()) > 64 * MIB:
                assert client.ask("free" if pointer in own else dice.choice(["free", "free_async"]), pointer) == 0
                own.discard(pointer)
                del held[number]
        for number in range(turn * 10, turn * 10 + 3):
            size = dice.choice([700, 70_000, 3 * MIB + 1, 9 * MIB])
            kind = dice.choice(["alloc", "async", "managed"])
            result, pointer = client.ask(kind, size)
            assert result == 0
            own |= {pointer} if kind == "managed" else set()
            assert client.ask("write", pointer, size, number) == 0
            held[number] = pointer, size
        assert client.ask("synchronize") == 0
        charged = 16 * GIB - client.ask("info")[1]
        assert charged == sum((size + 511) // 512 * 512 for _, size in held.values())
        coordinator.revoke(turn)
        for number, make in enumerate((messages.Evict, messages.Restore)):
            order = make(gpu=0, order_id=2 * turn + number, bytes=dice.randrange(1, 2 * charged))
            assert move(coordinator, order) <= charged
            assert reported_last(coordinator).allocated_bytes == charged


def move(coordinator: ScriptedCoordinator, order: messages.Evict | messages.Restore) -> int:
    """Bytes that it moved; the reports agree."""
    before = reported_last(coordinator).host_bytes
    coordinator.send(order)
    moved, error = finished(coordinator, order.order_id)
    assert error == 0
    after = reported_last(coordinator).host_bytes
    assert after - before == (moved if isinstance(order, messages.Evict) else -moved)
    return moved


def reported_last(coordinator: ScriptedCoordinator) -> messages.MemoryReport:
    """The newest report that was read."""
    return [m for m in coordinator.received if isinstance(m, messages.MemoryReport)][-1]


def finished(coordinator: ScriptedCoordinator, order_id: int) -> tuple[int, int]:
    """(bytes moved, CUresult) when an order has ended."""
    while True:
        progress = coordinator.expect(messages.MoveProgress)
        assert progress.order_id == order_id
        if progress.finished:
            return progress.moved_bytes, progress.error


def reported(coordinator: ScriptedCoordinator, resident: int) -> messages.MemoryReport:
    """The report that says so; every wait inside is bounded."""
    known = [m for m in coordinator.received if isinstance(m, messages.MemoryReport)]
    while not known or known[-1].resident_bytes != resident:
        known.append(coordinator.expect(messages.MemoryReport))
    return known[-1]


def test_a_limit_changes_while_the_program_runs(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, unit: int
) -> None:
    """Broken: `nvshare-ctl set limit` needs a restart of the job."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator, limit=unit)
        assert client.ask("info") == [0, unit, unit, unit]
        assert client.ask("alloc", 2 * unit)[0] == OUT_OF_MEMORY
        coordinator.settings(limit=3 * unit)
        until(client, "info", [0, 3 * unit, 3 * unit, 3 * unit])
        assert client.ask("alloc", 2 * unit)[0] == 0
        coordinator.settings(limit=unit)
        until(client, "info", [0, 0, unit, unit])
        assert client.ask("alloc", 512)[0] == OUT_OF_MEMORY


def until(client: Client, command: str, wanted: Any) -> None:
    """Asks again until a change has arrived."""
    eventually(lambda: client.ask(command) == wanted, f"{command}: {wanted}")


def test_reservations_are_asked_for_and_obeyed(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path
) -> None:
    """Broken: memory is handed out that the coordinator has refused, or its yes is not waited for."""
    with start({**environment, "NVSHARE_MEMORY": "device"}, tmp_path) as client:
        attached(client, coordinator, reserve=True)
        client.tell("alloc 1000")
        asked = coordinator.expect(messages.ReserveMemory)
        assert asked.bytes == 64 * MIB
        coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=64 * MIB))
        assert client.result()[0] == 0
        assert client.ask("alloc", MIB)[0] == 0, "within the reservation nobody is asked"
        client.tell(f"alloc {100 * MIB}")
        for exact in (False, True):
            asked = coordinator.expect(messages.ReserveMemory)
            assert (asked.bytes == 101 * MIB + 1024) is exact
            coordinator.send(messages.MemoryReserved(gpu=0, sequence=asked.sequence, bytes=64 * MIB))
        assert client.result()[0] == OUT_OF_MEMORY
        assert client.ask("info")[1] == 16 * GIB - MIB - 1024


def test_managed_memory_is_disguised(client: Client, tmp_path: Path) -> None:
    """Broken: a framework that asks about its pointer takes it for managed memory, or cannot find its allocation."""
    memory_type, host_pointer, is_managed, ordinal = 2, 4, 8, 9
    _, pointer = client.ask("alloc", 5 * MIB)
    inside = pointer + MIB + 3
    assert client.ask("attribute", is_managed, inside) == [0, 0, 0, 0]
    assert client.ask("attribute", memory_type, inside) == [0, 2, 0, 2]
    assert client.ask("attribute", ordinal, inside) == [0, 0, 0, 0]
    result, _, several, value = client.ask("attribute", host_pointer, inside)
    assert (result, several, value) == (INVALID_VALUE, 0, 0)
    assert client.ask("range", inside) == [0, pointer, 5 * MIB]
    assert client.ask("ipc", pointer) != 0
    assert "--memory device" in (tmp_path / "log").read_text(), "the remedy is said"
    _, own = client.ask("managed", MIB)
    assert client.ask("attribute", is_managed, own)[1] & 0xFF == 1
    result, _, row = client.ask("pitch", 1000, 10)
    assert (result, row % 512, row >= 1000) == (0, 0, True)


def test_stream_ordered_memory_in_and_out_of_captures(coordinator: ScriptedCoordinator, client: Client) -> None:
    """Broken: replacing a stream-ordered allocation spoils the capture of the stream, or is not counted."""
    coordinator.grant(1)
    result, pointer = client.ask("async", 2 * MIB)
    assert result == 0
    assert client.ask("attribute", 8, pointer) == [0, 0, 0, 0]
    assert client.ask("write", pointer, 2 * MIB, 9) == 0
    assert client.ask("free_async", pointer) == 0
    assert client.ask("free_async", pointer) == INVALID_VALUE
    assert client.ask("async", 2 * MIB) == [0, pointer], "its own stream has it again at once"
    assert client.ask("same", pointer, 2 * MIB, 9) is True
    assert client.ask("free_async", pointer) == 0
    assert client.ask("synchronize") == 0
    assert client.ask("info")[1] == 16 * GIB
    assert client.ask("capture", 1) == 0
    result, pointer = client.ask("async", MIB)
    assert result == 0
    assert client.ask("free_async", pointer) == 0
    assert client.ask("capture", 0) == 0, "the capture is still valid"
    assert client.ask("info")[1] == 16 * GIB


def test_a_reset_gives_everything_back(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, unit: int
) -> None:
    """Broken: after cudaDeviceReset a client is charged with memory that it has no more."""
    limit = 0 if unit == GIB else 4 * unit  # on a card, all that one can have must be little
    whole = limit or 16 * GIB
    with start(environment, tmp_path) as client:
        attached(client, coordinator, limit=limit)
        assert client.ask("alloc", 100 * MIB)[0] == client.ask("pitch", 1000, 1000)[0] == 0
        assert client.ask("reset") == 0
        assert client.ask("info")[1] == whole
        assert client.ask("alloc", whole)[0] == 0


def test_threads_and_forks(client: Client) -> None:
    """Broken: concurrent allocation loses bytes, or a forked child hangs in the hook."""
    assert client.ask("storm", 4, 200) == 0
    assert client.ask("info")[1] == 16 * GIB
    assert client.ask("alloc", MIB)[0] == 0
    assert client.ask("fork") == 0
    assert client.ask("info")[1] == 16 * GIB - MIB


def test_the_applications_own_vmm(
    coordinator: ScriptedCoordinator, environment: dict[str, str], tmp_path: Path, unit: int
) -> None:
    """Broken: PyTorch's expandable segments or JAX's one big handle go past the limit, or are charged for ever."""
    with start(environment, tmp_path) as client:
        attached(client, coordinator, limit=4 * unit)
        result, address = client.ask("map_released", 64 * MIB)
        assert result == 0
        assert client.ask("info")[1] == 4 * unit - 64 * MIB, "mapped memory is charged though its handle is released"
        assert client.ask("map_released", 4 * unit)[0] == OUT_OF_MEMORY
        assert client.ask("unmap", address, 64 * MIB) == 0
        assert client.ask("info")[1] == 4 * unit
        result, handle = client.ask("create", 3 * unit)
        assert result == 0
        assert client.ask("alloc", 2 * unit)[0] == OUT_OF_MEMORY
        assert client.ask("release", handle) == 0
        assert client.ask("alloc", 2 * unit)[0] == 0


def test_each_gpu_has_its_own_account(simulated: dict[str, str], tmp_path: Path) -> None:
    """Broken: memory on one GPU is charged to another, or a free from elsewhere is."""
    several = {**simulated, "NVSHARE_SIMULATE": "2x8GiB", "NVSHARE_MEMORY_LIMIT": "4GiB"}
    with start(several, tmp_path) as client:
        assert client.ask("start") == 0
        pointers = []
        for gpu in (0, 1):
            assert client.ask("use", gpu) == 0
            result, pointer = client.ask("alloc", (3 - gpu) * GIB)
            assert result == 0
            pointers.append(pointer)
        assert client.ask("info") == [0, 2 * GIB, 4 * GIB, 4 * GIB]
        assert client.ask("attribute", 9, pointers[0])[1] == 0
        assert client.ask("free", pointers[0]) == 0
        assert client.ask("info")[1] == 2 * GIB
        assert client.ask("use", 0) == 0
        assert client.ask("info") == [0, 4 * GIB, 4 * GIB, 4 * GIB]


FAULTS = (
    "cuMemAllocManaged", "cuMemAlloc", "cuMemFree", "cuMemAllocAsync", "cuMemFreeAsync", "cuMemCreate", "cuMemRelease",
    "cuEventCreate", "cuEventRecord", "cuStreamGetCtx", "cuMemAllocPitch", "cuCtxGetCurrent",
)  # fmt: skip


@pytest.mark.parametrize("mode", ["managed", "device"])
def test_a_fault_of_the_driver_is_passed_on_and_costs_nothing(
    simulated: dict[str, str], tmp_path: Path, mode: str
) -> None:
    """Broken: a failing driver call changes what the client is charged with."""
    faults = ",".join(f"{name}@2=719" for name in FAULTS)
    limited = {**simulated, "NVSHARE_MEMORY": mode, "NVSHARE_MEMORY_LIMIT": "1GiB", "NVSHARE_SIM_FAULTS": faults}
    with start(limited, tmp_path) as client:
        assert client.ask("start") == 0
        held: list[tuple[str, int, int]] = []
        codes = set()
        for _ in range(3):
            for name, end in (("alloc", "free"), ("managed", "free"), ("async", "free_async"), ("create", "release")):
                result, key = client.ask(name, 2 * MIB)
                codes.add(result)
                held += [(end, key, 2 * MIB)] if result == 0 else []
            result, key, row = client.ask("pitch", 512, 2048)
            codes.add(result)
            held += [("free", key, row * 2048)] if result == 0 else []
            charged = sum(size for _, _, size in held)
            assert client.ask("info")[1] == GIB - charged
        assert codes == {0, 719}
        for end, key, _ in held:
            while client.ask(end, key) != 0:
                pass
        assert client.ask("synchronize") == 0
        assert client.ask("info")[1] == GIB


def test_without_a_socket_nothing_is_changed(simulated: dict[str, str], tmp_path: Path) -> None:
    """Broken: the hook alone, with nobody to talk to, alters a program."""
    alone = {name: value for name, value in simulated.items() if name != "NVSHARE_SOCKET"}
    with start({**alone, "NVSHARE_MEMORY_LIMIT": "1GiB"}, tmp_path) as client:
        assert client.ask("start") == 0
        assert client.ask("info") == [0, 16 * GIB, 16 * GIB, 16 * GIB]
        _, pointer = client.ask("alloc", MIB)
        assert client.ask("attribute", 8, pointer) == [0, 0, 0, 0]
        assert client.ask("info")[1] == 16 * GIB - MIB
        assert client.ask("free", pointer) == 0


def libcudart() -> Path:
    """The real one, from the wheel that the hook is built with."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    found = [path for root in roots for path in sorted(Path(root).glob("cu*/lib/libcudart.so.1*"))]
    if not found:
        pytest.skip("no nvidia-cuda-runtime wheel of CUDA 13")
    return found[-1]


@pytest.mark.parametrize("mode", ["managed", "device"])
def test_the_real_runtime_library_sees_device_memory(environment: dict[str, str], mode: str) -> None:
    """Broken: cudaMalloc and its kin escape the quota, or their pointers look like something else."""
    device, managed = 2, 3
    limited = {**environment, "NVSHARE_MEMORY": mode, "NVSHARE_MEMORY_LIMIT": "1GiB"}
    program = [sys.executable, "-S", str(PROGRAM.with_name("memory_cudart.py")), str(libcudart())]
    done = subprocess.run(program, env=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "at_first": GIB,
        "plain": [device, False, True],
        "managed": [managed, True, True],
        "pitch": 1024,
        "with_all": GIB - 4 * MIB - 10240,
        "ordered": [device, False, True],
        "with_ordered": GIB - 5 * MIB - 10240,
        "at_last": GIB,
        "refused": OUT_OF_MEMORY,
    }
