"""The memory side in a real process: the whole hook over a driver, told by a scripted coordinator.

Over the simulated GPU, and where there is a card, over that too: the scripted coordinator makes it one of 16 GiB.

Invariant: on a card a program never has more than 128 MiB of managed memory, and tests run there one at a time.  Sizes
that matter only in relation to a limit come from the fixture `unit`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.scripted import JsonClient, ScriptedCoordinator
from tests.waiting import eventually

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
PROGRAMS = Path(__file__).resolve().parent / "programs"
MODES = pytest.mark.parametrize("mode", ["device", "managed", "swap"])
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


def start(environment: dict[str, str]) -> Client:
    """The program under the hook."""
    return Client([sys.executable, "-S", str(PROGRAMS / "memory_program.py")], environment)


def attached(client: Client, coordinator: ScriptedCoordinator, **settings: Any) -> None:
    """Has the program use its GPU for the first time, and grants the lease."""
    assert client.ask("start") == 0
    client.tell("info")
    coordinator.welcome(**settings)
    assert client.result()[0] == 0


@contextmanager
def begun(environment: dict[str, str], coordinator: ScriptedCoordinator, **settings: Any) -> Iterator[Client]:
    """A program that has lease 1 and knows it."""
    with start(environment) as program:
        attached(program, coordinator, **settings)
        coordinator.grant(1)
        assert program.ask("held") == 0
        yield program


@pytest.fixture
def client(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> Iterator[Client]:
    """A program that the coordinator knows."""
    with start(environment) as program:
        attached(program, coordinator)
        yield program


@MODES
def test_data_survives_eviction(coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str) -> None:
    """Broken: a client's bytes differ after a switch, or it claims to have made room that it did not make."""
    with begun({**environment, "NVSHARE_MEMORY": mode}, coordinator) as client:
        sizes = {1: 3 * MIB, 2: 96 * MIB, 3: 4097, 4: 1}
        pointers = {}
        for seed, size in sizes.items():
            result, pointers[seed] = client.ask("alloc", size)
            assert result == 0
            assert client.ask("write", pointers[seed], size, seed) == 0
        coordinator.revoke(1)
        report = coordinator.state()
        charged = 102 * MIB if mode == "swap" else 99 * MIB + 4608 + 512
        movable = charged if mode != "device" else 0
        assert (report.allocated_bytes, report.pinned_bytes) == (charged, charged - movable)
        assert coordinator.evict(charged) == (movable, 0)
        assert reported(coordinator, resident=charged - movable).host_bytes == movable
        assert coordinator.restore(charged) == (movable, 0)
        coordinator.grant(2)
        for seed, size in sizes.items():
            assert client.ask("same", pointers[seed], size, seed) is True
            assert client.ask("free", pointers[seed]) == 0
        assert client.ask("info")[1] == 16 * GIB


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_data_survives_many_partial_moves(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str
) -> None:
    """Broken: some order of partial evictions, restorations, allocations and frees loses bytes or miscounts them, or
    two small allocations share bytes."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    dice = random.Random(seed)
    held: dict[int, tuple[int, int]] = {}
    own: set[int] = set()  # pointers of the application's own managed memory, which has no stream-ordered free
    with begun({**environment, "NVSHARE_MEMORY": mode}, coordinator) as client:
        for turn in range(1, 31):
            for number, (pointer, size) in list(held.items()):
                assert client.ask("same", pointer, size, number) is True
                if dice.random() < 0.3 or sum(size for _, size in held.values()) > 64 * MIB:
                    assert client.ask("free" if pointer in own else dice.choice(["free", "free_async"]), pointer) == 0
                    own.discard(pointer)
                    del held[number]
            for number in range(turn * 10, turn * 10 + 3):
                size = dice.choice([1, 700, 70_000, 1_900_000, 3 * MIB + 1, 9 * MIB])
                kind = dice.choice(["alloc", "async", "managed"] if mode == "managed" else ["alloc", "async"])
                result, pointer = client.ask(kind, size)
                assert result == 0
                own |= {pointer} if kind == "managed" else set()
                assert client.ask("write", pointer, size, number) == 0
                held[number] = pointer, size
            assert client.ask("synchronize") == 0
            charged = 16 * GIB - client.ask("info")[1]
            assert charged == sum((size + 511) // 512 * 512 for _, size in held.values()) or mode == "swap"
            coordinator.revoke(turn)
            for out in (True, False):
                partial_move(coordinator, dice.randrange(1, 2 * charged), out=out)
            for number in [n for n in held if dice.random() < 0.1]:  # without a lease, wherever it is
                assert client.ask("free", held.pop(number)[0]) == 0
            coordinator.grant(turn + 1)
        for pointer, _ in held.values():
            assert client.ask("free", pointer) == 0
        until(client, "info", [0, 16 * GIB, 16 * GIB, 16 * GIB])


def partial_move(coordinator: ScriptedCoordinator, wanted: int, *, out: bool) -> None:
    """A target that is anywhere up to everything away; what is told agrees."""
    before = coordinator.state()
    moved, error = coordinator.evict(wanted) if out else coordinator.restore(wanted)
    after = coordinator.state()
    assert error == 0
    arena = 2 * MIB if out else 0  # an eviction may free one that is empty
    assert 0 <= before.allocated_bytes - after.allocated_bytes <= arena
    if out:
        assert moved >= min(wanted, before.resident_bytes - before.pinned_bytes)
        assert after.resident_bytes == before.resident_bytes - moved
    else:
        assert moved <= wanted
        assert after.resident_bytes == before.resident_bytes + moved


def reported(coordinator: ScriptedCoordinator, resident: int) -> messages.State:
    """The State that says so; every wait inside is bounded."""
    known = [m for m in coordinator.received if isinstance(m, messages.State)]
    while not known or known[-1].resident_bytes != resident:
        known.append(coordinator.expect(messages.State))
    return known[-1]


def test_a_limit_changes_while_the_program_runs(
    coordinator: ScriptedCoordinator, environment: dict[str, str], unit: int
) -> None:
    """Broken: `nvshare-ctl set limit` needs a restart of the job."""
    with start(environment) as client:
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


def test_reservations_are_asked_for_and_obeyed(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: memory is handed out that the coordinator has refused, or its yes is not waited for."""
    with start({**environment, "NVSHARE_MEMORY": "device"}) as client:
        attached(client, coordinator, reserve=True)
        client.tell("alloc 1000")
        assert coordinator.question() == 1024 + 512, "half more than it has"
        coordinator.answer(64 * MIB)
        assert client.result()[0] == 0
        assert client.ask("alloc", MIB)[0] == 0, "within the reservation nobody is asked"
        while coordinator.expect(messages.State).total_bytes != MIB + 1024:  # what is not used is given back
            assert not coordinator.has_question()
        client.tell(f"alloc {100 * MIB}")
        for exact in (False, True):
            assert (coordinator.question() == 101 * MIB + 1024) is exact
            coordinator.answer(MIB + 1024)
        assert client.result()[0] == OUT_OF_MEMORY
        assert client.ask("info")[1] == 16 * GIB - MIB - 1024


def test_an_answer_counts_once(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> None:
    """Broken: a target that repeats an answer returns what was given back, or is taken for the next answer."""
    with start({**environment, "NVSHARE_MEMORY": "device"}) as client:
        attached(client, coordinator, reserve=True)
        client.tell("alloc 1000")
        assert coordinator.question() > 0
        coordinator.answer(64 * MIB)
        assert client.result()[0] == 0
        while coordinator.state().total_bytes != 1024:
            coordinator.expect(messages.State)
        coordinator.move(0)
        client.tell(f"alloc {MIB}")
        asked = coordinator.question()
        coordinator.target(0)
        coordinator.answer(asked)
        assert client.result()[0] == 0


def test_the_next_coordinator_learns_the_reservation(
    coordinator: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    """Broken: after a restart of the coordinator a program has room that is given to others too."""
    with start({**environment, "NVSHARE_MEMORY": "device"}) as client:
        attached(client, coordinator, reserve=True)
        client.tell(f"alloc {MIB}")
        asked, number = coordinator.question(), coordinator.state().asks
        coordinator.answer(asked)
        assert client.result()[0] == 0
        coordinator.stop()
        coordinator.restart()
        coordinator.welcome(reserve=True)
        assert MIB <= coordinator.question() <= asked
        assert coordinator.state().asks == number
        coordinator.answer(0)
        coordinator.move(0)  # so the answer has been read
        client.tell("alloc 1000")
        assert coordinator.question() > MIB, "what this one refuses is not reserved"
        assert coordinator.state().asks != number


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


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_stream_ordered_memory_in_and_out_of_captures(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str
) -> None:
    """Broken: replacing a stream-ordered allocation loses it in an eviction, frees it twice, spoils the capture of the
    stream, or is not counted."""
    with begun({**environment, "NVSHARE_MEMORY": mode}, coordinator) as client:
        result, pointer = client.ask("async", 2 * MIB)
        assert result == 0
        assert client.ask("attribute", 8, pointer) == [0, 0, 0, 0]
        assert client.ask("write", pointer, 2 * MIB, 9) == 0
        coordinator.revoke(1)
        assert coordinator.evict(GIB)[1] == 0
        coordinator.grant(2)
        assert client.ask("same", pointer, 2 * MIB, 9) is True
        assert client.ask("free_async", pointer) == 0
        assert client.ask("free_async", pointer) == INVALID_VALUE
        assert client.ask("async", 2 * MIB) == [0, pointer], "its own stream has it again at once"
        assert client.ask("same", pointer, 2 * MIB, 9) is True
        assert client.ask("free_async", pointer) == 0
        assert client.ask("synchronize") == 0
        until(client, "info", [0, 16 * GIB, 16 * GIB, 16 * GIB])
        assert client.ask("capture", 1) == 0
        result, pointer = client.ask("async", MIB)
        assert result == 0
        assert client.ask("free_async", pointer) == 0
        assert client.ask("capture", 0) == 0, "the capture is still valid"
        until(client, "info", [0, 16 * GIB, 16 * GIB, 16 * GIB])


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_a_reset_gives_everything_back(
    coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str
) -> None:
    """Broken: after cudaDeviceReset a client is charged with memory that it has no more."""
    whole = 128 * MIB
    with begun({**environment, "NVSHARE_MEMORY": mode}, coordinator, limit=whole) as client:
        for size in (90 * MIB, 1000, 3 * MIB):
            assert client.ask("alloc", size)[0] == 0
        assert client.ask("async", 5 * MIB)[0] == client.ask("pitch", 1000, 1000)[0] == 0
        assert client.ask("reset") == 0
        assert client.ask("info")[1] == whole
        assert client.ask("alloc", whole)[0] == 0


@pytest.mark.parametrize("mode", ["managed", "swap"])
def test_threads_and_forks(coordinator: ScriptedCoordinator, environment: dict[str, str], mode: str) -> None:
    """Broken: concurrent allocation loses bytes, or a forked child hangs in the hook."""
    with begun({**environment, "NVSHARE_MEMORY": mode}, coordinator) as client:
        assert client.ask("storm", 4, 200) == 0
        assert client.ask("info")[1] == 16 * GIB
        assert client.ask("alloc", MIB)[0] == 0
        assert client.ask("fork") == 0
        assert client.ask("info")[1] == 16 * GIB - MIB


def test_the_applications_own_vmm(coordinator: ScriptedCoordinator, environment: dict[str, str], unit: int) -> None:
    """Broken: PyTorch's expandable segments or JAX's one big handle go past the limit, or are charged for ever."""
    with start(environment) as client:
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


def test_each_gpu_has_its_own_account(simulated: dict[str, str]) -> None:
    """Broken: memory on one GPU is charged to another, or a free from elsewhere is."""
    several = {**simulated, "NVSHARE_SIMULATE": "2x8GiB", "NVSHARE_MEMORY_LIMIT": "4GiB"}
    with start(several) as client:
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
