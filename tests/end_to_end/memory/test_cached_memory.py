"""Memory that a library keeps unused, beside a program that needs the room: what moves with and without callback."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture
from tests.conftest import Built
from tests.daemon.processes import ctl
from tests.waiting import BOUND_S, eventually

PROGRAM = Path(__file__).parent / "programs" / "cached_memory.py"
MIB = 1 << 20
TURNS = 10


@dataclass(frozen=True)
class Sizes:
    """Bytes: the array that the program works on, the freed one that its library keeps, and the rival's."""

    kept: int
    cached: int
    rival: int


def moved_bytes(stand: Fixture, library: str, sizes: Sizes, *, releases: bool) -> tuple[int, int]:
    """Bytes moved in `TURNS` hand-overs, out and in, and bytes that the program has freed under pressure.

    Under pressure the first turns finish what was on its way; turns count once a hand-over has moved nothing.
    """

    def start(name: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAM), library, *map(str, words)]
        return stand.start(command, hooked=True, name=name, options=("--memory=swap",))

    def status() -> Any:
        return json.loads(ctl(stand.directory, "status", "--json").stdout)

    def gpu() -> dict[str, Any]:
        found: dict[str, Any] = status()["gpus"][0]
        return found

    def freed() -> int:
        return sum(seat["released_bytes"] for client in status()["clients"] for seat in client["seats"])

    def turns(count: int) -> int:
        begin = gpu()
        eventually(lambda: gpu()["handovers"] >= begin["handovers"] + count, "more turns")
        end = gpu()
        return sum(end[f"{way}_bytes"] - begin[f"{way}_bytes"] for way in ("evicted", "restored"))

    programs = [start("cached", sizes.kept, sizes.cached, int(releases)), start("rival", sizes.rival, 0, 0)]
    try:
        eventually(lambda: gpu()["allocated_bytes"] >= sizes.kept + sizes.rival and gpu()["handovers"] >= 4, "turns")
        if releases:
            eventually(lambda: freed() >= sizes.cached, "the callback")
            eventually(lambda: turns(1) == 0, "a hand-over that moves nothing")
        moved, released_bytes = turns(TURNS), freed()
        if releases:
            shown = ctl(stand.directory, "memory").stdout
            assert re.search(r"cached \(.*\): freed .* itself under pressure$", shown, re.MULTILINE), shown
        for program in programs:
            program.terminate()
        for program in programs:
            out, _ = program.communicate(timeout=BOUND_S)
            assert program.returncode == 0, out
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    return moved, released_bytes


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed (extra cupy)")
def test_cached_memory_that_is_freed_does_not_move(built: Built) -> None:
    """Broken: a program that frees its caches under pressure makes the card move as much as before."""
    sizes = Sizes(kept=25 * MIB, cached=64 * MIB, rival=50 * MIB)
    with fixture(simulate="1x128MiB", quantum="20ms") as stand:
        moved, released = moved_bytes(stand, "cupy", sizes, releases=False)
        assert released == 0
        assert moved >= TURNS // 2 * (25 + 64 + 50 - 128) * MIB, "without the callback each turn moves memory"
    with fixture(simulate="1x128MiB", quantum="20ms") as stand:
        moved, released = moved_bytes(stand, "cupy", sizes, releases=True)
        assert released >= 64 * MIB
        assert moved == 0, "all that is in use fits the card"
