"""Allocate: a container's slots become a directory on the node, and mounts and environment for the container.

Paths in the container are constants, whatever the node's are: the slot at /run/nvshare, where programs look for a
coordinator, and the version of the hook that was current then at /opt/nvshare.

LD_PRELOAD has a literal `$LIB`, a token that glibc's loader alone replaces.  Another libc's (musl) would load the hook,
miss glibc's functions in it and end the process; so it looks for a file that is not there, and goes on without.

Invariants: the slot's directory is complete before the answer is given; directories of earlier owners of these slots
are gone then; an answer is valid for the life of the container, because the kubelet gives it again when the
container is started again.

May not go here: gRPC.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvshare.client_hook.launcher import HOOK_NAME
from nvshare.coordinator.kubernetes.cluster.options import Options
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.device_ids import SlotId
from nvshare.coordinator.kubernetes.slots.slot import Slot, SlotError

SLOT_IN_CONTAINER: Final = "/run/nvshare"
LIBRARY_IN_CONTAINER: Final = "/opt/nvshare"
PRELOAD: Final = f"{LIBRARY_IN_CONTAINER}/$LIB/{HOOK_NAME}"
SLOT_ANNOTATION: Final = "nvshare.com/slot"


class NotReadyError(Exception):
    """Nothing can be allocated now; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class MountSpec:
    """A directory of the node, read-only in the container."""

    host_path: Path
    container_path: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a container gets."""

    environment: dict[str, str]
    mounts: tuple[MountSpec, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()


class SlotStore:
    """The slots' directory as the plugin writes it.  Any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()

    def all(self) -> dict[str, Slot]:
        """By name."""
        return slots.read_all(self.directory)

    def allocate(self, fresh: Slot) -> None:
        """Puts a new slot in the place of those that had its devices.  Raises OSError."""
        with self._lock:
            for name, earlier in self.all().items():
                if name != fresh.slot and set(earlier.device_ids) & set(fresh.device_ids):
                    slots.remove(self.directory, name)
            slots.write(self.directory, fresh)

    def replace(self, known: Slot, fresh: Slot) -> bool:
        """Only if nobody has allocated or removed it since `known` was read.  Raises OSError."""
        with self._lock:
            if not self._is_still(known):
                return False
            slots.write(self.directory, fresh)
            return True

    def remove(self, known: Slot) -> bool:
        """On the same condition."""
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
    """A slot for these devices, named after the first."""
    return Slot(
        slot=slots.name_for(str(device_ids[0])),
        allocation=secrets.token_hex(8),
        allocated_at_s=time.time(),
        gpus=tuple(dict.fromkeys(each.uuid for each in device_ids)),
        device_ids=tuple(map(str, device_ids)),
        library=library_name,
    )


def allocate(device_ids: Sequence[SlotId], options: Options, store: SlotStore) -> Answer:
    """Makes the slot and says what the container needs.  Raises NotReadyError and OSError."""
    name = library.current(options.library_dir)
    if name is None:
        raise NotReadyError(
            f"no hook library in {options.library_dir}: run `nvshare-install-library --to {options.library_dir}`"
        )
    slot = new_slot(device_ids, name)
    store.allocate(slot)
    environment = {
        "LD_PRELOAD": PRELOAD,
        "NVSHARE_SOCKET": f"{SLOT_IN_CONTAINER}/{slots.SOCKET_FILE}",
        "NVSHARE_MEMORY": options.memory,
        "NVSHARE_ON_LOSS": options.on_loss,
        "NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpus),
    }
    if options.loss_timeout_ns is not None:
        environment["NVSHARE_LOSS_TIMEOUT"] = f"{options.loss_timeout_ns // 1_000_000}ms"
    mounts = (
        MountSpec(store.directory / slot.slot, SLOT_IN_CONTAINER),
        MountSpec(options.library_dir / name, LIBRARY_IN_CONTAINER),
    )
    return Answer(environment, mounts, ((SLOT_ANNOTATION, slot.slot),))


def allocate_memory(units: int, unit_bytes: int) -> Answer:
    """The limit that the hook begins with; the slot gets it when the kubelet has said whose units these are."""
    return Answer({"NVSHARE_MEMORY_LIMIT": str(units * unit_bytes)})
