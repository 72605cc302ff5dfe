"""The parameters of a world (world.py).  The same plan and seed give the same world."""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.model.settings import SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a world.  Chances are per occasion."""

    gpus: int = 2
    processes: int = 6
    duration_ns: int = 20 * SECOND_NS
    capacity_bytes: int = 1000
    memory_bytes: int = 0
    """Largest allocation of a process on a GPU; 0: no memory is simulated."""
    device_share: float = 0.0
    swap_share: float = 0.0
    hang_chance: float = 0.0
    death_chance: float = 0.0
    exit_ns: int = 0
    """Longest time for which a dead process's memory stays on the GPU after its connection has ended."""
    drop_chance: float = 0.0
    crash_every_ns: int = 0
    admin_every_ns: int = 0
    short_move_chance: float = 0.0
    pin_chance: float = 0.0
    """Chance of changing a process's pins at each work, and of allocating without a lease."""
    old_share: float = 0.0
    """Share of processes whose hook does not ask for pins."""
    gangs: int = 0
    """Number of gangs; most processes belong to one.  0: none."""
    users: int = 1
    """Number of users, which have the processes in turn."""
    stop_chance: float = 0.0
    """Chance of a stop of some seconds in a memory order, as by SIGSTOP."""
    gangs_are_told: bool = True
    """False: the engine does not learn of the gangs, for comparison."""
    hostiles: int = 0
    """Number of hostile clients."""
    torn_journal: bool = False
    """The coordinator dies within a turn, and its journal's last write is incomplete."""
    damage_chance: float = 0.0
    """Chance of damage to the journal while there is no coordinator."""
    slot_share: float = 0.0
    """Share of processes in slots."""
    hidden_share: float = 0.0
    """Share of processes in another PID namespace, whose ids the kernel does not report."""
    profile_share: float = 0.0
    """Share of processes that say what they are: class, shares, deadline, whether they run under MPS."""
    pids: int = 0
    """Number of process ids, which are reused; 0: ids are unique."""
