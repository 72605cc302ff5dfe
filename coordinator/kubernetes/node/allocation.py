"""Allocate: writes the slot's directory and returns the container's mounts and environment.

Paths in the container are constants: the slot is mounted at /run/nvshare, where programs look for a coordinator, and
the current version of the hook at /opt/nvshare.

The container's `/etc/ld.so.preload` names the hook, so a pod's own LD_PRELOAD replaces nothing.  Setuid programs have
the hook too, where it is inert.  musl's loader, which could not load the hook, does not read the file.

Invariants: the slot's directory is complete, and earlier slots with the same devices are removed, before Allocate
answers.  An answer stays valid for the life of the container: the kubelet reuses it when the container restarts.

Non-goals: gRPC.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvshare.client_hook.launcher import SYSTEM_PRELOAD
from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.device_ids import SlotId
from nvshare.coordinator.kubernetes.slots.slot import Slot, SlotError

SLOT_IN_CONTAINER: Final = "/run/nvshare"
SLOT_ANNOTATION: Final = "nvshare.com/slot"


class NotReadyError(Exception):
    """The plugin cannot allocate yet; the text names what is missing."""


@dataclass(frozen=True, slots=True)
class MountSpec:
    """A directory or file of the node, read-only in the container."""

    host_path: Path
    container_path: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Environment, mounts, annotations and CDI devices of a container."""

    environment: dict[str, str]
    mounts: tuple[MountSpec, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_devices: tuple[str, ...] = ()


class SlotStore:
    """Writes the slots' directory.  Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()

    def all(self) -> dict[str, Slot]:
        """All slots by name."""
        return slots.read_all(self.directory)

    def allocate(self, fresh: Slot) -> None:
        """Writes a new slot and removes other slots with the same devices.  Raises OSError."""
        with self._lock:
            for name, earlier in self.all().items():
                if name != fresh.slot and set(earlier.device_ids) & set(fresh.device_ids):
                    slots.remove(self.directory, name)
            slots.write(self.directory, fresh)

    def replace(self, known: Slot, fresh: Slot) -> bool:
        """Replaces the slot unless it was allocated anew or removed since `known` was read.  Raises OSError."""
        with self._lock:
            if not self._is_still(known):
                return False
            slots.write(self.directory, fresh)
            return True

    def remove(self, known: Slot) -> bool:
        """Removes the slot on the same condition."""
        with self._lock:
            if not self._is_still(known):
                return False
            slots.remove(self.directory, known.slot)
            return True

    def _is_still(self, known: Slot) -> bool:
        try:
            present = slots.read(self.directory / known.slot)
        except SlotError:
            return False
        return present is not None and present.allocation == known.allocation


def new_slot(device_ids: Sequence[SlotId], library_name: str) -> Slot:
    """A slot for these devices, named after the first of them."""
    return Slot(
        slot=slots.name_for(str(device_ids[0])),
        allocation=secrets.token_hex(8),
        allocated_at_s=time.time(),
        gpus=tuple(dict.fromkeys(each.uuid for each in device_ids)),
        device_ids=tuple(map(str, device_ids)),
        library=library_name,
    )


def allocate(device_ids: Sequence[SlotId], options: Containers, store: SlotStore) -> Answer:
    """Writes the slot and returns the container's answer.  Raises NotReadyError and OSError."""
    installed = options.library_dir
    name = library.current(installed)
    if name is None:
        raise NotReadyError(f"no hook library in {installed}: run `nvshare-install-library --to {installed}`")
    slot = new_slot(device_ids, name)
    store.allocate(slot)
    environment = hook_environment(options)
    environment["NVIDIA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    mounts = hook_mounts(store.directory / slot.slot, installed / name)
    cdi_devices = [f"{options.cdi_kind}={uuid}" for uuid in slot.gpus] if options.cdi_kind else []
    if boundary.is_wanted(options.memory_boundary):
        cdi_devices.append(f"{boundary.CDI_KIND}={slot.slot}")
    return Answer(environment, mounts, ((SLOT_ANNOTATION, slot.slot),), tuple(cdi_devices))


def write_boundary(slot: Slot, options: Containers) -> None:
    """Writes the CDI device that `allocate` has named, before the slot's container starts.  Raises OSError."""
    variables = boundary.environment(slot.limit_bytes, options.memory_boundary, options.processes)
    variables["NVSHARE_SOCKET"] = f"{SLOT_IN_CONTAINER}/{slots.SOCKET_FILE}"  # a device of CDI must change something
    place = options.cdi_dir / f"nvshare-slot-{slot.slot}.json"
    slots.replace_file(place, boundary.cdi_specification(slot.slot, variables))


def hook_environment(options: Containers) -> dict[str, str]:
    """The variables by which programs of a container find their slot's coordinator."""
    environment = {
        "NVSHARE_SOCKET": f"{SLOT_IN_CONTAINER}/{slots.SOCKET_FILE}",
        "NVSHARE_MEMORY": options.memory,
        "NVSHARE_ON_LOSS": options.on_loss,
    }
    if options.loss_timeout_ns is not None:
        environment["NVSHARE_LOSS_TIMEOUT"] = f"{options.loss_timeout_ns // 1_000_000}ms"
    return environment


def hook_mounts(sockets: Path, version: Path) -> tuple[MountSpec, ...]:
    """The mounts by which every program of a container has its sockets and the hook of an installed version."""
    return (
        MountSpec(sockets, SLOT_IN_CONTAINER),
        MountSpec(version, library.IN_CONTAINER),
        MountSpec(version / library.PRELOAD, SYSTEM_PRELOAD),
    )
