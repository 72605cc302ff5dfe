"""A read-only watch of this node's pods on the API server, for their annotations and priority classes.

The kubelet names the pod of a slot, but not its annotations.  So the plugin watches the node's pods.  A watch without
an earlier version begins with all pods.

Invariants:
- The watch writes nothing, requests only this node's pods, and keeps only pods that request a slot.
- Known pods stay known while the API server is away.  No failure stops the plugin: a failure is counted, logged when
  its text changes, and retried after a pause that doubles up to a bound.
- Events and the number of pods are bounded.

Non-goals: the meaning of annotations (kubernetes/cluster/annotations.py), slot files.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.annotations import Rules, findings, namespace_of, pod_asks_for, settings_of
from nvshare.coordinator.kubernetes.cluster.api import ApiAccess, ApiError, NotInClusterError, Stream

log = logging.getLogger("nvshare.pods")

MAX_PODS: Final = 4096
_PODS: Final = "/api/v1/pods"
BEGINNING: Final = "0"
"""The pods in the API server's cache, then what changes.  It may be older than what another server has told."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Pauses after a watch."""

    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


@dataclass(slots=True)
class WatchCounts:
    """Counters for metrics."""

    pods: int = 0
    """Known pods that request a slot; a gauge."""
    events: int = 0
    failures: int = 0
    bad_annotations: int = 0


class PodWatch:
    """The node's pods.  The watch's thread calls `changed` after each change."""

    def __init__(
        self,
        *,
        node_name: str,
        changed: Callable[[], None],
        rules: Rules | None = None,
        api: ApiAccess | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._node = node_name
        self._node_only = {"fieldSelector": f"spec.nodeName={node_name}"}
        self._changed = changed
        self._rules = rules or Rules()
        self._api = api
        self._timing = timing or Timing()
        self._pods: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.counts = WatchCounts()
        self._failure = ""
        self._stopping = threading.Event()
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self) -> None:
        """Starts the watch's thread, which retries every later failure.  Raises NotInClusterError."""
        if not self._node:
            raise NotInClusterError("the node's name is not known: give --node-name, or NODE_NAME from spec.nodeName")
        if self._api is None:
            self._api = ApiAccess.from_cluster()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; known pods stay known."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.end()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def policy(self, namespace: str, pod: str, container: str) -> dict[str, str] | None:
        """Settings of this container's slot; None for an unknown pod."""
        found = self._pods.get((namespace, pod))
        return None if found is None else settings_of(found, container, self._rules)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._timing.first_pause_s
        version = BEGINNING
        while not self._stopping.is_set():
            begun = time.monotonic()
            wanted_s = 0.0
            try:
                version = self._watch(version)
            except ApiError as error:
                if error.code == http.client.GONE:
                    version = BEGINNING
                else:
                    self._failed(error)
                    wanted_s = min(error.retry_after_s, self._timing.longest_pause_s)
            except Exception as error:  # network, server, malformed response: the plugin goes on
                self._failed(error)
                version = BEGINNING
            # A long watch was a success and resets the pause; a short one must not be retried at once.
            lasted = time.monotonic() - begun > self._timing.longest_pause_s
            pause = self._timing.first_pause_s if lasted else min(pause * 2, self._timing.longest_pause_s)
            self._stopping.wait(max(wanted_s, pause * random.uniform(0.5, 1.0)))

    def _watch(self, version: str) -> str:
        """Applies events until the server ends the watch; returns the version from which to continue."""
        query = self._node_only | {"allowWatchBookmarks": "true", "resourceVersion": version}
        begins = version == BEGINNING  # its first events are the pods that exist, in no order of versions
        unseen = set(self._pods) if begins else set()
        for event in self._next_stream().watch(_PODS, query):
            if event is None:
                self._report("")
                continue
            kind, pod = event["type"], event["object"]
            if kind == "BOOKMARK":  # all pods that exist have come
                gone, unseen, begins = unseen & self._pods.keys(), set(), False
                for key in gone:
                    del self._pods[key]
                if gone:
                    self._notify()
            else:
                unseen.discard(_key(pod))
                self._apply(pod, gone=kind == "DELETED")
            self.counts.pods = len(self._pods)
            if not begins:
                version = str(pod["metadata"]["resourceVersion"])
        return version

    def _apply(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        key = _key(pod)
        before, reduced = self._pods.get(key), None if gone else self._reduced(pod)
        self.counts.events += 1
        if reduced is None:
            self._pods.pop(key, None)
        elif before is not None or len(self._pods) < MAX_PODS:
            self._pods[key] = reduced
        if before != reduced:
            if reduced is not None:
                self._report_findings(reduced)
            self._notify()

    def _reduced(self, pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The fields that slots need; None for a pod that requests no slot."""
        if not pod_asks_for(pod, self._rules.resource):
            return None
        metadata, spec = pod["metadata"], pod["spec"]
        ours = {
            key: text for key, text in (metadata.get("annotations") or {}).items() if key.startswith("nvshare.com/")
        }
        lists = {
            kind: [{"name": entry.get("name")} for entry in spec.get(kind) or []]
            for kind in ("containers", "initContainers")
        }
        identity = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata.get("uid")}
        return {
            "metadata": {**identity, "annotations": ours},
            "spec": {**lists, "priorityClassName": spec.get("priorityClassName")},
        }

    def _report_findings(self, pod: Mapping[str, Any]) -> None:
        wrong = findings(pod, self._rules)
        self.counts.bad_annotations += len(wrong)
        for finding in wrong:
            log.warning("pod %s/%s: %s; it is ignored", *_key(pod), finding.text)

    def _notify(self) -> None:
        try:
            self._changed()
        except Exception:
            log.exception("internal error, please report it; the watch of pods goes on")

    def _failed(self, error: Exception) -> None:
        if not self._stopping.is_set():
            self.counts.failures += 1
            self._report(f"{type(error).__name__}: {error}")

    def _report(self, failure: str) -> None:
        """Logs a failure once, until its text changes."""
        if failure and failure != self._failure:
            log.warning("the watch of pod annotations is interrupted: %s", failure)
        elif self._failure and not failure:
            log.info("the watch of pod annotations is restored")
        self._failure = failure

    def _next_stream(self) -> Stream:
        assert self._api is not None
        self._stream = Stream(self._api)
        if self._stopping.is_set():
            self._stream.end()
        return self._stream


def _key(pod: Mapping[str, Any]) -> tuple[str, str]:
    return namespace_of(pod), str(pod["metadata"]["name"])
