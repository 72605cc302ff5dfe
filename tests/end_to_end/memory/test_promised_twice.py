"""A card that is promised twice: programs that take a share of all memory that they see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.cli.views.explain import lines
from tests.end_to_end.conftest import Node

PROGRAM = Path(__file__).parent / "programs" / "takes_a_share.py"
CARD = 64 << 20


def answer(process: subprocess.Popen[str]) -> Any:
    """Its next line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return json.loads(line)


@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
def test_each_sees_the_whole_card_and_wakes_whole(node: Node) -> None:
    """Broken: who comes second sees a full card, gets no memory, finds other data, or its cost is told nowhere."""
    node.start_coordinator("--quantum=20ms")
    programs = []
    for number, share in enumerate((100, 90, 90, 90)):  # no mode is asked for
        process = node.run([sys.executable, str(PROGRAM), str(share), str(50 * number + 1)])
        seen = answer(process)
        assert seen == {"cuda": [CARD, CARD], "nvml": [CARD, CARD]}, number
        programs.append(process)
    for _ in range(2):
        for process in programs:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert answer(process) == {"whole": True}
    status = node.control("status")
    assert {client["memory_mode"] for client in status["clients"]} == {"swap"}
    gpu = status["gpus"][0]
    (told,) = node.control("explain")["gpus"]
    memory = told["memory"]
    assert 0 < memory["moved_bytes_per_minute"] <= gpu["evicted_bytes"] + gpu["restored_bytes"]
    assert 0 < memory["moving_share"] < 1
    assert len(memory["pairs"]) == 5  # of six
    for pair in memory["pairs"]:
        assert sum(each["allocated_bytes"] for each in pair) > CARD
        assert all(each["recent_moved_bytes"] > 0 for each in pair)
    text = "\n".join(lines([told], 0))
    assert "moved, and turns waited for it" in text
    assert text.count("do not fit together") == 5
