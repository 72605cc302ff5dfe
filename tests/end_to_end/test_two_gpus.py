"""Programs that reach from one GPU into the other's memory, in mode `swap`, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.rig import Rig, rig
from tests.conftest import Built
from tests.end_to_end.two_gpus import CAPACITY, COPIES, answers, reach_by_copies, reach_by_kernels


@pytest.fixture
def stand(built: Built) -> Iterator[Rig]:
    """A coordinator of two GPUs that are too small for two programs."""
    with rig(simulate="2x64MiB", quantum="20ms", more=("--capacity", CAPACITY)) as made:
        yield made


def test_answers_about_peers_are_the_drivers(stand: Rig) -> None:
    """Broken: a framework that tries peer access and looks at the error is led astray."""
    assert answers(stand, hooked=True) == answers(stand, hooked=False)


def test_what_a_peer_reaches_is_there(stand: Rig) -> None:
    """Broken: a job on two GPUs computes with freed memory when another program has one of them."""
    reach_by_kernels(stand)


@pytest.mark.parametrize("kind", COPIES)
def test_copies_between_gpus_find_what_was_evicted(stand: Rig, kind: int) -> None:
    """Broken: the same for programs that copy between GPUs without peer access."""
    reach_by_copies(stand, kind)
