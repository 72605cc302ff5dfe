"""Programs that move to another GPU, by the simulated driver's checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Built
from tests.daemon.processes import ctl
from tests.end_to_end.conftest import Node, new_node
from tests.end_to_end.parking.test_parking import ANSWERS, begin, said, shared, start, tell
from tests.waiting import eventually

__all__ = ["shared"]  # a fixture
SIZE = 16 << 20
"""Of the program's memory."""


@pytest.fixture
def node(built: Built) -> Iterator[Node]:
    """Two GPUs."""
    with new_node("2x4GiB") as made:
        yield made


@pytest.fixture(scope="module")
def serving(built: Built) -> Iterator[Node]:
    """The same, and a coordinator for all tests that leave it as it is."""
    with new_node("2x4GiB") as made:
        made.start_coordinator()
        yield made


def client(node: Node) -> dict[str, Any]:
    """The one program."""
    (found,) = node.control("clients")["clients"]
    return dict(found)


def cards(node: Node) -> list[int]:
    """The GPUs on which the coordinator has the programs."""
    index = {gpu["uuid"]: gpu["index"] for gpu in node.control("status")["gpus"]}
    return [index[seat["uuid"]] for each in node.control("clients")["clients"] for seat in each["seats"]]


def card_of(node: Node) -> int:
    (card,) = cards(node)
    return card


def migrate(node: Node, card: int, name: str = "parked") -> None:
    found = node.control("migrate", name, f"--to={card}")
    assert found["parking"] == "running"
    assert found["gpu"] in found["gpus"]


def assert_whole(program: subprocess.Popen[str]) -> None:
    """All of its calls go on as before."""
    for word, answer in ANSWERS.items():
        assert tell(program, word) == answer


def test_a_program_goes_on_elsewhere(shared: Node) -> None:
    """Broken: contents, graphs, or what the program sees of its card change; or it is charged on both cards."""
    program = start(shared)
    seen, shown = tell(program, "card"), tell(program, "nvml")
    assert shown == f"{SIZE} True"
    alone = shared.charged_bytes(0)
    for card in (1, 0, 1):
        migrate(shared, card)
        assert tell(program, "read") == "0 True", "right after the move"
        assert (card_of(shared), shared.charged_bytes(card), shared.charged_bytes(1 - card)) == (card, alone, 0)
        assert_whole(program)
        assert (tell(program, "card"), tell(program, "nvml")) == (seen, shown)
    shared.control("park", "parked")
    assert tell(program, "launch") == "0 True"
    assert card_of(shared) == 1


@pytest.mark.parametrize("word", ["look", "touch"])
def test_a_card_that_it_only_looks_at_does_not_count(shared: Node, word: str) -> None:
    """Broken: a framework that asks for each card's size, or has an empty context there, cannot be moved; or its seats
    are then on the wrong cards."""
    program = start(shared)
    assert tell(program, word).startswith("0 ")
    assert cards(shared) == [0, 1]
    for card in (1, 0, 1):
        migrate(shared, card)
        assert tell(program, "read") == "0 True"
        assert cards(shared) == [card, 1 - card]
    assert tell(program, "second") == "0 True"
    assert (shared.charged_bytes(0), shared.charged_bytes(1)) == (SIZE // 2, SIZE)
    assert "several GPUs" in ctl(shared.directory, "migrate", "parked", "--to=0").stdout
    assert_whole(program)


def test_the_next_coordinator_finds_it_there(node: Node) -> None:
    """Broken: after a restart a moved program attaches to the card that it has left."""
    node.start_coordinator()
    program = start(node)
    migrate(node, 1)
    node.kill_coordinator()
    node.start_coordinator()
    eventually(lambda: len(node.control("clients")["clients"]) == 1, "the program to connect again")
    assert card_of(node) == 1
    assert_whole(program)


@pytest.mark.parametrize("word", ["card", "touch"])
def test_a_coordinator_that_dies_in_between(node: Node, word: str) -> None:
    """Broken: a program that the driver has moved, and whose coordinator died before it said so, is lost; or one with
    contexts on two cards, for which the driver's lists do not tell where it is, counts on the wrong one."""
    node.start_coordinator()
    program = start(node)
    tell(program, word)
    node.control("park", "parked")
    process_id = client(node)["process_id"]
    node.kill_coordinator()
    look = (
        "from nvshare.coordinator.system.checkpoints import Process, exchange\n"
        "import pynvml as n; n.nvmlInit()\n"
        "cards = [n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]\n"
        f"Process({process_id}).restore(exchange(*cards)); print('moved')"
    )
    assert said(node.run_plain([sys.executable, "-c", look])) == "moved"
    node.start_coordinator()
    eventually(lambda: len(node.control("clients")["clients"]) == 1, "the program to connect again")
    assert cards(node)[0] == 0, "what the hook knows"
    assert tell(program, "read") == "0 True"
    eventually(lambda: cards(node) == ([1, 0] if word == "touch" else [1]), "its seats to be where it is")
    assert_whole(program)


def test_no_room_over_there(shared: Node) -> None:
    """Broken: a program is lost on a card that others have filled beside the coordinator."""
    program = start(shared)
    fill = (
        "import ctypes, sys; c = ctypes.CDLL('libcuda.so.1'); p = ctypes.c_void_p(); c.cuInit(0)\n"
        "c.cuDevicePrimaryCtxRetain(ctypes.byref(p), 1); c.cuCtxSetCurrent(p)\n"
        "size = 4 << 30\n"
        "while size >= 1 << 20:\n"
        "    size = size if c.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(size)) == 0 else size // 2\n"
        "print('full', flush=True); sys.stdin.read()"
    )
    assert said(shared.run_plain([sys.executable, "-c", fill])) == "full"
    with pytest.raises(AssertionError, match="lacks"):
        shared.control("migrate", "parked", "--to=1")
    assert (card_of(shared), client(shared)["parking"]) == (0, "running")
    assert_whole(program)


def test_by_itself(node: Node) -> None:
    """Broken: `rebalance` does nothing in a coordinator, or `explain` does not say why a program was moved."""
    node.start_coordinator()
    node.control("set", "rebalance", "true")
    programs = [start(node), start(node, "--name=other")]
    for program in programs:
        begin(program, "work")
    eventually(lambda: sorted(cards(node)) == [0, 1], f"one of them to move\n{node.log()}")
    (moved,) = (each["moved_why"] for each in node.control("clients")["clients"] if each["moved_from"])
    assert "of the next minute" in moved

    def explained() -> list[tuple[str, str]]:
        found = [each for gpu in node.control("explain")["gpus"] for each in gpu["running"] + gpu["waiting"]]
        return [(each["moved_from"], each["moved_why"]) for each in found]

    eventually(lambda: ("GPU 0", moved) in explained(), "`explain` to say it")
    for program in programs:
        assert tell(program, "read") == "0 True"
        assert said(program) == "0 True"
