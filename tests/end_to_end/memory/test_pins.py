"""Programs of which one has memory that cannot move, and another needs more of the card than that leaves.

Non-goals: what is pinned and how it is shared (test_ipc.py), who is refused (tests/unit/memory/test_pinning.py).
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.end_to_end.conftest import Node
from tests.end_to_end.memory.test_ipc import TOLD, ask, begin
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.waiting import eventually

MIB = 1 << 20
OUT_OF_MEMORY = 2
NEEDED = 160 * MIB

pytestmark = pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)


def started(node: Node, name: str, mode: str = "swap", **variables: str) -> subprocess.Popen[str]:
    """A program that does what it is told, and uses the GPU."""
    process = node.run(TOLD, f"--memory={mode}", f"--name={name}", variables=variables)
    begin(process)
    return process


def filled(process: subprocess.Popen[str], size: int, seed: int) -> int:
    """The address of memory that holds a pattern."""
    result, pointer = ask(process, f"alloc {size}")
    assert result == 0
    assert ask(process, f"write {pointer} {size} {seed}") == 0
    return int(pointer)


def seat(node: Node, name: str) -> dict[str, Any]:
    """A program's memory in the coordinator's status."""
    (client,) = [client for client in node.control("status")["clients"] if client["name"] == name]
    found: dict[str, Any] = client["seats"][0]
    return found


def take_room(node: Node) -> subprocess.Popen[str]:
    """A program in mode `managed`, of which nobody is asked, gets an array that leaves the consumer too little."""
    other, passing = started(node, "other", "managed"), started(node, "passing")
    filled(passing, 200 * MIB, 4)  # so the consumer is moved away
    passing.kill()
    eventually(lambda: ask(other, f"array {120 * MIB}")[0] == 0, "the room that it left")
    eventually(lambda: seat(node, "consumer")["lacking_bytes"] > 0, "the coordinator's notice")
    return other


def test_an_export_that_would_lock_another_out_is_refused(node: Node) -> None:
    """Broken: the second program waits, in silence and for ever, for room that the first one's shared memory takes."""
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer"), started(node, "consumer")
    needed, shared = filled(consumer, NEEDED, 1), filled(producer, 120 * MIB, 2)
    assert ask(producer, f"ipc_get {shared}")[0] == OUT_OF_MEMORY
    assert ask(consumer, f"same {needed} {NEEDED} 1") is True


def test_the_reservation_of_a_device_program_leaves_room_for_an_allocation(node: Node) -> None:
    """Broken: the device program reserves far more than it allocates, and the other program is out of memory."""
    node.start_coordinator("--quantum=20ms")
    device = started(node, "device", "device")
    held = filled(device, 8 * MIB, 1)
    swap = started(node, "swap")
    needed = filled(swap, 232 * MIB, 2)
    assert ask(device, f"same {held} {8 * MIB} 1") is True
    assert ask(swap, f"same {needed} {232 * MIB} 2") is True


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_asking_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race or a use after free where threads ask for pins, are refused, and allocate meanwhile."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer", **variables), started(node, "consumer", **variables)
    needed, small = filled(consumer, NEEDED, 1), filled(producer, 20 * MIB, 3)
    shared = filled(producer, 120 * MIB, 2)
    for _ in range(2):
        assert ask(producer, f"ipc_get {shared}")[0] == OUT_OF_MEMORY
        assert ask(producer, f"ipc_get {small}")[0] == 0
        assert ask(producer, f"array {200 * MIB}")[0] == OUT_OF_MEMORY
        # On a busy machine the consumer's memory may not move for so long that it is not waited for.
        eventually(lambda: ask(producer, "storm 3 20") == 0, "allocations beside memory that moves")
        assert ask(consumer, f"same {needed} {NEEDED} 1") is True
        assert ask(producer, f"free {small}") == 0
        small = filled(producer, 20 * MIB, 3)
    finish_sanitized(producer, consumer)


def test_who_comes_later_is_out_of_memory_at_once(node: Node) -> None:
    """Broken: a program allocates what can never be on the card, and finds out by waiting."""
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer"), started(node, "consumer")
    assert ask(producer, f"ipc_get {filled(producer, 120 * MIB, 2)}")[0] == 0
    assert ask(consumer, f"alloc {NEEDED}")[0] == OUT_OF_MEMORY
    rest = filled(consumer, 120 * MIB, 1)
    assert ask(consumer, f"same {rest} {120 * MIB} 1") is True


def test_who_cannot_run_waits_until_there_is_room(node: Node) -> None:
    """Broken: a program that can do nothing with its turns takes them from others, or never comes back."""
    node.start_coordinator("--quantum=20ms")
    consumer, third = started(node, "consumer"), started(node, "third")
    needed = filled(consumer, NEEDED, 1)
    other = take_room(node)
    assert consumer.stdin is not None
    consumer.stdin.write(f"same {needed} {NEEDED} 1\n")
    consumer.stdin.flush()
    eventually(lambda: seat(node, "consumer")["unschedulable"], "that it is shut out")
    assert "immovable: other" in node.log()
    pointer = filled(third, 20 * MIB, 3)
    assert ask(third, f"same {pointer} {20 * MIB} 3") is True
    other.kill()
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == "true\n"
    assert seat(node, "consumer")["unschedulable"] is False
