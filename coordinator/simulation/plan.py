"""How wild a world of simulation/world.py is.

Invariant: plain figures; the same plan and seed make the same world.  May not go here: what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.model.settings import SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How wild the world is.  Chances are per turn of the thing that they are about."""

    gpus: int = 2
    processes: int = 6
    duration_ns: int = 20 * SECOND_NS
    capacity_bytes: int = 1000
    memory_bytes: int = 0
    """Most that a process allocates on a GPU; 0: memory plays no part."""
    device_share: float = 0.0
    swap_share: float = 0.0
    hang_chance: float = 0.0
    death_chance: float = 0.0
    drop_chance: float = 0.0
    crash_every_ns: int = 0
    admin_every_ns: int = 0
    short_move_chance: float = 0.0
    pin_chance: float = 0.0
    """Of making some of its memory immovable, or movable again, each time that it works; and of allocating without a
    lease."""
    old_share: float = 0.0
    """Of processes whose hook asks nobody for that."""
    gangs: int = 0
    """Most processes belong to one of so many gangs; 0: there are none."""
    users: int = 1
    """Processes belong to so many users in turn."""
    stop_chance: float = 0.0
    """Of stopping for some seconds instead of going on with an order, as by SIGSTOP."""
    gangs_are_told: bool = True
    """False: the core does not hear of them, for comparison."""
    hostiles: int = 0
    """Processes that send anything at any time."""
    torn_journal: bool = False
    """The coordinator dies in the midst of a turn, and the last write to its journal is there in part."""
    damage_chance: float = 0.0
    """Of the journal being damaged or replaced while there is no coordinator."""
    slot_share: float = 0.0
    """Of processes that come by the socket of a slot."""
    hidden_share: float = 0.0
    """Of processes whose ids the kernel does not tell, since they are in another PID namespace."""
    pids: int = 0
    """Process ids are used again, out of this many; 0: never."""
