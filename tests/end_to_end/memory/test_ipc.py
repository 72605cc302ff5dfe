"""Programs that share memory by legacy IPC in mode `swap`, and take turns on a card that is too small for both.

Non-goals: what one call answers (tests/hook/ipc/test_ipc.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nvshare.simulated_gpu.trace import overlaps
from tests.end_to_end.conftest import Node, Told, finish
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.hook.interception.test_interception_cudart import own_cudart

PROGRAMS = Path(__file__).resolve().parent / "programs"
MIB = 1 << 20
LAZY, CAPABLE = 1, 10
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE"""


def both_hold(pair: Sequence[Told], addresses: Sequence[int], size: int, seeds: Sequence[int]) -> None:
    """Both programs look at their memory at the same time, and find their pattern."""
    for process, address, seed in zip(pair, addresses, seeds, strict=True):
        process.tell(f"same {address} {size} {seed}")
    assert [process.result() for process in pair] == [True, True]


def both_write_and_read(pair: Sequence[Told], own_size: int, size: int, rounds: int) -> None:
    """Each opens what the other exports; in turns one writes there and both check, beside memory of their own."""
    own = [process.filled(own_size, 100 + number) for number, process in enumerate(pair)]
    exported = [process.filled(size, 200) for process in pair]
    handles = [process.ask(f"ipc_get {pointer}")[1] for process, pointer in zip(pair, exported, strict=True)]
    opened = [process.ask(f"ipc_open {handle} {LAZY}") for process, handle in zip(pair, handles[::-1], strict=True)]
    assert [result for result, _ in opened] == [0, 0]
    for seed in range(rounds):
        writer = seed % 2
        assert pair[writer].ask(f"write {opened[writer][1]} {size} {seed}") == 0
        seen = [opened[number][1] if number == writer else exported[number] for number in (0, 1)]
        both_hold(pair, seen, size, (seed, seed))
        both_hold(pair, own, own_size, (100, 101))
    for process, (_, pointer) in zip(pair, opened, strict=True):
        assert process.ask(f"ipc_close {pointer}") == 0
    for process, *pointers in zip(pair, exported, own, strict=True):
        assert [process.ask(f"free {pointer}") for pointer in pointers] == [0, 0]


@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
def test_two_programs_share_while_they_evict_each_other(node: Node) -> None:
    """Broken: what is shared is lost, stale or moved away below the other one when they take turns."""
    node.start_coordinator("--quantum=20ms")
    pair = [node.told("--memory=swap") for _ in range(2)]
    both_write_and_read(pair, 30 * MIB, 10 * MIB, 6)
    gpu = node.control("status")["gpus"][0]
    assert gpu["evicted_bytes"] > 0, gpu
    assert overlaps([busy for busy in node.trace() if busy.kind == "kernel"]) == []


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_importers_of_every_mode(node: Node, mode: str) -> None:
    """Broken: only a program in mode `swap` can open what one in mode `swap` exports."""
    size = 70 << 20
    node.start_coordinator("--quantum=20ms")
    exporter, importer = node.told("--memory=swap"), node.told(f"--memory={mode}")
    pointer = exporter.filled(size, 1)
    result, mapped = importer.ask(f"ipc_open {exporter.ask(f'ipc_get {pointer}')[1]} {LAZY}")
    assert result == 0
    assert importer.ask("alloc 1000000")[0] == 0
    assert importer.ask(f"same {mapped} {size} 1") is True
    assert importer.ask(f"write {mapped} {size} 2") == 0
    assert exporter.ask(f"same {pointer} {size} 2") is True
    assert importer.ask(f"attribute 10 {mapped}") == [0, 0, 0, 0], "it is not the importer's to export"
    assert importer.ask(f"attribute 12 {mapped}") == [0, size, 0, size]
    assert importer.ask(f"ipc_close {mapped}") == 0
    assert exporter.ask(f"free {pointer}") == 0


@pytest.mark.sanitizer
@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sharing_memory_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race or a use after free between the program, the mover and the thread that answers importers; or
    between threads that open and close the same memory while its exporter allocates and frees."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")
    pair = [node.told("--memory=swap", **variables) for _ in range(2)]
    both_write_and_read(pair, 30 * MIB, 10 * MIB, 3)
    exporter, importer = pair
    pointer = exporter.ask(f"alloc {6 * MIB}")[1]
    importer.tell(f"ipc_storm {exporter.ask(f'ipc_get {pointer}')[1]} 4 25")
    assert exporter.ask("storm 3 50") == 0
    assert importer.result() == 0
    assert exporter.ask(f"free {pointer}") == 0
    finish_sanitized(exporter.process, importer.process)


def refusals(exporter: Told, importer: Told) -> dict[str, Any]:
    """Results of calls that the driver, or the hook, refuses, and of some beside them."""
    pointer = exporter.filled(4 * MIB, 1)
    handle = exporter.ask(f"ipc_get {pointer}")[1]
    opened = importer.ask(f"ipc_open {handle} {LAZY}")[1]
    said = {
        "get inside of it": exporter.ask(f"ipc_get {pointer + MIB}") == [0, handle],
        "capable": exporter.ask(f"attribute {CAPABLE} {pointer}")[:2],
        "open one's own": exporter.ask(f"ipc_open {handle} {LAZY}")[0],
        "get into NULL": exporter.ask(f"ipc_null {pointer}"),
        "get nothing": exporter.ask("ipc_get 4096")[0],
        "close what is not open": exporter.ask(f"ipc_close {pointer}"),
        "open again": importer.ask(f"ipc_open {handle} {LAZY}") == [0, opened],
        "close": [importer.ask(f"ipc_close {opened}") for _ in range(3)],
        "open without flags": importer.ask(f"ipc_open {handle} 0")[0],
        "open garbage": importer.ask(f"ipc_open {int.from_bytes(b'Z' * 64, 'little')} {LAZY}")[0],
    }
    assert exporter.ask(f"free {pointer}") == 0
    return said | {"open what is freed": importer.ask(f"ipc_open {handle} {LAZY}")[0]}


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_the_same_is_refused_as_by_the_driver(node: Node, mode: str) -> None:
    """Broken: a program that relies on an error of the driver's gets another one in mode `swap`."""
    node.start_coordinator()
    pair = [node.told(f"--memory={mode}") for _ in range(2)]
    assert refusals(*pair) == {
        "get inside of it": True,
        "capable": [0, 1],
        "open one's own": 201,
        "get into NULL": 1,
        "get nothing": 1,
        "close what is not open": 1,
        "open again": True,
        "close": [0, 0, 1],
        "open without flags": 1,
        "open garbage": 1,
        "open what is freed": 400,
    }


def test_the_runtime_shares(node: Node) -> None:
    """Broken: a program on the real libcudart, as CuPy's, cannot hand memory to a process that it started."""
    node.start_coordinator("--quantum=20ms")
    command = [sys.executable, str(PROGRAMS / "ipc_runtime.py"), str(own_cudart()), "3000"]
    told = finish(node.run(command, "--memory=swap"))
    assert told == {"rounds": 10, "wrong": 0, "child": 0}
