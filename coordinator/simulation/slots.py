"""The containers of a world (world.py): slots with one or two GPUs, whose annotations and allocations change.

A slot keeps its GPUs.  Non-goals: files and sockets of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from nvshare.coordinator.kubernetes.slots.slot import Slot, SlotPolicy
from nvshare.coordinator.model.settings import MILLISECOND_NS

if TYPE_CHECKING:
    from nvshare.coordinator.kubernetes.slots.slot_book import SlotBook
    from nvshare.coordinator.simulation.world import World

SLOTS = 3


class Slots:
    """The slots of the node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._present: dict[str, Slot] = {}
        self._allocations = 0
        if world.plan.slot_share:
            for number in range(SLOTS):
                self._allocate(f"s{number}", world.uuids[number % len(world.uuids) :][:2])

    def present(self) -> Collection[Slot]:
        """All slots, for a new coordinator."""
        return self._present.values()

    def choose(self) -> Slot | None:
        """The slot of a new process; None for a process outside of containers."""
        chance, share = self._world.chance, self._world.plan.slot_share
        if not share or chance.random() >= share or not self._present:
            return None
        return chance.choice(list(self._present.values()))

    def meddle(self) -> None:
        """Changes an annotation, or ends a container and allocates its slot anew."""
        chance = self._world.chance
        if not self._present or chance.random() < 0.7:
            return
        slot = chance.choice(list(self._present.values()))
        if chance.random() < 0.7:
            self._put(slot.model_copy(update={"policy": self._policy()}))
            return
        del self._present[slot.slot]
        for process in list(self._world.processes.values()):
            if process.slot == slot.slot:
                process.ending = True
                self._world.after(chance.randint(0, 20) * MILLISECOND_NS, process.kill)
        self._tell(lambda book: book.remove(slot.slot))
        delay_ns = chance.randint(1, 500) * MILLISECOND_NS
        self._world.after(delay_ns, lambda: self._allocate(slot.slot, list(slot.gpus)))

    def _policy(self) -> SlotPolicy:
        chance = self._world.chance
        gang = chance.choice([None, None, "train"])
        limit = chance.choice([None, None, self._world.plan.capacity_bytes // 2])
        return SlotPolicy(
            priority=chance.choice([None, 0, 3]), weight=chance.choice([None, 4]), gang=gang, memory_limit_bytes=limit
        )

    def _allocate(self, name: str, gpus: list[str]) -> None:
        self._allocations += 1
        devices = tuple(f"{gpu}::0" for gpu in gpus)
        allocation = str(self._allocations)
        slot = Slot(slot=name, allocation=allocation, allocated_at_s=0, gpus=tuple(gpus), device_ids=devices)
        self._put(slot.model_copy(update={"policy": self._policy()}))

    def _put(self, slot: Slot) -> None:
        self._present[slot.slot] = slot
        self._tell(lambda book: self._world.give(*book.put(slot)))

    def _tell(self, action: Callable[[SlotBook], object]) -> None:
        shell = self._world.shell
        if shell is not None and shell.dispatcher.slots is not None:
            action(shell.dispatcher.slots)
