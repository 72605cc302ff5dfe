"""How nvshare.bench.gangs agrees on the end of a run.

Non-goals: running it (test_benches_run.py).
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nvshare.bench.workloads.gang import FILE_BYTES, RANKS, Tokens

RUNS = 3
STEPS = 5


@pytest.mark.parametrize("exchange", ["host", "nccl"])
def test_ranks_end_a_run_after_the_same_step(exchange: str, tmp_path: Path) -> None:
    """Broken: one rank would wait in a step that the other one does not take, for ever."""
    path = tmp_path / "tokens"
    path.write_bytes(bytes(FILE_BYTES))
    collective = threading.Barrier(RANKS, timeout=30)
    taken: dict[int, list[int]] = {number: [] for number in range(RANKS)}

    def rank(number: int) -> None:
        tokens = Tokens(path, number)
        for run in range(RUNS):
            steps = 0
            last = False
            while not last:
                steps += 1
                over = number == 1 or steps >= STEPS + run  # only rank 0 is asked
                if exchange == "nccl":
                    collective.wait()
                    last = tokens.count(over=over)
                else:
                    last = tokens.exchange(over=over)
            taken[number].append(steps)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert taken[0] == taken[1]
    assert taken[0] == [STEPS + run + (exchange == "nccl") for run in range(RUNS)]
