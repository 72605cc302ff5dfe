"""CUDA's own semantics under the hook, in each memory mode, while another program has the GPU every few milliseconds
and most of its memory: contexts, captures, graphs, signals, threads, and the ways in which a process begins and ends.

The programs (programs/semantics_*.c) say what they find wrong; the GPU's trace says whether anything ran beside
somebody else.

Non-goals: cases that are about leases or memory alone (tests/hook).
"""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import client_environment
from nvshare.simulated_gpu.environment import simulated_environment
from nvshare.simulated_gpu.trace import Overlap, overlaps
from tests.conftest import Built
from tests.end_to_end.conftest import Node, new_node
from tests.hook.compiled import compile_c
from tests.waiting import BOUND_S

PROGRAMS = Path(__file__).resolve().parent / "programs"
MODES = ("device", "managed", "swap")
ATTEMPTS = 20
"""Attempts of a case that needs its lease for three calls in a row: a busy machine takes some of them."""
LIMIT, SMALL = 60 << 20, 20 << 20
"""Bytes of a card and of a simulated GPU that each program sees, so that what it reads does not depend on the other."""


def cases(program: str) -> list[str]:
    """The cases that a program names in its table."""
    table = (PROGRAMS / f"{program}.c").read_text(encoding="utf-8").partition("named_case cases[]")[2]
    return [name for name in re.findall(r'\{"(\w+)",', table) if name not in ("rival", "fresh", "watcher")]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """Folder of the programs, linked with the driver as C programs are."""
    folder = tmp_path_factory.mktemp("semantics")
    for program in ("semantics_work", "semantics_captures", "semantics_life"):
        compile_c(folder / program, PROGRAMS / f"{program}.c", built.sim_dir / "libcuda.so.1")
    return folder


class Shared:
    """A node whose GPU somebody else uses too."""

    def __init__(self, node: Node, mode: str, built: Built) -> None:
        self.node = node
        self.mode = mode
        base = simulated_environment(node.state, node.simulate, node.environment())
        limit = SMALL * (2 if mode == "device" else 1)
        options = {"memory": mode, "name": "case", "memory_limit": str(limit)}
        self.environment = client_environment(base, hook=built.hook, runtime_dir=node.directory, options=options)

    def overlaps(self) -> list[Overlap]:
        """Work of two programs at once, except that memory moves beside other work."""
        everything = self.mode == "device"
        return overlaps([busy for busy in self.node.trace() if everything or busy.kind == "kernel"])

    def start(self, program: Path, case: str) -> subprocess.Popen[str]:
        """One case under the hook."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [program, case], env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
            cwd=self.node.directory,
        )  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def shared(request: pytest.FixtureRequest, built: Built, compiled: Path) -> Iterator[Shared]:
    """In one memory mode, with the rival at work."""
    with new_node("1x96MiB" if request.param == "device" else "1x24MiB") as node:  # a pool reserves 32 MiB
        node.start_coordinator("--quantum=4ms")
        made = Shared(node, request.param, built)
        rival = made.start(compiled / "semantics_work", "rival")
        node.started.append(rival)
        assert rival.stdout is not None
        assert select.select([rival.stdout], [], [], BOUND_S)[0], node.log()
        assert rival.stdout.readline() == "ready\n"
        yield made
        output, errors = rival.communicate()
        assert (rival.returncode, output, complaints(errors)) == (0, "good\n", [])
        assert made.overlaps() == []


def complaints(errors: str) -> list[str]:
    """Standard error of a program, without its long waits: a busy machine has them."""
    return [line for line in errors.splitlines() if not re.match(r"nvshare: (waiting for GPU 0|GPU 0 after)", line)]


def run(shared: Shared, compiled: Path, program: str, case: str) -> int:
    """Runs a case to its end; nothing is wrong.  Its process id."""
    for _ in range(ATTEMPTS):
        process = shared.start(compiled / program, case)
        try:
            output, errors = process.communicate()
        finally:
            process.kill()
            process.wait()
        if process.returncode != os.EX_TEMPFAIL:
            break
    assert (process.returncode, set(output.splitlines()), complaints(errors)) == (0, {"good"}, []), (
        output + shared.node.log()[-2000:]
    )
    return process.pid


@pytest.mark.parametrize("case", cases("semantics_work"))
def test_work(shared: Shared, compiled: Path, case: str) -> None:
    """A framework would compute something else, or fail, where it does not without the hook."""
    run(shared, compiled, "semantics_work", case)


@pytest.mark.parametrize("case", cases("semantics_captures"))
def test_work_beside_captures(shared: Shared, compiled: Path, case: str) -> None:
    """Work beside a capture would run on when the GPU is somebody else's, and its memory leave the card below it."""
    process_id = run(shared, compiled, "semantics_captures", case)
    assert [both for both in shared.overlaps() if process_id in (both.first.process_id, both.second.process_id)] == []


@pytest.mark.parametrize("case", cases("semantics_life"))
def test_life(shared: Shared, compiled: Path, case: str) -> None:
    """A process would hang, crash or be let past the gate where it forks, ends, is interrupted or loses a thread."""
    run(shared, compiled, "semantics_life", case)


def test_the_gpu_is_shared(shared: Shared, compiled: Path) -> None:
    """The tests above would pass without anybody else: this case alone works for thirty quanta."""

    def handovers() -> int:
        return int(shared.node.control("status")["gpus"][0]["handovers"])

    enough = handovers() + 10
    for _ in range(ATTEMPTS):  # on a busy machine the rival has less to do
        run(shared, compiled, "semantics_work", "capture_modes")
        if handovers() >= enough:
            break
    assert handovers() >= enough
