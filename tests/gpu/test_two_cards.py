"""Programs that reach from one GPU into the other's memory, in mode `swap`, and graphs over both, on two real cards.

No program has more than 64 MiB on a card.

Non-goals: what the simulated GPUs show as well (tests/end_to_end/test_two_gpus.py has the same steps on those; a
kernel that reads the other GPU's memory is real only here).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture
from tests.conftest import Built
from tests.end_to_end.two_gpus import (
    CAPACITY,
    COPIES,
    answers,
    reach_by_copies,
    reach_by_kernels,
    rights,
    rights_of_cards,
    told,
)
from tests.hook.compiled import compile_c
from tests.hook.gate.test_graph_gpus import (
    KINDS,
    MEANWHILE,
    PROGRAM,
    TwoGpus,
    at_work,
    drain_after_a_launch,
    launch_waits_for_both,
)
from tests.hook.scripted import ScriptedCoordinator

pytestmark = pytest.mark.gpu


@pytest.fixture
def cards() -> None:
    """There are two."""
    found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    if found.count("GPU ") < 2:
        pytest.skip("this machine has no two cards")


@pytest.fixture
def stand(built: Built, cards: None) -> Iterator[Fixture]:
    """A coordinator of all cards, which it is told are small."""
    with fixture(simulate=None, quantum="50ms", more=("--capacity", CAPACITY)) as made:
        yield made


def can_reach(stand: Fixture) -> bool:
    """Whether GPU 1 can reach GPU 0's memory, by the driver."""
    with told(stand, hooked=False) as program:
        return bool(program.ask("peer_facts", 1, 0)[1] == 1)


def test_answers_about_peers_are_the_drivers(stand: Fixture) -> None:
    """Broken: a framework that tries peer access and looks at the error is led astray."""
    assert answers(stand, hooked=True) == answers(stand, hooked=False)


def test_what_a_kernel_reaches_on_the_other_card_is_there(stand: Fixture) -> None:
    """Broken: a kernel faults, which ends the program, when another program has the GPU whose memory it reads."""
    if not can_reach(stand):
        pytest.skip("these two cards cannot reach each other's memory")
    reach_by_kernels(stand)


def test_copies_between_cards_find_what_was_evicted(stand: Fixture) -> None:
    """Broken: a copy without peer access fails or reads freed memory when another program has one of the GPUs."""
    reach_by_copies(stand, COPIES)


def test_rights_are_needed_as_on_the_simulated_gpu(stand: Fixture) -> None:
    """Broken: the double, on which everything else is tried, lets through what a card refuses, or the other way round.

    If this fails, the table (rights_of_cards) and simulated_gpu/src/memory/peers.c are to follow the card.
    """
    if not can_reach(stand):
        pytest.skip("these two cards cannot reach each other's memory")
    assert rights(stand, hooked=False) == rights_of_cards()


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_what_works_works_under_the_hook(stand: Fixture, mode: str) -> None:
    """Broken: a copy between GPUs that a driver makes without any right fails where the memory is of another kind."""
    found = rights(stand, hooked=True, mode=mode)
    assert {what for what, result in rights_of_cards().items() if result == 0 and found[what] != 0} == set()


@pytest.fixture
def two(built: Built, cards: None, tmp_path: Path) -> Iterator[TwoGpus]:
    """The program that makes graphs over both, linked by the name that both drivers have."""
    program = compile_c(tmp_path / "graph_gpus", PROGRAM, built.sim_dir / "libcuda.so.1")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("NVSHARE_")}
    hook = {"LD_PRELOAD": str(built.hook), "NVSHARE_SOCKET": str(tmp_path / "hooks.sock"), "NVSHARE_MEMORY": "device"}
    with (
        ScriptedCoordinator(tmp_path / "hooks.sock") as coordinator,
        at_work(program, plain | hook, coordinator) as made,
    ):
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_over_both_cards_wait_for_both_leases(two: TwoGpus, kind: str) -> None:
    """Broken: a node's card is another one than the hook takes it for."""
    launch_waits_for_both(two, kind)


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("kind", ["captured", "kernel"])
def test_a_drain_waits_for_its_cards_part(two: TwoGpus, kind: str, meanwhile: str) -> None:
    """Broken: the driver does not count a graph that was launched on another card among a context's work."""
    long_ns = 1_000_000_000
    begun_ns = time.monotonic_ns()
    drain_after_a_launch(two, kind, long_ns, MEANWHILE[meanwhile])
    assert time.monotonic_ns() - begun_ns >= long_ns, "given back before its kernel can have ended"
