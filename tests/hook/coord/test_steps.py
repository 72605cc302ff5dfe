"""The callbacks of `on_pressure` in a program under the hook, with a scripted coordinator that evicts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from nvshare.coordinator.protocol import messages
from tests.hook.memory.test_memory_process import MIB, PROGRAMS
from tests.hook.scripted import JsonClient, ScriptedCoordinator
from tests.waiting import eventually

PROGRAM = PROGRAMS / "steps_program.py"
FREED = ["freed in MainThread"]


@pytest.fixture
def program(coordinator: ScriptedCoordinator, hook_env: dict[str, str]) -> Iterator[JsonClient]:
    """It has used the GPU and has given its lease back; of its memory 32 MiB are cached, and 8 MiB are not."""
    with JsonClient([sys.executable, str(PROGRAM)], hook_env | {"NVSHARE_MEMORY": "managed"}) as client:
        assert client.ask("start") == 0
        client.tell(f"cache {32 * MIB}")
        coordinator.welcome()
        assert client.result() == client.ask("alloc", 8 * MIB)[0] == 0
        client.tell("work")
        coordinator.asked()
        coordinator.grant(1)
        assert client.result() == 0
        coordinator.revoke(1)
        yield client


def evict(coordinator: ScriptedCoordinator) -> None:
    """All that is there, and the memory that the program needs always is."""
    coordinator.move(1 << 30)
    coordinator.move(0)


def released_bytes(coordinator: ScriptedCoordinator) -> int:
    """By the next report of memory that differs from the last one."""
    return coordinator.expect(messages.State).released_bytes


def test_a_step_calls_once_for_an_eviction(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: cached memory is never freed, or the coordinator does not learn how much was."""
    program.ask("on_pressure", "free")
    assert program.ask("step") == [], "nothing was evicted"
    evict(coordinator)
    assert program.ask("step") == FREED
    assert program.ask("step") == [], "once"
    while (released := released_bytes(coordinator)) == 0:
        pass
    assert released == 32 * MIB
    evict(coordinator)
    assert program.ask("step") == FREED
    evict(coordinator)
    assert program.ask("step") == FREED, "the program took nothing back"


def test_a_program_that_takes_the_memory_back_is_called_less(
    coordinator: ScriptedCoordinator, program: JsonClient
) -> None:
    """Broken: a training loop frees at each of its turns what its next step needs again."""
    program.ask("on_pressure", "free")
    calls = []
    for number in range(1, 60):
        evict(coordinator)
        if program.ask("step"):
            calls.append(number)
            assert program.ask("cache", 32 * MIB) == 0
    assert calls == [1, 2, 4, 8, 16, 32, 48]


def test_the_expectation_of_evictions_is_pressure(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: memory is freed only after it has been moved, or an idle notebook keeps what it caches meanwhile."""
    program.ask("on_pressure", "free")
    assert program.ask("cell") == []
    coordinator.settings(prepare_host_bytes=32 * MIB)
    assert eventually(lambda: program.ask("pressure"), "the settings") is not None
    eventually(lambda: program.ask("pressure") == [1, 1], "the settings")
    assert program.ask("step") == FREED
    assert program.ask("step") == []
    assert [program.ask("cell") for _ in range(2)] == [FREED, FREED], "people wait longer than a callback takes"
    coordinator.settings()
    eventually(lambda: program.ask("pressure") == [0, 1], "the settings")
    assert program.ask("cell") == []
    coordinator.settings(prepare_host_bytes=32 * MIB)
    eventually(lambda: program.ask("pressure") == [1, 2], "the settings")
    coordinator.stop()
    eventually(lambda: program.ask("pressure") == [0, 2], "the end of the connection")


def test_nothing_is_called_in_a_capture(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: a callback frees memory while a stream is captured, which invalidates the capture."""
    program.ask("on_pressure", "free")
    evict(coordinator)
    assert program.ask("pressure") == [0, 1]
    program.tell("capture 1")
    coordinator.expect(messages.Request)
    coordinator.grant(2)
    assert program.result() == 0
    assert program.ask("pressure") == [-1, 1]
    assert (program.ask("step"), program.ask("cell")) == ([], [])
    assert program.ask("capture", 0) == 0, "the capture is valid"
    assert program.ask("step") == FREED


def test_a_callback_that_raises(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: a callback's error ends the program, fills its log, or keeps the other callbacks from running."""
    program.ask("on_pressure", "fail")
    program.ask("on_pressure", "free")
    program.ask("on_pressure", "fail")
    for _ in range(2):
        evict(coordinator)
        assert program.ask("step") == ["failed", *FREED]
    code, errors = program.finish()
    assert code == 0
    assert errors.count("ValueError: of no use") == errors.count("on_pressure callback") == 1


def test_a_callback_does_not_call_itself(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: a callback that makes a step never ends."""
    program.ask("on_pressure", "step")
    evict(coordinator)
    assert program.ask("step") == ["stepped"]


def test_callbacks_belong_to_a_thread(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: memory is freed in the middle of another thread's step."""
    program.ask("on_pressure", "free")
    evict(coordinator)
    assert program.ask("step_apart") == []
    assert program.ask("register_apart") == ["freed in apart"]
    assert program.ask("step") == FREED


def test_a_forked_child_has_its_own_pressure(coordinator: ScriptedCoordinator, program: JsonClient) -> None:
    """Broken: a child frees its parent's memory, which it must not touch."""
    program.ask("on_pressure", "free")
    evict(coordinator)
    assert program.ask("fork") == 0
    assert program.ask("step") == FREED
