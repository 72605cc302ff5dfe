"""The resource that the plugin advertises: slots of GPUs.

Invariants: device health follows GPU health.  Without an installed hook library no slot is healthy: a container
without the hook would use the GPU without a lease.

Non-goals: gRPC, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvshare.coordinator.kubernetes.cluster.options import Options
from nvshare.coordinator.kubernetes.node import allocation, library
from nvshare.coordinator.kubernetes.node.allocation import Answer, SlotStore
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.kubernetes.node.tenancy import Tenancy
from nvshare.coordinator.kubernetes.slots import device_ids


class SlotResource:
    """`nvshare.com/gpu`."""

    def __init__(self, options: Options, state: Callable[[], State], store: SlotStore, tenancy: Tenancy) -> None:
        self.name = options.resource
        self._options = options
        self._state = state
        self._store = store
        self._tenancy = tenancy

    def devices(self) -> list[tuple[str, bool]]:
        installed = library.current(self._options.containers.library_dir) is not None
        return [
            (name, healthy and installed)
            for uuid, healthy in self._state().health().items()
            for name in device_ids.slot_ids((uuid,), self._options.slots_per_gpu)
        ]

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        distinct = not self._options.allow_several_slots
        return device_ids.preferred(available, must_include, size, self._options.preference, distinct=distinct)

    def allocate(self, field: str, device_ids_asked: Sequence[str]) -> Answer:
        health = self._state().health()
        several = self._options.allow_several_slots
        chosen = device_ids.check_slots(field, device_ids_asked, health, allow_several=several)
        answer = allocation.allocate(chosen, self._options.containers, self._store)
        self._tenancy.wake()
        return answer

    @property
    def starts(self) -> bool:
        """`start` is due before each start of a container."""
        return self._options.containers.memory_boundary != "off"

    def start(self, device_ids_started: Sequence[str]) -> None:
        """A container with these slots is about to start: its limit is known by now."""
        self._tenancy.look()
        for slot in self._store.all().values():
            if set(slot.device_ids) & set(device_ids_started):
                allocation.write_boundary(slot, self._options.containers)
