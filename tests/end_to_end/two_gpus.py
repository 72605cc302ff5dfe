"""Programs that use two GPUs, step by step, on simulated ones and on real ones: what must hold on both.

Non-goals: tests (test_two_gpus.py, tests/gpu/test_two_cards.py), anything that only one kind of GPU does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nvshare.bench.harness.fixture import Fixture
from nvshare.coordinator.cli.ctl_call import call
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.end_to_end.conftest import TOLD, Told
from tests.hook.memory.programs.between_gpus import KINDS
from tests.waiting import eventually

MIB = 1 << 20
CAPACITY = "48MiB"
SIZE = 32 * MIB
"""Size of a program's memory on a GPU; two of them do not fit."""
LITTLE = 8 * MIB
COPIES = {name: place for place, name in enumerate(KINDS)}
"""Calls that memory_program.py's `copy_between` knows, and their numbers there."""


@contextmanager
def told(
    stand: Fixture, *, hooked: bool = True, name: str = "program", mode: str = "swap", peers: bool = True
) -> Iterator[Told]:
    """Such a program under the hook, or without it; it must end well.  `peers` False: GPUs reach nobody."""
    options = (f"--memory={mode}",) if hooked else ()
    extra = {} if peers else {"NVSHARE_SIM_PEERS": "0"}
    process = stand.start(TOLD, hooked=hooked, name=name, options=options, stdin=subprocess.PIPE, extra=extra)
    try:
        yield Told(process)
        process.communicate()
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def first_gpu(stand: Fixture) -> Any:
    """How GPU 0 stands."""
    return call(RuntimeDir(stand.directory), api.Status())["gpus"][0]


def evicted(stand: Fixture, rival: Told) -> None:
    """Has another program need the first GPU's memory, and free it again."""
    before = first_gpu(stand)["evicted_bytes"]
    pointer = rival.filled(SIZE, 9)
    assert rival.ask("same", pointer, SIZE, 9) is True
    assert first_gpu(stand)["evicted_bytes"] > before
    assert rival.ask("free", pointer) == 0


def answers(stand: Fixture, *, hooked: bool) -> list[Any]:
    """Answers to a program about peer access, wanted once too often and of the wrong GPU."""
    with told(stand, hooked=hooked) as program:
        said = [program.ask("peer_facts", *pair) for pair in ((0, 1), (1, 0), (0, 0), (0, 9))]
        said += [program.ask("use", 1)]
        for step in ("disable 0", "enable 1", "enable 0", "enable 0", "disable 0", "disable 0", "enable 0"):
            verb, owner = step.split()
            said.append((step, program.ask(f"{verb}_peer", owner)))
        return said


def reach_by_kernels(stand: Fixture) -> None:
    """A kernel on one GPU reads what lies on the other: after it was evicted, and while somebody else has that GPU."""
    with told(stand) as program:
        there = program.filled(SIZE, 1)
        assert program.ask("use", 1) == 0
        here = program.filled(SIZE, 2)
        with told(stand, name="rival") as rival:
            evicted(stand, rival)
        assert program.ask("enable_peer", 0) == 0
        assert program.ask("kernel_copy", here, there, SIZE) == 0
        assert program.ask("same", here, SIZE, 1) is True
        with told(stand, name="rival") as rival:
            pointer = rival.filled(LITTLE, 9)
            assert program.ask("write", here, SIZE, 3) == 0
            assert program.ask("kernel_copy", here, there, SIZE) == 0
            assert program.ask("same", here, SIZE, 1) is True
            assert rival.ask("same", pointer, LITTLE, 9) is True
        eventually(lambda: first_gpu(stand)["resident_bytes"] <= SIZE, "the rival's memory to be free")
        assert program.ask("use", 0) == 0
        later = program.filled(LITTLE, 4)
        assert program.ask("use", 1) == 0
        assert program.ask("kernel_copy", here, later, LITTLE) == 0
        assert program.ask("same", here, LITTLE, 4) is True


ALLOCATE = {"plain": "alloc", "pool": "async", "mapped": "map_released"}
ILLEGAL_ADDRESS, UNSUPPORTED, INVALID_VALUE, INVALID_DEVICE = 700, 217, 1, 101


def first_memory(program: Told, memory: str) -> int:
    """Memory of a kind on GPU 0, written to; GPU 1 is current afterwards."""
    result, pointer = program.ask(ALLOCATE[memory], LITTLE)
    assert result == 0
    assert memory != "mapped" or program.ask("allow", pointer, LITTLE, 0, 3) == 0
    assert program.ask("synchronize") == 0
    assert program.ask("write", pointer, LITTLE, 1) == 0
    assert program.ask("use", 1) == 0
    return int(pointer)


def rights(stand: Fixture, *, hooked: bool, mode: str = "swap", peers: bool = True) -> dict[str, int]:
    """Rights of GPU 1 to memory of GPU 0: by kind of memory and call, for kernels by what was given."""
    found = {}

    def begin() -> AbstractContextManager[Told]:
        return told(stand, hooked=hooked, mode=mode, peers=peers)

    for memory in ALLOCATE:
        for given in ("peer access", "nothing", "rights"):
            with begin() as program:  # of its own: a kernel that fails ends the context
                there = first_memory(program, memory)
                here = program.filled(LITTLE, 2)
                if given == "peer access":  # which it has not yet
                    for name, kind in COPIES.items():
                        found[f"{memory}, {name}"] = program.ask("copy_between", kind, here, there, LITTLE)
                    found[f"{memory}, to the host"] = program.ask("read", there, LITTLE)
                    found[f"{memory}, from the host"] = program.ask("write", there, LITTLE, 3)
                    found[f"{memory}, memset"] = program.ask("set", there, LITTLE, 4)
                result = program.ask("enable_peer", 0) if given == "peer access" else 0
                if given == "rights" and memory != "plain":
                    allow = ("allow", there, LITTLE, 1, 3) if memory == "mapped" else ("pool_allow", 0, 1)
                    result = program.ask(*allow)
                found[f"{memory}, kernel, {given}"] = result or program.ask("kernel_copy", here, there, LITTLE)
    return found


def rights_of_cards(*, peers: bool = True) -> dict[str, int]:
    """Answers of cards and of the simulated GPU."""
    found = {}
    for memory in ALLOCATE:
        own = memory == "plain"
        for name in COPIES:
            found[f"{memory}, {name}"] = 0 if own or "Peer" in name else INVALID_VALUE
        for way in ("to the host", "from the host"):
            found[f"{memory}, {way}"] = 0 if own else INVALID_VALUE
        found[f"{memory}, memset"] = INVALID_VALUE
        found[f"{memory}, kernel, nothing"] = ILLEGAL_ADDRESS
        found[f"{memory}, kernel, peer access"] = UNSUPPORTED if not peers else 0 if own else ILLEGAL_ADDRESS
        found[f"{memory}, kernel, rights"] = ILLEGAL_ADDRESS if own else 0 if peers else INVALID_DEVICE
    return found


def reach_by_copies(stand: Fixture, names: Iterable[str], *, peers: bool = True) -> None:
    """Copies from one GPU to the other without peer access, of memory that was evicted; and back."""
    with told(stand, hooked=False, peers=peers) as plain:
        pointers = [plain.ask("use", gpu) or plain.filled(LITTLE, gpu) for gpu in (0, 1)]
        expected = {name: plain.ask("copy_between", COPIES[name], *reversed(pointers), LITTLE) for name in names}
    with told(stand, name="rival") as rival:
        for name, result in expected.items():
            with told(stand, peers=peers) as program:  # of its own: what a graph names cannot move any more
                there = program.filled(SIZE, 1)
                assert program.ask("use", 1) == 0
                here = program.filled(SIZE, 2)
                evicted(stand, rival)
                assert program.ask("copy_between", COPIES[name], here, there, SIZE) == result, name
                assert result != 0 or program.ask("same", here, SIZE, 1) is True, name
                assert program.ask("write", here, SIZE, 5) == 0
                assert program.ask("copy_between", 1, there, here, SIZE) == 0
                assert program.ask("use", 0) == 0
                assert program.ask("same", there, SIZE, 5) is True, name
