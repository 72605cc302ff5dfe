"""Prepares claims: a slot for each request of a claim, and a CDI file that mounts slots and hook into containers.

Slots and CDI file are the only record: a slot's allocation names its claim, so a restarted driver knows what it has
made.  The kubelet prepares claims again after a restart of the node, which removes both.

A slot has all devices of its request, because a container has one socket.  A container that uses two requests has the
slot of the last one alone.  A claim of a template names its pod, but no container: the slot has the request's name.

Invariants: Prepare and Unprepare may be repeated and interrupted at any point.  A CDI file names complete slots.  A
failure is the answer for its claim alone.

Non-goals: gRPC (service.py), the claim's meaning (claims.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.dra import claims
from nvshare.coordinator.kubernetes.dra.claims import ClaimError, Device, Share
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.node.allocation import hook_environment, hook_mounts
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import MAX_NAME_BYTES, PodRef, Slot, SlotError

log: Final = logging.getLogger("nvshare.dra")

CDI_KIND: Final = "nvshare.com/claim"
_OURS: Final = "dra-"
"""Begins the allocation of a slot that this driver has made."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One device of a claim, for the kubelet."""

    request: str
    device: Device
    cdi_devices: tuple[str, ...]


class Driver:
    """Thread-safe."""

    def __init__(self, options: Containers, uuids: Callable[[], Mapping[str, str]]) -> None:
        """`uuids`: GPU by device name.  Prepares the directories.  Raises SlotError and OSError."""
        slots.prepare(options.slots_dir)
        options.cdi_dir.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._uuids = uuids
        self._lock = threading.Lock()

    def prepare(self, uid: str, claim: Mapping[str, Any]) -> list[Prepared]:
        """Makes the claim's slots and its CDI file.  Raises ClaimError, SlotError and OSError."""
        slots.check_name(uid)
        metadata = claim.get("metadata") or {}
        if metadata.get("uid") != uid:
            raise ClaimError("another claim has this name by now")
        with self._lock:
            made = [(share, self._slot(uid, metadata, claims.pod(claim), share)) for share in claims.shares(claim)]
            for _, slot in made:
                slots.write(self._options.slots_dir, slot)
            devices = [self._cdi_device(share, slot) for share, slot in made]
            document = {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": devices}
            slots.replace_file(self._cdi_file(uid), json.dumps(document).encode())
        prepared = []
        for share, slot in made:
            for index, (device, uuid) in enumerate(zip(share.devices, slot.gpus, strict=True)):
                named = [f"{CDI_KIND}={slot.slot}"] if index == 0 else []
                named += [f"{self._options.cdi_kind}={uuid}"] if self._options.cdi_kind else []
                prepared.append(Prepared(share.request, device, tuple(named)))
        return prepared

    def unprepare(self, uid: str) -> None:
        """Removes whatever `prepare` has made for this claim.  Raises SlotError and OSError."""
        slots.check_name(uid)
        with self._lock:
            file = self._cdi_file(uid)
            file.unlink(missing_ok=True)
            file.with_name(f".{file.name}.new").unlink(missing_ok=True)  # of an interrupted `prepare`
            for name, slot in slots.read_all(self._options.slots_dir).items():
                if slot.allocation == _OURS + uid:
                    slots.remove(self._options.slots_dir, name)

    def _slot(self, uid: str, metadata: Mapping[str, Any], pod: str, share: Share) -> Slot:
        known = self._uuids()
        missing = [device.name for device in share.devices if device.name not in known]
        if missing:
            raise ClaimError(f"request {share.request}: the node has no device {', '.join(missing)}")
        digest = hashlib.sha256(f"{uid}/{share.request}".encode()).hexdigest()[:16]
        claim_name = str(metadata["name"])
        name = f"{claim_name[: MAX_NAME_BYTES - len(digest) - 1]}-{digest}"
        try:
            earlier = slots.read(self._options.slots_dir / name)
        except SlotError:
            earlier = None
        installed = earlier.library if earlier is not None else library.current(self._options.library_dir)
        if not installed:
            place = self._options.library_dir
            raise ClaimError(f"no hook library in {place}: run `nvshare-install-library --to {place}`")
        return Slot(
            slot=name,
            allocation=_OURS + uid,
            allocated_at_s=earlier.allocated_at_s if earlier is not None else time.time(),
            gpus=tuple(known[device.name] for device in share.devices),
            device_ids=tuple(f"{device.name}/{device.share_id}" for device in share.devices),
            library=installed,
            policy={
                "memory_limit": str(share.memory_bytes),
                **{word: text for word, text in share.words.items() if word != "memory"},
            },
            pod=PodRef(namespace=str(metadata["namespace"]), name=pod, container=share.request) if pod else None,
        )

    def _cdi_device(self, share: Share, slot: Slot) -> dict[str, Any]:
        options = self._options
        variables = hook_environment(replace(options, memory=share.words.get("memory", options.memory)))
        variables["NVIDIA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        variables |= boundary.environment(share.memory_bytes, options.memory_boundary, options.processes)
        mounts = [
            {
                "hostPath": str(mount.host_path),
                "containerPath": mount.container_path,
                "options": ["ro", "rbind", "nosuid", "nodev"],
            }
            for mount in hook_mounts(options.slots_dir / slot.slot, options.library_dir / slot.library)
        ]
        edits = {"env": [f"{name}={value}" for name, value in variables.items()], "mounts": mounts}
        return {"name": slot.slot, "containerEdits": edits}

    def _cdi_file(self, uid: str) -> Path:
        return self._options.cdi_dir / f"nvshare.com-claim_{uid}.json"
