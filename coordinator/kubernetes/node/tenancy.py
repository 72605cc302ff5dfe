"""Writes each slot's pod into `slot.json`, with the settings of its annotations.

Allocate does not name the pod.  Shortly after it the kubelet's PodResources API does: it lists the devices of each
container.  The tenancy thread then updates the slot, and the coordinator, which watches the file, applies the change
at once.

A slot whose devices belong to no container is removed, late enough to spare a container that is being created.  A slot
that is missing for a running container (the slots' directory was emptied) is restored: the kubelet does not call
Allocate again.

Invariants: a failed PodResources call changes nothing.  A slot changes only if it is still the allocation that was
read.  The thread asks the kubelet every ten seconds, and sooner while a slot's pod is unknown.

Non-goals: reading annotations (kubernetes/cluster/pods.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from pydantic import ValidationError

from nvshare.coordinator.kubernetes.node import allocation
from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.allocation import SlotStore
from nvshare.coordinator.kubernetes.slots import device_ids
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot
from nvshare.coordinator.kubernetes.unix_grpc import call, sentence

log: Final = logging.getLogger("nvshare.plugin")

FIRST_LOOK_S: Final = 0.2
LATER_LOOK_S: Final = 10.0
KEEP_S: Final = 120.0
"""Minimum age of a slot that is removed."""
MISSES: Final = 2
"""Consecutive answers without a slot's devices before the slot is removed."""
LIST_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container with slots."""

    pod: PodRef
    slots: tuple[str, ...]


class Policies(Protocol):
    """Settings by pod annotations; kubernetes/cluster/pods.py implements it."""

    def policy(self, namespace: str, pod: str, container: str) -> dict[str, str] | None:
        """Settings of this container's slot; None for an unknown pod."""


def list_tenants(socket: Path, resource: str) -> list[Tenant]:
    """The kubelet's present answer.  Raises grpc.RpcError."""
    request = m.ListPodResourcesRequest()
    return tenants_in(call(socket, m.LIST_POD_RESOURCES, request, m.ListPodResourcesResponse, LIST_S), resource)


def tenants_in(answer: Any, resource: str) -> list[Tenant]:
    """The containers with slots in a PodResources answer."""
    found: list[Tenant] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: list[str] = []
            for devices in container.devices:  # one entry a resource, or one a NUMA node
                if devices.resource_name == resource:
                    ids += devices.device_ids
            if not ids:
                continue
            with contextlib.suppress(ValidationError):  # names that no API server accepts
                ref = PodRef(namespace=pod.namespace, name=pod.name, container=container.name)
                found.append(Tenant(ref, tuple(sorted(ids))))
    return found


class Tenancy:
    """A thread that keeps the slots equal to the kubelet's allocations."""

    def __init__(
        self,
        store: SlotStore,
        ask: Callable[[], list[Tenant]],
        *,
        policies: Policies | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ask` raises grpc.RpcError if the kubelet does not answer."""
        self._store = store
        self._ask = ask
        self._policies = policies
        self._clock = clock
        self._misses: dict[str, int] = {}  # allocation -> answers without it
        self._wake = threading.Event()
        self._looking = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tenancy", daemon=True)
        self.failures = 0
        self._logged = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Looks soon, because a slot or annotations have changed.  Thread-safe."""
        self._wake.set()

    def _run(self) -> None:
        wait_s: float | None = 0.0
        while not self._stopping:
            if self._wake.wait(wait_s):
                self._wake.clear()
                wait_s = FIRST_LOOK_S
            if self._stopping:
                return
            try:
                complete = self.look()
                self._logged = False
            except (grpc.RpcError, OSError) as error:
                self.failures += 1
                if not self._logged:
                    log.warning("pod resources: %s", sentence(error))
                    self._logged = True
                complete = False
            wait_s = LATER_LOOK_S if complete else min(LATER_LOOK_S, max(FIRST_LOOK_S, (wait_s or 0.0) * 2))

    def look(self) -> bool:
        """Asks the kubelet once and updates all slots.  True: every slot's pod is known.

        Raises grpc.RpcError and OSError.
        """
        with self._looking:
            return self._look()

    def _look(self) -> bool:
        before = self._store.all()  # slots allocated during the call are left to the next look
        tenants = self._ask()
        owners = {device_id: tenant for tenant in tenants for device_id in tenant.slots}
        complete = True
        for slot in before.values():
            tenant = owners.get(slot.device_ids[0])
            if tenant is not None:
                self._misses.pop(slot.allocation, None)
                self._update(slot, tenant)
            elif not self._expire(slot):
                complete = complete and slot.pod is not None
        self._restore(before, tenants)
        known = {slot.allocation for slot in before.values()}
        self._misses = {key: count for key, count in self._misses.items() if key in known}
        return complete

    def _update(self, slot: Slot, tenant: Tenant) -> None:
        policy = slot.policy
        if self._policies is not None:
            pod = tenant.pod
            said = self._policies.policy(pod.namespace, pod.name, pod.container)
            policy = policy if said is None else said
        fresh = slot.model_copy(update={"pod": tenant.pod, "policy": policy})
        if fresh != slot and self._store.replace(slot, fresh) and slot.pod != tenant.pod:
            pod = tenant.pod
            log.info("slot %s: %s/%s, container %s", slot.slot, pod.namespace, pod.name, pod.container)

    def _expire(self, slot: Slot) -> bool:
        """Removes the slot if it is due; whether it did."""
        misses = self._misses[slot.allocation] = self._misses.get(slot.allocation, 0) + 1
        if misses < MISSES or self._clock() - slot.allocated_at_s < KEEP_S or not self._store.remove(slot):
            return False
        log.info("slot %s: its container is gone", slot.slot)
        return True

    def _restore(self, known: dict[str, Slot], tenants: list[Tenant]) -> None:
        present = {device_id for slot in known.values() for device_id in slot.device_ids}
        for tenant in tenants:
            ids = [found for each in tenant.slots if (found := device_ids.parse(each)) is not None]
            ids.sort(key=lambda found: (found.uuid, found.number))
            if not ids or str(ids[0]) in present or set(tenant.slots) & self._allocated():
                continue
            slot = allocation.new_slot(ids, "")
            self._store.allocate(slot)
            log.info("slot %s is restored for %s/%s", slot.slot, tenant.pod.namespace, tenant.pod.name)
            self._update(slot, tenant)

    def _allocated(self) -> set[str]:
        return {device_id for slot in self._store.all().values() for device_id in slot.device_ids}
