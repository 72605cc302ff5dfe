"""What is going to stay on the card is asked for first: what each call says when it may, may not, or nobody answers.

Non-goals: who is refused (tests/unit/memory/test_pinning.py), two programs
(tests/end_to_end/memory/test_pins.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import Client, start
from tests.hook.scripted import ScriptedCoordinator
from tests.hook.swap.test_swap_process import CAPACITY, MIB, attached, hold

OUT_OF_MEMORY = 2


def settle(coordinator: ScriptedCoordinator, **more: Any) -> None:
    """GpuSettings for GPU 0, of a coordinator that wants to be asked."""
    coordinator.settings(**{"capacity_bytes": CAPACITY, "ask_pins": True} | more)


@pytest.fixture
def client(coordinator: ScriptedCoordinator, environment: dict[str, str]) -> Iterator[Client]:
    """A program in mode `swap` that holds the lease."""
    with start(environment) as program:
        attached(program, coordinator, ask_pins=True)
        hold(program, coordinator)
        yield program


def asked(coordinator: ScriptedCoordinator, *, allow: bool) -> int:
    """The next question, which is answered; how many bytes it was about."""
    total = coordinator.pins_question()
    coordinator.answer_pins(total if allow else 0)
    return total


def allocated(client: Client, size: int) -> int:
    """Memory that holds something."""
    result, pointer = client.ask("alloc", size)
    assert result == 0
    assert client.ask("write", pointer, size, 1) == 0
    return int(pointer)


def test_an_export_asks_first(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: memory is pinned that the coordinator knows nothing of, or asked for again by the second handle."""
    pointer, other = allocated(client, 100 * MIB), allocated(client, 70 * MIB)
    client.tell(f"ipc_get {pointer}")
    assert asked(coordinator, allow=True) == 100 * MIB
    assert client.result()[0] == 0
    assert client.ask("ipc_get", pointer)[0] == 0, "it has a handle: nobody is asked"
    client.tell(f"ipc_get {other}")
    assert asked(coordinator, allow=True) == 170 * MIB, "in all"
    assert client.result()[0] == 0
    coordinator.revoke(1)
    assert coordinator.state().pinned_bytes == 170 * MIB


def test_a_refused_export_is_out_of_memory_and_pins_nothing(
    client: Client, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """Broken: a refusal looks like success, leaves memory pinned, or nobody learns what to do."""
    pointer = allocated(client, 100 * MIB)
    client.tell(f"ipc_get {pointer}")
    assert asked(coordinator, allow=False) == 100 * MIB
    assert client.result()[0] == OUT_OF_MEMORY
    said = (tmp_path / "log").read_text()
    assert "cuIpcGetMemHandle" in said
    assert "free some there" in said
    client.tell(f"ipc_get {pointer}")
    assert asked(coordinator, allow=True) == 100 * MIB, "the refused question does not count"
    assert client.result()[0] == 0
    assert client.ask("same", pointer, 100 * MIB, 1) is True


def test_a_coordinator_that_does_not_require_it_is_not_asked(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: an export waits for an answer though no other client needs the room."""
    pointer = allocated(client, 40 * MIB)
    settle(coordinator, ask_pins=False)
    assert client.ask("info")[0] == 0
    coordinator.revoke(1)  # so the settings have been read
    coordinator.grant(2)
    assert client.ask("ipc_get", pointer)[0] == 0
    coordinator.revoke(2)
    assert not coordinator.has_pins_question()


def restart(coordinator: ScriptedCoordinator) -> None:
    """Another one, to which the program attaches; what it said so far is forgotten."""
    coordinator.stop()
    coordinator.restart()
    coordinator.expect(messages.Hello)
    coordinator.send(messages.Welcome(1))
    coordinator.expect(messages.AttachGpu)
    coordinator.received.clear()


def test_the_question_survives_a_restart(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: a coordinator that dies before it answers leaves the caller without an answer, or with a wrong one."""
    pointer = allocated(client, 40 * MIB)
    client.tell(f"ipc_get {pointer}")
    assert coordinator.pins_question() == 40 * MIB
    restart(coordinator)
    coordinator.nothing(messages.State)  # the GPU may be refused
    settle(coordinator)
    assert asked(coordinator, allow=False) == 40 * MIB
    assert client.result()[0] == OUT_OF_MEMORY


def test_an_answered_question_is_not_put_again(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: after a restart of the coordinator memory is kept for what was asked for long ago."""
    client.tell(f"ipc_get {allocated(client, 40 * MIB)}")
    assert asked(coordinator, allow=False) == 40 * MIB
    assert client.result()[0] == OUT_OF_MEMORY
    restart(coordinator)
    settle(coordinator)
    coordinator.grant(2)
    coordinator.revoke(2)
    assert coordinator.state().asks_pins == 0


def test_an_exported_handle_asks_first(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: a handle of the program's own memory is pinned unasked when it is exported."""
    result, handle = client.ask("create_as", 8 * MIB, 1, 0)
    assert result == 0
    client.tell(f"export {handle} 1")
    assert asked(coordinator, allow=False) == 8 * MIB
    assert client.result()[0] == OUT_OF_MEMORY
    client.tell(f"export {handle} 1")
    assert asked(coordinator, allow=True) == 8 * MIB
    assert client.result()[0] == 0
    assert client.ask("export", handle, 1)[0] == 0, "it stays already: nobody is asked"


def test_an_array_asks_first(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: memory of the driver's own, which cannot move, takes the room that others need."""
    client.tell(f"array {20 * MIB}")
    assert asked(coordinator, allow=False) == 20 * MIB
    assert client.result()[0] == OUT_OF_MEMORY
    client.tell(f"array {20 * MIB}")
    assert asked(coordinator, allow=True) == 20 * MIB
    assert client.result()[0] == 0
    coordinator.revoke(1)
    assert coordinator.state().pinned_bytes == 20 * MIB


def test_what_waits_for_an_answer_is_not_reported_as_pinned(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: an allocator that tries less after a refusal gets memory that locks another program out for ever.

    A report between the request and the refusal would be taken for memory that was allowed.
    """
    for _ in range(8):
        for words in (f"alloc {2 * MIB}", f"alloc {2 * MIB}", f"array {20 * MIB}"):  # a report of the first two is due
            client.tell(words)
        assert asked(coordinator, allow=False) == 20 * MIB
        assert [client.result()[0] for _ in range(3)] == [0, 0, OUT_OF_MEMORY]
    coordinator.revoke(1)
    assert coordinator.state().allocated_bytes >= 32 * MIB
    assert not any(m.pinned_bytes for m in coordinator.received if isinstance(m, messages.State))


def test_no_more_is_allocated_than_there_is_room_for(client: Client, coordinator: ScriptedCoordinator) -> None:
    """Broken: without a lease a program allocates what can never be on the GPU, and waits for ever for it."""
    coordinator.revoke(1)
    settle(coordinator, room_bytes=100 * MIB)
    coordinator.grant(2)
    assert client.ask("held") == 0
    coordinator.revoke(2)
    assert client.ask("alloc", 104 * MIB)[0] == OUT_OF_MEMORY
    assert client.ask("info")[:3] == [0, 100 * MIB, CAPACITY]
    assert client.ask("alloc", 90 * MIB)[0] == 0
    assert client.ask("info")[:3] == [0, 10 * MIB, CAPACITY]
