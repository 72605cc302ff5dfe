"""Contexts that end while their work runs: a lease is given back after that work, however end and drain meet.

Non-goals: what else ends with a context (its memory, its streams).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.gate.test_graph_gpus import TwoGpus
from tests.hook.scripted import NEVER_NS, ScriptedClient, ScriptedCoordinator
from tests.waiting import eventually

PROGRAM = Path(__file__).parent / "programs" / "context_ends.c"
WAYS = ("reset", "release", "destroy", "detach", "green")
RETURNING = "3"
"""NVSHARE_LEASE_RETURNING."""
SHORT_S = 0.2
"""How long a test looks that something does not happen."""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """Linked by the name that both drivers have."""
    return compile_c(tmp_path_factory.mktemp("ends") / "context_ends", PROGRAM, built.sim_dir / "libcuda.so.1")


@contextmanager
def at_work(
    program: Path, environment: Mapping[str, str], coordinator: ScriptedCoordinator, way: str
) -> Iterator[ScriptedClient]:
    """The program, whose context has work that does not end by itself."""
    with ScriptedClient(program, environment) as client:
        client.tell(f"begin {way}")
        coordinator.welcome()
        assert client.answer() == "0"
        client.tell("block")
        coordinator.asked()
        coordinator.grant(7)
        assert client.answer() == "0"
        yield client


def revoke(coordinator: ScriptedCoordinator) -> None:
    """Sends the message alone."""
    coordinator.send(messages.Revoke(gpu=0, lease_id=7, drain_deadline_ns=NEVER_NS))


def end(client: ScriptedClient) -> None:
    """Has begun when this returns; what it waits for is the work."""
    assert client.do("end") == "ends"
    assert client.answer(SHORT_S) == "", "the context does not end before its work"


def released_after_the_end(client: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
    """Once both the end and the drain have begun."""
    coordinator.nothing(messages.Release)
    client.tell("unblock")
    assert [client.answer(), client.answer()] == ["0", "0"]
    assert coordinator.expect(messages.Release).drained


def ends_during_the_drain(client: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
    """The drain has looked at the context before."""
    revoke(coordinator)
    eventually(lambda: client.do("state") == RETURNING, "the drain has begun")
    end(client)


@pytest.mark.parametrize("way", WAYS)
def test_before_the_drain(program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator, way: str) -> None:
    """Broken: a drain does not see the context any more, and another program computes beside what it left."""
    with at_work(program, hook_env, coordinator, way) as client:
        end(client)
        revoke(coordinator)
        assert client.answer(SHORT_S) == ""
        released_after_the_end(client, coordinator)


@pytest.mark.parametrize("way", [*WAYS, "lives"])
def test_during_the_drain(program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator, way: str) -> None:
    """Broken: the same, where the drain loses sight of it between two looks; or where it seems to end, and lives on."""
    with at_work(program, hook_env, coordinator, way) as client:
        ends_during_the_drain(client, coordinator)
        released_after_the_end(client, coordinator)


def test_a_call_meanwhile(program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator) -> None:
    """Broken: what a handler, or a tool that is told of the end, submits waits for a lease that waits for this end."""
    with at_work(program, hook_env, coordinator, "destroy") as client:
        ends_during_the_drain(client, coordinator)
        assert client.do("call") == "0"
        released_after_the_end(client, coordinator)


@pytest.mark.parametrize("gpus", ["1x512MiB", "2x512MiB"])
def test_what_is_gone_and_used(
    program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator, gpus: str
) -> None:
    """Broken: the hook asks the driver about a context that has ended, which crashes where a call would have failed."""
    with ScriptedClient(program, hook_env | {"NVSHARE_SIMULATE": gpus}) as client:
        TwoGpus(client, coordinator).do("gone")


@pytest.mark.sanitizer
def test_under_sanitizers(program: Path, sanitized_env: dict[str, str], coordinator: ScriptedCoordinator) -> None:
    """Broken: a drain uses what the end of the context frees."""
    with at_work(program, sanitized_env, coordinator, "reset") as client:
        ends_during_the_drain(client, coordinator)
        released_after_the_end(client, coordinator)
        assert client.finish() == (0, "")
