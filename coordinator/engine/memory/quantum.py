"""The automatic quantum: long enough that switching costs at most a target share, short enough to be fair.

With a share s of the time for switching and a cost c per switch, c / (c + q) = s gives q = c (1 - s) / s.

Rules:
- The cost is measured: drain, hand-over, and the average wait for memory over the last switches.
- A quantum is at least twice what moves during it, so that there is time for what comes ahead of a turn.
- The result is within the bounds of the settings.  Before anything is measured it is `INITIAL_NS`.
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.model.gpu import Gpu
from nvshare.coordinator.model.node import Node
from nvshare.coordinator.model.settings import MILLISECOND_NS

INITIAL_NS: Final = 100 * MILLISECOND_NS
WEIGHT: Final = 0.125
"""Weight of the newest sample in moving averages."""
OUTLIER: Final = 8
"""A sample counts as so many times the average at most: one stall of a busy machine must not decide the next turns."""

ROOM_FOR_HIDDEN: Final = 2
MOST_FOR_WAITS: Final = 4
"""Times the cost of a switch: a quantum that is bounded for the others' waits is at least this long."""
DEFAULT_RATE: Final = 8.0
"""Assumed bytes a nanosecond of one move while a program computes, before anything is measured."""


def moving_average(average: float, sample: int) -> float:
    """Exponential moving average; the first sample stands for itself."""
    most = max(OUTLIER * average, 10.0 * MILLISECOND_NS)
    return float(sample) if average == 0.0 else average + WEIGHT * (min(sample, most) - average)


def move_rate(gpu: Gpu) -> float:
    """Bytes a nanosecond of one move."""
    return gpu.switching.move_rate or DEFAULT_RATE


def automatic_quantum_ns(gpu: Gpu) -> int:
    """The quantum at which switching costs `switch_share`."""
    if not gpu.switching.measured and not gpu.switching.waits_ns:
        return INITIAL_NS
    cost_ns, hidden_ns = gpu.switching.average_cost_ns, gpu.switching.hidden.average_ns
    settings = gpu.settings
    share = settings.switch_share
    quantum_ns = int(max(cost_ns * (1.0 - share) / share, ROOM_FOR_HIDDEN * hidden_ns))
    # Steps of a millisecond keep the figure stable.
    quantum_ns -= quantum_ns % MILLISECOND_NS
    # Others wait at most this long, unless switching would then cost more than a fifth of the time.
    others = max(1, gpu.leases.active_seats - 1)
    quantum_ns = min(quantum_ns, max(settings.longest_wait_ns // others, int(MOST_FOR_WAITS * cost_ns)))
    return max(settings.quantum_min_ns, min(settings.quantum_max_ns, quantum_ns))


def idle_release_ns(gpu: Gpu, node: Node) -> int:
    """Longest time that an idle holder keeps others waiting; 0: its quantum.

    When working sets do not fit, each release costs a move both ways.  So the timeout is at most twice the usual wait
    for memory: a holder that stays idle for longer wastes no more than its release costs.  It is a power of two,
    because each change is a message to each client.
    """
    base_ns = node.settings.idle_release_ns
    wanted_ns = 2 * gpu.switching.wait_average_ns
    if wanted_ns <= base_ns or base_ns == 0:
        return base_ns
    return MILLISECOND_NS << ((int(wanted_ns) // MILLISECOND_NS).bit_length() - 1)
