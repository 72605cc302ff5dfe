"""Round robin: exclusive turns.  The owner with the oldest last turn is next, with its program with the oldest turn.

Source: time slicing of GPUs by exclusive quanta (Alexopoulos, Mitropoulos: "nvshare: Practical GPU sharing without
memory size constraints", ICSE 2024).
Rule: one job at a time, for one quantum.  The job gives the GPU back early when it is idle.
Bound: with p programs of each of u owners a job waits at most p u - 1 quanta (parts/turns.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import GpuView, JobView, Plan
from nvshare.scheduler_policies.parts.turns import TurnPolicy, going_on, one_turn, split


class RoundRobin(TurnPolicy):
    """Turns of owners."""

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The job whose turn goes on, else the next one of those that wait, else the one that runs."""
        active, waiting = split(jobs)
        running = going_on(active, gpu.quantum_ns, now_ns)
        following = self.turns.following(waiting, running or next(iter((*active, *gpu.draining)), None))
        return one_turn(running or (following or active)[0], gpu.quantum_ns, following, len(waiting))

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of parts/turns.py."""
        return self.turns.longest_wait(clients) * gpu.quantum_ns
