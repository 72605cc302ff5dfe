"""Programs of which one has memory that cannot move, and another needs more of the card than that leaves.

Non-goals: what is pinned and how it is shared (test_ipc.py), who is refused (tests/unit/memory/test_pinning.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.conftest import Node, Told
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.waiting import eventually

MIB = 1 << 20
OUT_OF_MEMORY = 2
NEEDED = 80 * MIB

pytestmark = pytest.mark.parametrize("node", ["1x128MiB"], indirect=True)


def started(node: Node, name: str, mode: str = "swap", **variables: str) -> Told:
    """A program that does what it is told, and uses the GPU."""
    return node.told(f"--memory={mode}", f"--name={name}", **variables)


def seat(node: Node, name: str) -> dict[str, Any]:
    """A program's memory in the coordinator's status."""
    (client,) = [client for client in node.control("status")["clients"] if client["name"] == name]
    found: dict[str, Any] = client["seats"][0]
    return found


def take_room(node: Node) -> Told:
    """A program in mode `managed`, of which nobody is asked, gets an array that leaves the consumer too little."""
    other, passing = started(node, "other", "managed"), started(node, "passing")
    passing.filled(100 * MIB, 4)  # so the consumer is moved away
    passing.process.kill()
    eventually(lambda: other.ask(f"array {60 * MIB}")[0] == 0, "the room that it left")
    eventually(lambda: seat(node, "consumer")["lacking_bytes"] > 0, "the coordinator's notice")
    return other


def test_an_export_that_would_lock_another_out_is_refused(node: Node) -> None:
    """Broken: the second program waits, in silence and for ever, for room that the first one's shared memory takes."""
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer"), started(node, "consumer")
    needed, shared = consumer.filled(NEEDED, 1), producer.filled(60 * MIB, 2)
    assert producer.ask(f"ipc_get {shared}")[0] == OUT_OF_MEMORY
    assert consumer.ask(f"same {needed} {NEEDED} 1") is True


def test_the_reservation_of_a_device_program_leaves_room_for_an_allocation(node: Node) -> None:
    """Broken: the device program reserves far more than it allocates, and the other program is out of memory."""
    node.simulate = "1x256MiB"
    node.start_coordinator("--quantum=20ms")
    device = started(node, "device", "device")
    held = device.filled(8 * MIB, 1)
    swap = started(node, "swap")
    needed = swap.filled(232 * MIB, 2)
    assert device.ask(f"same {held} {8 * MIB} 1") is True
    assert swap.ask(f"same {needed} {232 * MIB} 2") is True


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_asking_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race or a use after free where threads ask for pins, are refused, and allocate meanwhile."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer", **variables), started(node, "consumer", **variables)
    needed, small = consumer.filled(NEEDED, 1), producer.filled(10 * MIB, 3)
    shared = producer.filled(60 * MIB, 2)
    for _ in range(2):
        assert producer.ask(f"ipc_get {shared}")[0] == OUT_OF_MEMORY
        assert producer.ask(f"ipc_get {small}")[0] == 0
        assert producer.ask(f"array {100 * MIB}")[0] == OUT_OF_MEMORY
        # On a busy machine the consumer's memory may not move for so long that it is not waited for.
        eventually(lambda: producer.ask("storm 3 20") == 0, "allocations beside memory that moves")
        assert consumer.ask(f"same {needed} {NEEDED} 1") is True
        assert producer.ask(f"free {small}") == 0
        small = producer.filled(10 * MIB, 3)
    finish_sanitized(producer.process, consumer.process)


def test_who_comes_later_is_out_of_memory_at_once(node: Node) -> None:
    """Broken: a program allocates what can never be on the card, and finds out by waiting."""
    node.start_coordinator("--quantum=20ms")
    producer, consumer = started(node, "producer"), started(node, "consumer")
    assert producer.ask(f"ipc_get {producer.filled(60 * MIB, 2)}")[0] == 0
    assert consumer.ask(f"alloc {NEEDED}")[0] == OUT_OF_MEMORY
    rest = consumer.filled(60 * MIB, 1)
    assert consumer.ask(f"same {rest} {60 * MIB} 1") is True


def test_who_cannot_run_waits_until_there_is_room(node: Node) -> None:
    """Broken: a program that can do nothing with its turns takes them from others, or never comes back."""
    node.start_coordinator("--quantum=20ms")
    consumer, third = started(node, "consumer"), started(node, "third")
    needed = consumer.filled(NEEDED, 1)
    other = take_room(node)
    consumer.tell(f"same {needed} {NEEDED} 1")
    eventually(lambda: seat(node, "consumer")["unschedulable"], "that it is shut out")
    assert "immovable: other" in node.log()
    pointer = third.filled(10 * MIB, 3)
    assert third.ask(f"same {pointer} {10 * MIB} 3") is True
    other.process.kill()
    assert consumer.result() is True
    assert seat(node, "consumer")["unschedulable"] is False
