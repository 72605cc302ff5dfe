"""Random kills of program, helper and coordinator while a program is parked, woken and moved.

`NVSHARE_PARK_KILLS=200` kills more often, `NVSHARE_PARK_SEED` repeats a run; each prints in which states it killed.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from typing import Any

import pytest

from nvshare.coordinator.cli.ctl_call import call, call_and_wait
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from tests.end_to_end.conftest import Node
from tests.end_to_end.parking.test_parking import begin, helpers, said, start, tell
from tests.waiting import eventually

COUNT, SEED = (int(os.environ.get(f"NVSHARE_PARK_{name}", given)) for name, given in (("KILLS", "8"), ("SEED", "29")))
SIZE = 16 << 20
"""Of the program's memory."""


def clients(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(RuntimeDir(node.directory), api.Status())["clients"]
    return found


def act(node: Node, program: Any, action: str) -> None:
    """Begins something that the kill interrupts."""
    directory = RuntimeDir(node.directory)
    if action == "wake":
        assert call_and_wait(directory, api.ParkClient(client="parked"))["parking"] == "parked"
        begin(program, "read")
    elif action == "park":
        call(directory, api.ParkClient(client="parked"))
    else:
        (client,) = clients(node)
        (other,) = {gpu["uuid"] for gpu in node.control("status")["gpus"]} - {client["seats"][0]["uuid"]}
        call(directory, api.MigrateClient(client="parked", gpu=other))


def is_settled(node: Node) -> bool:
    """The program runs on one card, which has all that is charged."""
    found = clients(node)
    if [client["parking"] for client in found] != ["running"]:
        return False
    (seat,) = found[0]["seats"]
    index = {gpu["uuid"]: gpu["index"] for gpu in node.control("status")["gpus"]}[seat["uuid"]]
    return (node.charged_bytes(index), node.charged_bytes(1 - index)) == (SIZE, 0)


@pytest.mark.parametrize("node", ["2x4GiB"], indirect=True)
def test_random_kills(node: Node) -> None:
    """Broken: a program loses memory or hangs after a death, its memory stays, or it counts on a wrong card."""
    chance, killed = random.Random(SEED), Counter[str]()
    node.start_coordinator()
    program = start(node)
    for _ in range(COUNT):
        action, victim = chance.choice(["park", "wake", "move"]), chance.choice(["program", "helper", "coordinator"])
        print(sum(killed.values()), action, victim, flush=True)
        act(node, program, action)
        for _ in range(chance.randrange(60)):
            state = clients(node)
        state = clients(node)
        killed[f"{victim} while {state[0]['parking']}{' to move' * bool(state[0]['moves_to'])}"] += 1
        if victim == "program":
            program.kill()
            program.wait()
            eventually(lambda: not clients(node), "its seat to go")
            eventually(lambda: node.charged_bytes(0) == node.charged_bytes(1) == 0, "its memory to go")
            program = start(node)
            continue
        if victim == "helper":
            for helper in helpers(node):
                os.kill(helper, signal.SIGKILL)
        else:
            node.kill_coordinator()
            node.start_coordinator()
        if action == "wake":
            assert said(program) == "0 True", killed
        for word in ("read", "launch", "query"):
            assert tell(program, word).startswith("0 "), (word, killed)
        eventually(lambda: is_settled(node), "the program to be whole on one card")
    print(f"seed {SEED}: killed", dict(sorted(killed.items())))
