"""Programs that reach from one GPU into the other's memory, in mode `swap`, on simulated GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

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
from tests.hook.compiled import compile_c
from tests.waiting import BOUND_S, eventually

COLLECTIVE = Path(__file__).resolve().parent / "programs" / "collective.c"
LINEAR = ("Peer", "DtoD", "Async", "PeerAsync", "3DPeer", "Capture")
"""Copies that mode `swap` makes without peer access; the driver refuses the others (docs/reference/memory.md)."""


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


def test_copies_between_gpus_find_what_was_evicted(stand: Fixture) -> None:
    """Broken: the same for programs that copy between GPUs without peer access."""
    reach_by_copies(stand, (*LINEAR, "2D", "Batch", "Node"))


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
def test_rights_are_needed_as_on_cards(stand: Fixture, peers: bool) -> None:
    """Broken: the simulated GPU lets through what a card refuses, so a missing right is found by users only."""
    assert rights(stand, hooked=False, peers=peers) == rights_of_cards(peers=peers)


@pytest.mark.parametrize(("mode", "peers"), [("managed", True), ("swap", True), ("swap", False)])
def test_what_works_works_under_the_hook(stand: Fixture, mode: str, peers: bool) -> None:
    """Broken: a copy between GPUs that a driver makes without any right fails where the memory is of another kind."""
    found = rights(stand, hooked=True, mode=mode, peers=peers)
    lost = {what for what, result in rights_of_cards(peers=peers).items() if result == 0 and found[what] != 0}
    refused = {f"plain, {name}" for name in COPIES if name not in LINEAR}
    assert lost == (refused if mode == "swap" and not peers else set())


def test_copies_between_gpus_that_cannot_reach_each_other(stand: Fixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Broken: the same where nobody can be given access, as on most machines without NVLink."""
    reach_by_copies(stand, LINEAR, peers=False)
    assert "--memory device" not in capfd.readouterr().err, "a warning, though all is well"


def test_a_refused_copy_is_logged(stand: Fixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Broken: a copy between such GPUs fails and the log names neither the reason nor the remedy."""
    with told(stand, peers=False) as program:
        there = first_memory(program, "plain")
        here = program.filled(LITTLE, 2)
        assert program.ask("copy_between", COPIES["Node"], here, there, LITTLE) == INVALID_VALUE
        assert program.ask("same", here, LITTLE, 2) is True
    assert "--memory device" in capfd.readouterr().err


def test_a_collective_of_one_process_ends_its_turn(built: Built, saturate: Path, tmp_path: Path) -> None:
    """Broken: a turn ends between the two kernels of a collective, and the GPUs wait out `drain_deadline`."""
    ranks = compile_c(tmp_path / "collective", COLLECTIVE, built.sim_dir / "libcuda.so.1")
    more = ("--sharing=exclusive", "--policy=round_robin")
    with fixture(simulate="2x64MiB", quantum="20ms", more=more) as stand:
        rivals = [
            stand.start([str(saturate), "600", "1000000", "2"], hooked=True, extra={"CUDA_VISIBLE_DEVICES": str(gpu)})
            for gpu in (0, 1)
        ]
        eventually(lambda: all(gpu["holders"] for gpu in stand.control("status")["gpus"]), "both to have turns")
        process = stand.start([str(ranks)], hooked=True, options=("--memory=swap",), errors=subprocess.PIPE)
        output, errors = process.communicate(timeout=4 * BOUND_S)
        assert (process.returncode, output) == (0, "good\n"), errors
        assert "did not end within" not in errors
        assert [rival.poll() for rival in rivals] == [None, None]
        for rival in rivals:
            rival.kill()
            rival.wait()
