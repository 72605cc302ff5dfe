"""Keeps the node's ResourceSlice on the API server as the node's GPUs are.

The slice is watched, because the kubelet removes it while the driver is away, and written only when it is missing or
differs.  The server completes what it stores (times of taints, forms of quantities), so what it answered is compared
with, not what was sent.

Invariants: every change has a higher generation of the pool.  A failure is logged when its text changes, and tried
again.

Non-goals: what is in a slice (slices.py).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from http.client import CONFLICT, NOT_FOUND, HTTPException
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess, ApiError, Stream
from nvshare.coordinator.kubernetes.dra import slices
from nvshare.coordinator.kubernetes.dra.claims import DRIVER
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.system.devices import Device

log: Final = logging.getLogger("nvshare.dra")

OLDEST: Final = (1, 36)
GATE: Final = "DRAConsumableCapacity"
PERIOD_S: Final = 3.0
API: Final = "resource.k8s.io/v1"
_SLICES: Final = f"/apis/{API}/resourceslices"
_FAILURES: Final = (ApiError, OSError, HTTPException, ValueError, KeyError, TypeError)
_SAMPLE: Final = State((Device(0, "GPU-sample", "sample", 1 << 30),), (("GPU-sample", "has a taint"),))


class ClusterError(Exception):
    """A cluster that cannot do what this driver needs; the text is one sentence."""


class Publisher:
    """The slice of one node."""

    def __init__(self, api: ApiAccess, node: str, state: Callable[[], State], slots_per_gpu: int = 1) -> None:
        self._api = api
        self._node = node
        self._state = state
        self._slots_per_gpu = slots_per_gpu
        self._name = f"{node}-{DRIVER}"
        self._stored: tuple[Any, Any] | None = None
        """Devices as they were sent, and the `spec` that the server made of them."""
        self._owner: dict[str, Any] = {}
        self._failure = ""
        self._version = ""
        """Of the slice as it was read or written last."""
        self._stream = Stream(api)
        self._wake = threading.Event()
        self._stopping = False

    def check(self) -> None:
        """Raises ClusterError where the cluster's version or feature gates do not suffice, and the API's errors."""
        found = self._api.call("GET", "/version")
        version = (int(found["major"]), int(re.match(r"[0-9]*", found["minor"])[0] or 0))  # type: ignore[index]
        oldest = ".".join(map(str, OLDEST))
        if version < OLDEST:
            raise ClusterError(
                f"the API server is Kubernetes {version[0]}.{version[1]}, and the DRA driver needs {oldest} or newer: "
                "use the device plugin (advertise.mode: plugin)"
            )
        node = self._api.call("GET", f"/api/v1/nodes/{self._node}")["metadata"]
        self._owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": node["uid"], "controller": True}
        sample = self._slice(slices.spec(self._node, _SAMPLE))
        sample["metadata"]["name"] += ".sample"
        try:
            (kept,) = self._api.call("POST", f"{_SLICES}?dryRun=All", sample)["spec"]["devices"]
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            raise ClusterError(f"the API server does not serve {API}: switch it on in --runtime-config") from None
        if not kept.get("allowMultipleAllocations"):
            raise ClusterError(
                f"the API server drops the fields of the feature gate {GATE}: switch it on in kube-apiserver, "
                "kube-scheduler, kube-controller-manager and the kubelets"
            )
        if not kept.get("taints"):
            log.warning("the feature gate DRADeviceTaints is off: claims may be placed on GPUs that are not healthy")

    def reconcile(self) -> None:
        """Writes the slice if it is missing or differs.  Raises the API's errors."""
        spec = slices.spec(self._node, self._state(), self._slots_per_gpu)
        wanted, made = spec["devices"], self._slice(spec)
        before = self._stored[1] if self._stored is not None else None
        try:
            found = self._api.call("GET", f"{_SLICES}/{self._name}")
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            found = None
        else:
            self._version = found["metadata"]["resourceVersion"]
            if self._stored == (wanted, found["spec"]) or (before is None and found["spec"]["devices"] == wanted):
                self._stored = (wanted, found["spec"])
                return
            before = found["spec"]
            made["metadata"]["resourceVersion"] = self._version
        if before is not None:
            spec["pool"]["generation"] = int(before["pool"]["generation"]) + 1
        method, path = ("POST", _SLICES) if found is None else ("PUT", f"{_SLICES}/{self._name}")
        written = self._api.call(method, path, made)
        self._stored, self._version = (wanted, written["spec"]), written["metadata"]["resourceVersion"]
        log.info("published %d GPUs, generation %d", len(wanted), spec["pool"]["generation"])

    def follow(self) -> None:
        """Reconciles now and at each change of the slice, until `wake` or the server ends the watch of it.

        Raises the API's errors.
        """
        self._stream = Stream(self._api)
        self.reconcile()
        # Version 0: the server answers from its cache, which spares etcd.  It begins with the slice as it is.
        query = {"fieldSelector": f"metadata.name={self._name}", "resourceVersion": "0"}
        for event in self._stream.watch(_SLICES, query):
            if (
                event is None  # it may have changed before the watch began
                or event["type"] == "DELETED"
                or event["object"]["metadata"]["resourceVersion"] != self._version
            ):
                self.reconcile()
            self._report("")

    def run(self, step: Callable[[], None], *, once: bool = False) -> None:
        """Takes a step every few seconds until `stop`; `once`: until the first that succeeds.  Raises ClusterError."""
        while not self._stopping:
            self._wake.clear()
            try:
                step()
                self._report("")
                if once:
                    return
            except _FAILURES as error:
                if not (isinstance(error, ApiError) and error.code == CONFLICT):  # another write: read again
                    self._report(f"{type(error).__name__}: {error}")
            self._wake.wait(PERIOD_S)

    def wake(self) -> None:
        """Takes the next step at once; after a change of the GPUs."""
        self._wake.set()
        self._stream.end()

    def stop(self) -> None:
        """Ends `run`.  The slice stays for a successor; the kubelet removes it if none comes."""
        self._stopping = True
        self.wake()

    def _slice(self, spec: dict[str, Any]) -> dict[str, Any]:
        metadata = {"name": self._name, "ownerReferences": [self._owner]}
        return {"apiVersion": API, "kind": "ResourceSlice", "metadata": metadata, "spec": spec}

    def _report(self, failure: str) -> None:
        if failure and failure != self._failure:
            log.warning("the node's slice cannot be published and watched: %s", failure)
        elif self._failure and not failure:
            log.info("the API server answers again")
        self._failure = failure
