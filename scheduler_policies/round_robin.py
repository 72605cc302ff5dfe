"""Round robin: exclusive turns.  The owner with the oldest last turn is next, with its program with the oldest turn.

Source: time slicing of GPUs by exclusive quanta (Alexopoulos, Mitropoulos: "nvshare: Practical GPU sharing without
memory size constraints", ICSE 2024).
Rule: one job at a time, for one quantum.  The job gives the GPU back early when it is idle.
Bound: with p programs of each of u owners a job waits at most p u - 1 quanta (parts/turns.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nvshare.scheduler_policies.api import GpuView, Happened, JobView, Plan, PolicyBase
from nvshare.scheduler_policies.parts.turns import OwnerTurns, going_on, one_turn, split


class RoundRobin(PolicyBase):
    """Keeps the last turn of each owner."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def decide(self, gpu: GpuView, jobs: Sequence[JobView], now_ns: int) -> Plan:
        """The job whose turn goes on, else the next one of those that wait, else the one that runs."""
        active, waiting = split(jobs)
        running = going_on(active, gpu.quantum_ns, now_ns)
        following = self._turns.following(waiting, running or next(iter(active), None))
        job = running or (following[0] if following else active[0])
        return one_turn(job, gpu.quantum_ns, following, len(waiting))

    def observe(self, happened: Happened) -> None:
        """Notes a turn of the job's owner."""
        self._turns.observe(happened)

    def wait_bound_ns(self, clients: int, gpu: GpuView) -> int:
        """The bound of parts/turns.py."""
        return self._turns.longest_wait(clients) * gpu.quantum_ns
