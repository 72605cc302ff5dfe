"""Programs that reach from one GPU into the other's memory, in mode `swap`, on two real cards.

No program has more than 64 MiB on a card.

May not go here: what the simulated GPUs show as well (tests/end_to_end/test_two_gpus.py has the same steps on those; a
kernel that reads the other GPU's memory is real only here).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from bench.rig import Rig, rig
from tests.conftest import Built
from tests.end_to_end.two_gpus import CAPACITY, COPIES, answers, reach_by_copies, reach_by_kernels, told

pytestmark = pytest.mark.gpu


@pytest.fixture
def stand(built: Built) -> Iterator[Rig]:
    """A coordinator of all cards, which it is told are small."""
    found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    if found.count("GPU ") < 2:
        pytest.skip("this machine has no two cards")
    with rig(simulate=None, quantum="50ms", more=("--capacity", CAPACITY)) as made:
        yield made


def test_answers_about_peers_are_the_drivers(stand: Rig) -> None:
    """Broken: a framework that tries peer access and looks at the error is led astray."""
    assert answers(stand, hooked=True) == answers(stand, hooked=False)


def test_what_a_kernel_reaches_on_the_other_card_is_there(stand: Rig) -> None:
    """Broken: a kernel faults, which ends the program, when another program has the GPU whose memory it reads."""
    with told(stand) as program:
        facts = program.ask("peer_facts", 1, 0)
    if facts[1] != 1:
        pytest.skip("these two cards cannot reach each other's memory")
    reach_by_kernels(stand)


@pytest.mark.parametrize("kind", COPIES)
def test_copies_between_cards_find_what_was_evicted(stand: Rig, kind: int) -> None:
    """Broken: a copy without peer access fails or reads freed memory when another program has one of the GPUs."""
    reach_by_copies(stand, kind)
