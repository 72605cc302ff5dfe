"""Calls about graphs, with the gate closed: those that may submit work wait for the lease, those that edit do not.

Whether an edit really submits nothing only a card can tell: tests/gpu/test_graph_edits_card.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

PROGRAM = Path(__file__).parent / "programs" / "graph_edits.c"


@pytest.fixture(scope="session")
def graph_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """The program, linked by the name that both drivers have."""
    return compile_c(tmp_path_factory.mktemp("graphs") / "graph_edits", PROGRAM, built.sim_dir / "libcuda.so.1")


@pytest.fixture
def idle(graph_program: Path, hook_env: dict[str, str], coordinator: ScriptedCoordinator) -> Iterator[ScriptedClient]:
    """It has built and launched its graph, and has no lease any more."""
    with ScriptedClient(graph_program, hook_env, greets=False) as client:
        coordinator.welcome()
        coordinator.asked()
        coordinator.grant(1)
        assert client.answer() == "ready"
        coordinator.revoke(1)
        coordinator.received.clear()  # a request of its preparations may have crossed the grant
        yield client


def names() -> list[str]:
    """Names of all kinds of calls; those that are to wait begin with a plus."""
    table = PROGRAM.read_text(encoding="utf-8").partition("kinds[] = {")[2]
    return re.findall(r'\{"(\+?\w+)",', table)


def test_edits_need_no_lease(idle: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
    """Broken: a program that prepares its next graph while others compute waits for its turn to do so."""
    for name in names():
        if not name.startswith("+"):
            assert idle.do(f"{name} 4").split()[0] == "0", name
    coordinator.nothing(messages.Request)


def test_what_may_submit_waits(idle: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
    """Broken: a graph is sent to a GPU that another program has."""
    waiting = [name[1:] for name in names() if name.startswith("+")]
    assert len(waiting) == 4
    for lease, name in enumerate(waiting, start=2):
        idle.tell(f"{name} 1")
        coordinator.expect(messages.Request)
        coordinator.grant(lease)
        assert idle.answer().split()[0] == "0", name
        coordinator.revoke(lease)
