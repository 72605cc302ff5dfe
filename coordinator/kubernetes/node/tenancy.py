"""Whose slot is whose: the kubelet's PodResources and the pods' annotations become part of `slot.json`.

Allocate does not say for which pod it is.  The kubelet's PodResources API does, a moment later: which container has
which devices, slots and units of memory alike.  So the pod's name, its memory limit and its annotations are written
into the slot then, and the coordinator, which follows the file, applies them at once.

A slot whose devices no container has any more is removed, late enough not to meet a container that is just being
made.  A slot that is missing for a container that has devices (somebody has emptied the slots' directory) is made
again, since the kubelet does not ask again.

Invariants: what the kubelet does not answer changes nothing; a slot is touched only if it is still the allocation that
was looked at; the kubelet is asked every ten seconds when all pods are known, and a little sooner when one is not.

May not go here: reading annotations (kubernetes/cluster/pods.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from nvshare.coordinator.kubernetes.node import allocation
from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.allocation import SlotStore
from nvshare.coordinator.kubernetes.slots import device_ids
from nvshare.coordinator.kubernetes.slots.slot import PodRef, Slot, SlotPolicy

log: Final = logging.getLogger("nvshare.plugin")

FIRST_LOOK_S: Final = 0.2
LATER_LOOK_S: Final = 10.0
KEEP_S: Final = 120.0
"""A slot that no container has is removed no earlier after its allocation."""
MISSES: Final = 2
"""Nor before so many answers in a row without it."""
LIST_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container with devices of ours."""

    pod: PodRef
    slots: tuple[str, ...]
    memory_units: int = 0


class Policies(Protocol):
    """What a pod's annotations say; coordinator/kubernetes/cluster/pods.py."""

    def policy(self, namespace: str, pod: str, container: str) -> SlotPolicy | None:
        """None: the pod is not known (yet)."""


def list_tenants(socket: Path, resource: str, memory_resource: str | None) -> list[Tenant]:
    """What the kubelet says now.  Raises grpc.RpcError."""
    with grpc.insecure_channel(f"unix://{socket}", options=m.CHANNEL_OPTIONS) as channel:
        call: Any = channel.unary_unary(
            m.LIST_POD_RESOURCES,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=m.ListPodResourcesResponse.FromString,
        )
        answer = call(m.ListPodResourcesRequest(), timeout=LIST_S)
    return tenants_in(answer, resource, memory_resource)


def tenants_in(answer: Any, resource: str, memory_resource: str | None) -> list[Tenant]:
    """Containers with slots."""
    found: list[Tenant] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: list[str] = []
            units = 0
            for devices in container.devices:  # one entry a resource, or one for each NUMA node
                if devices.resource_name == resource:
                    ids += devices.device_ids
                elif memory_resource is not None and devices.resource_name == memory_resource:
                    units += len(devices.device_ids)
            if ids and pod.namespace and pod.name and container.name:
                ref = PodRef(namespace=pod.namespace, name=pod.name, container=container.name)
                found.append(Tenant(ref, tuple(sorted(ids)), units))
    return found


class Tenancy:
    """A thread that keeps the slots as the kubelet has them."""

    def __init__(
        self,
        store: SlotStore,
        ask: Callable[[], list[Tenant]],
        *,
        unit_bytes: int = 0,
        policies: Policies | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ask` raises grpc.RpcError when the kubelet does not answer."""
        self._store = store
        self._ask = ask
        self._unit_bytes = unit_bytes
        self._policies = policies
        self._clock = clock
        self._misses: dict[str, int] = {}  # allocation -> answers without it
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tenancy", daemon=True)
        self.failures = 0
        self._complained = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def woken(self) -> None:
        """Somebody has a new slot, or other annotations; any thread."""
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
                settled = self.look()
                self._complained = False
            except (grpc.RpcError, OSError) as error:
                self.failures += 1
                if not self._complained:
                    log.warning("pod resources: %s", _sentence(error))
                    self._complained = True
                settled = False
            wait_s = LATER_LOOK_S if settled else min(LATER_LOOK_S, max(FIRST_LOOK_S, (wait_s or 0.0) * 2))

    def look(self) -> bool:
        """One question, and what follows from it.  True: every slot's pod is known.  Raises grpc.RpcError, OSError."""
        before = self._store.all()  # what is allocated while the kubelet answers is looked at next time
        tenants = self._ask()
        owners = {device_id: tenant for tenant in tenants for device_id in tenant.slots}
        settled = True
        for slot in before.values():
            tenant = owners.get(slot.device_ids[0])
            if tenant is not None:
                self._misses.pop(slot.allocation, None)
                self._settle(slot, tenant)
            elif not self._expire(slot):
                settled = settled and slot.pod is not None
        self._make_again(before, tenants)
        known = {slot.allocation for slot in before.values()}
        self._misses = {key: count for key, count in self._misses.items() if key in known}
        return settled

    def _settle(self, slot: Slot, tenant: Tenant) -> None:
        limit = tenant.memory_units * self._unit_bytes // len(slot.gpus)
        policy = slot.policy
        if self._policies is not None:
            pod = tenant.pod
            policy = self._policies.policy(pod.namespace, pod.name, pod.container) or policy
        fresh = slot.model_copy(update={"pod": tenant.pod, "memory_limit_bytes": limit, "policy": policy})
        if fresh != slot and self._store.replace(slot, fresh) and slot.pod != tenant.pod:
            pod = tenant.pod
            log.info("slot %s: %s/%s, container %s", slot.slot, pod.namespace, pod.name, pod.container)

    def _expire(self, slot: Slot) -> bool:
        """Whether the slot is gone now."""
        misses = self._misses[slot.allocation] = self._misses.get(slot.allocation, 0) + 1
        if misses < MISSES or self._clock() - slot.allocated_at_s < KEEP_S or not self._store.remove(slot):
            return False
        log.info("slot %s: its container is gone", slot.slot)
        return True

    def _make_again(self, known: dict[str, Slot], tenants: list[Tenant]) -> None:
        present = {device_id for slot in known.values() for device_id in slot.device_ids}
        for tenant in tenants:
            ids = [found for each in tenant.slots if (found := device_ids.parse(each)) is not None]
            ids.sort(key=lambda found: (found.uuid, found.number))
            if not ids or str(ids[0]) in present or set(tenant.slots) & self._allocated():
                continue
            slot = allocation.new_slot(ids, "")
            self._store.allocate(slot)
            log.info("slot %s is made again for %s/%s", slot.slot, tenant.pod.namespace, tenant.pod.name)
            self._settle(slot, tenant)

    def _allocated(self) -> set[str]:
        return {device_id for slot in self._store.all().values() for device_id in slot.device_ids}


def _sentence(error: Any) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
