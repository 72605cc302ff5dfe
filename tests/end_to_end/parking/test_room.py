"""Idle programs whose contexts have the room that another program needs, on a simulated card with real processes."""

from __future__ import annotations

import sys

import pytest

from tests.end_to_end.conftest import Node
from tests.end_to_end.parking.test_parking import PROGRAM, said, tell
from tests.waiting import eventually

CONTEXT = {"NVSHARE_SIM_CONTEXT_BYTES": str(32 << 20)}


def states(node: Node) -> dict[str, str]:
    return {each["name"]: each["parking"] for each in node.control("clients")["clients"]}


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_contexts_of_idle_programs_make_room(node: Node) -> None:
    """Broken: a program has an out-of-memory error because of its neighbours' contexts, or these do not come back."""
    node.start_coordinator("--capacity=200MiB")
    command = [sys.executable, str(PROGRAM)]
    idle = [node.run(command, "--memory=swap", f"--name=idle{n}", variables=CONTEXT) for n in range(3)]
    assert [said(program) for program in idle] == ["ready"] * 3
    large = node.run(command, "--memory=swap", "--name=large", variables=CONTEXT | {"PARKED_MIB": "90"})
    assert said(large) == "ready"  # 180 MiB and four contexts of 32 are more than the card
    assert "parked" in states(node).values()
    assert tell(large, "read") == "0 True"
    for program in (*idle, large):
        assert tell(program, "read") == "0 True"
    eventually(lambda: states(node)["large"] == "running", "the last one to be back")
