"""The plugin's two resources: slots of GPUs, and units of GPU memory.

Invariants: device health follows GPU health.  Without an installed hook library no slot is healthy: a container
without the hook would use the GPU without a lease.

Non-goals: gRPC, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nvshare.coordinator.kubernetes.cluster.options import OptionError, Options
from nvshare.coordinator.kubernetes.node import allocation, library
from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.allocation import Answer, SlotStore
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.kubernetes.slots import device_ids

_DEVICE_OVERHEAD_BYTES: Final = 2 + 2 + 2 + len(m.UNHEALTHY)
"""Size of a list entry without its id: three headers and the health."""


class TooLongError(OptionError):
    """The list exceeds the kubelet's largest message."""


class SlotResource:
    """`nvshare.com/gpu`."""

    def __init__(
        self, options: Options, state: Callable[[], State], store: SlotStore, allocated: Callable[[], None]
    ) -> None:
        """`allocated`: called after each allocation."""
        self.name = options.resource
        self._options = options
        self._state = state
        self._store = store
        self._allocated = allocated

    def devices(self) -> list[tuple[str, bool]]:
        installed = library.current(self._options.paths.library_dir) is not None
        return [
            (name, healthy and installed)
            for uuid, healthy in self._state().health().items()
            for name in device_ids.slot_ids((uuid,), self._options.slots_per_gpu)
        ]

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str] | None:
        distinct = not self._options.allow_several_slots
        return device_ids.preferred(available, must_include, size, self._options.preference, distinct=distinct)

    def allocate(self, field: str, device_ids_asked: Sequence[str]) -> Answer:
        health = self._state().health()
        several = self._options.allow_several_slots
        chosen = device_ids.check_slots(field, device_ids_asked, health, allow_several=several)
        answer = allocation.allocate(chosen, self._options, self._store)
        self._allocated()
        return answer


class MemoryResource:
    """`nvshare.com/gpu-memory-...`: the units of all healthy GPUs together; a unit belongs to no GPU."""

    def __init__(self, name: str, state: Callable[[], State], allocated: Callable[[], None]) -> None:
        self.name = name
        self.unit_bytes = device_ids.memory_unit_bytes(name)
        self._state = state
        self._allocated = allocated

    def _counts(self) -> tuple[int, int]:
        """Number of units, and of healthy units."""
        state = self._state()
        health = state.health()
        units = {device.uuid: device.total_bytes // self.unit_bytes for device in state.devices}
        return sum(units.values()), sum(count for uuid, count in units.items() if health[uuid])

    def check(self) -> None:
        """Raises TooLongError if the list exceeds the kubelet's largest message."""
        count, _ = self._counts()
        needed = count * (len(str(count)) + _DEVICE_OVERHEAD_BYTES)
        if needed > m.KUBELET_MESSAGE_BYTES:
            raise TooLongError(
                f"--memory-resource: {self.name}: {count} units exceed the kubelet's message size of "
                f"{m.KUBELET_MESSAGE_BYTES} bytes; use a coarser unit, such as nvshare.com/gpu-memory-256mib"
            )

    def devices(self) -> list[tuple[str, bool]]:
        count, healthy = self._counts()
        return [(name, number < healthy) for number, name in enumerate(device_ids.memory_ids(count))]

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str] | None:
        return None

    def allocate(self, field: str, device_ids_asked: Sequence[str]) -> Answer:
        count, _ = self._counts()
        units = device_ids.check_memory(field, device_ids_asked, count)
        self._allocated()
        return allocation.allocate_memory(units, self.unit_bytes)
