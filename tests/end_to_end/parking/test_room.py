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


AT_ONCE = ("--sharing=auto", "--policy=auto")
"""The defaults: programs that run side by side keep their leases while they are idle."""


@pytest.mark.parametrize(
    ("node", "count", "capacity", "half", "sharing"),
    [("1x256MiB", 3, 200, 90, ()), ("1x368MiB", 6, 308, 150, AT_ONCE)],
    indirect=["node"],
)
def test_contexts_of_idle_programs_make_room(
    node: Node, count: int, capacity: int, half: int, sharing: tuple[str, ...]
) -> None:
    """Broken: a program has an out-of-memory error because of its neighbours' contexts, or these do not come back."""
    node.start_coordinator(f"--capacity={capacity}MiB", *sharing)
    command, small = [sys.executable, str(PROGRAM)], CONTEXT | {"PARKED_MIB": "2"}
    idle = [node.run(command, "--memory=swap", f"--name=idle{n}", variables=small) for n in range(count)]
    assert [said(program) for program in idle] == ["ready"] * count
    large = node.run(command, "--memory=swap", "--name=large", variables=CONTEXT | {"PARKED_MIB": str(half)})
    assert said(large) == "ready"  # its memory and all contexts of 32 MiB are more than the card
    assert "parked" in states(node).values()
    assert tell(large, "read") == "0 True"
    for program in (*idle, large):
        assert tell(program, "read") == "0 True"
    eventually(lambda: states(node)["large"] == "running", "the last one to be back")
