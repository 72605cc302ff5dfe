"""The two resources that the plugin serves: slots of GPUs, and units of their memory.

Invariants: the lists follow the health of the GPUs; without a hook library no slot is healthy, because a container that
cannot load it would not wait for its turn.

May not go here: gRPC, threads.
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
"""Of one entry in a list, beside its id: three headers and the health."""


class TooLongError(OptionError):
    """The list would not fit into a message that the kubelet receives."""


class SlotResource:
    """`nvshare.com/gpu`."""

    def __init__(
        self, options: Options, state: Callable[[], State], store: SlotStore, woken: Callable[[], None]
    ) -> None:
        """`woken`: called when somebody new has a slot."""
        self.name = options.resource
        self._options = options
        self._state = state
        self._store = store
        self._woken = woken

    def devices(self) -> list[tuple[str, bool]]:
        installed = library.current(self._options.library_dir) is not None
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
        self._woken()
        return answer


class MemoryResource:
    """`nvshare.com/gpu-memory-...`: as many units as the node's healthy GPUs have, tied to none of them."""

    def __init__(self, name: str, state: Callable[[], State], woken: Callable[[], None]) -> None:
        self.name = name
        self.unit_bytes = device_ids.memory_unit_bytes(name)
        self._state = state
        self._woken = woken

    def _counts(self) -> tuple[int, int]:
        """All units, and how many of them are healthy."""
        state = self._state()
        health = state.health()
        units = {device.uuid: device.total_bytes // self.unit_bytes for device in state.devices}
        return sum(units.values()), sum(count for uuid, count in units.items() if health[uuid])

    def check(self) -> None:
        """Raises TooLongError."""
        count, _ = self._counts()
        needed = count * (len(str(count)) + _DEVICE_OVERHEAD_BYTES)
        if needed > m.KUBELET_MESSAGE_BYTES:
            raise TooLongError(
                f"--memory-resource: {self.name}: {count} units are more than a kubelet's message of "
                f"{m.KUBELET_MESSAGE_BYTES} bytes holds; use a coarser one, such as nvshare.com/gpu-memory-256mib"
            )

    def devices(self) -> list[tuple[str, bool]]:
        count, healthy = self._counts()
        return [(name, number < healthy) for number, name in enumerate(device_ids.memory_ids(count))]

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str] | None:
        return None

    def allocate(self, field: str, device_ids_asked: Sequence[str]) -> Answer:
        count, _ = self._counts()
        units = device_ids.check_memory(field, device_ids_asked, count)
        self._woken()
        return allocation.allocate_memory(units, self.unit_bytes)
