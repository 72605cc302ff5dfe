"""Programs that reach from one GPU into the other's memory, in mode `swap`, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvshare.bench.harness.fixture import Fixture, fixture
from tests.conftest import Built
from tests.end_to_end.two_gpus import (
    CAPACITY,
    COPIES,
    INVALID_VALUE,
    LITTLE,
    answers,
    first_memory,
    reach_by_copies,
    reach_by_kernels,
    rights,
    rights_of_cards,
    told,
)

BY_NODES = ("Node", "GeneralNode", "ChangedNode")
"""There is no node that names a context for each end."""
APART = [name for name in COPIES if name not in BY_NODES]


@pytest.fixture
def stand(built: Built) -> Iterator[Fixture]:
    """A coordinator of two GPUs that are too small for two programs."""
    with fixture(simulate="2x64MiB", quantum="20ms", more=("--capacity", CAPACITY)) as made:
        yield made


def test_answers_about_peers_are_the_drivers(stand: Fixture) -> None:
    """Broken: a framework that tries peer access and looks at the error is led astray."""
    assert answers(stand, hooked=True) == answers(stand, hooked=False)


def test_what_a_peer_reaches_is_there(stand: Fixture) -> None:
    """Broken: a job on two GPUs computes with freed memory when another program has one of them."""
    reach_by_kernels(stand)


@pytest.mark.parametrize("kind", COPIES.values(), ids=COPIES)
def test_copies_between_gpus_find_what_was_evicted(stand: Fixture, kind: int) -> None:
    """Broken: the same for programs that copy between GPUs without peer access."""
    reach_by_copies(stand, kind)


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
def test_rights_are_needed_as_on_cards(stand: Fixture, peers: bool) -> None:
    """Broken: the simulated GPU lets through what a card refuses, so a missing right is found by users only."""
    assert rights(stand, hooked=False, peers=peers) == rights_of_cards(peers=peers)


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_what_works_works_under_the_hook(stand: Fixture, mode: str, peers: bool) -> None:
    """Broken: a copy between GPUs that a driver makes without any right fails where the memory is of another kind."""
    found = rights(stand, hooked=True, mode=mode, peers=peers)
    lost = {what for what, result in rights_of_cards(peers=peers).items() if result == 0 and found[what] != 0}
    no_way = mode == "swap" and not peers  # docs/reference/memory.md
    assert lost == ({f"plain, {name}" for name in BY_NODES} if no_way else set())


@pytest.mark.parametrize("name", APART)
def test_copies_between_gpus_that_cannot_reach_each_other(
    stand: Fixture, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Broken: the same where nobody can be given access, as on most machines without NVLink."""
    reach_by_copies(stand, COPIES[name], peers=False)
    assert "--memory device" not in capfd.readouterr().err, "a warning, though all is well"


def test_what_has_no_way_is_told(stand: Fixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Broken: a graph between such GPUs is refused without a word of why, and of what to do."""
    with told(stand, peers=False) as program:
        there = first_memory(program, "plain")
        here = program.fill(LITTLE, 2)
        assert program.ask("copy_between", COPIES["Node"], here, there, LITTLE) == INVALID_VALUE
        assert program.ask("same", here, LITTLE, 2) is True
    assert "--memory device" in capfd.readouterr().err
