"""Events of the cluster, which `kubectl describe pod` shows: a container runs without the hook, and why.

Invariants: a request of the runtime never waits for the API server: events wait in a bounded queue for a thread.  An
event is named after its container, so the API server keeps one for each, also over restarts of the plugin.  Without
API server or rights, one warning is logged.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from datetime import UTC, datetime
from http.client import CONFLICT, HTTPException
from typing import Any, Final
from urllib.parse import quote

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess, ApiError, NotInClusterError

log: Final = logging.getLogger("nvshare.nri")

MAX_WAITING: Final = 256
"""More are dropped: slots, metrics and `nvshare-ctl doctor` name these containers too."""


class PodEvents:
    """Warnings of pods."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MAX_WAITING)
        self._warned = False
        threading.Thread(target=self._run, name="pod-events", daemon=True).start()

    def tell(self, pod: Any, container: Any, why: str) -> None:
        """`container` of `pod`, as the runtime describes them, runs without the hook."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        named = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        event = {
            "apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": "WithoutHook",
            "metadata": {"namespace": pod.namespace, "name": f"{pod.name[:200].rstrip('-.')}.{container.id[:32]}"},
            "involvedObject": named | {"fieldPath": f"spec.containers{{{container.name}}}"},
            "message": f"Container {container.name} runs without the hook, out of turn and without a limit: {why:.800}",
            "source": {"component": "nvshare-nri"}, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        }  # fmt: skip
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/events", event))

    def _run(self) -> None:
        while True:
            path, event = self._waiting.get()
            try:
                ApiAccess.from_cluster().call("POST", path, event)
            except (ApiError, NotInClusterError, OSError, HTTPException, ValueError) as error:
                known = isinstance(error, ApiError) and error.code == CONFLICT
                if not known and not self._warned:
                    self._warned = True
                    log.warning("no events for pods without the hook: %s", error)
