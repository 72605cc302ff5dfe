"""Answers the container runtime: a container with a promised part of a GPU gets a slot and the hook.

A slot is named after pod and container, so a restarted container has the same one.  Its allocation names the container,
so the end of an earlier container ends no later one's slot, and a restarted plugin knows its slots.

Invariants:
- A request is answered from files of this node alone: the runtime cuts a plugin off after two seconds.
- A promise that cannot be held keeps its container from starting.  Any other failure lets it start without the hook.
- A container without the hook has an event, and a slot that says why, for `nvshare-ctl slots`, doctor and metrics.
  At each connection the runtime lists its containers, so this also holds for those that started while the plugin was
  away.

Non-goals: the socket (connection.py), the meaning of variables and annotations (marks.py).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from nvshare.client_hook.launcher import SYSTEM_PRELOAD
from nvshare.coordinator.kubernetes.cluster.annotations import Rules
from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.node.allocation import hook_environment, hook_mounts
from nvshare.coordinator.kubernetes.nri import marks
from nvshare.coordinator.kubernetes.nri import messages as m
from nvshare.coordinator.kubernetes.nri.connection import parsed
from nvshare.coordinator.kubernetes.nri.marks import MarkError, Promise
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import MAX_NAME_BYTES, PodRef, Slot, SlotError

log: Final = logging.getLogger("nvshare.nri")

_OURS: Final = "nri-"
"""Begins the allocation of a slot that this plugin has made."""
_EVENTS: Final = sum(1 << (event - 1) for event in (m.CREATE_CONTAINER, m.STOP_CONTAINER, m.REMOVE_CONTAINER))
AWAY: Final = "it started while nvshare-nri was away"
LOST: Final = "its slot was removed"
NO_LIBRARY: Final = "no hook library was installed on the node"
OTHER_PRELOAD: Final = f"the pod mounts another library at {SYSTEM_PRELOAD}"


class Plugin:
    """The runtime's calls; `answer` is for `connection.serve`."""

    def __init__(
        self, options: Containers, rules: Rules, tell: Callable[[Any, Any, str], None] = lambda *_: None
    ) -> None:
        """`tell`: pod, container, and why it has no hook; may not wait.  Prepares the slots' directory.

        Raises SlotError.
        """
        slots.prepare(options.slots_dir)
        self._options = options
        self._rules = rules
        self._tell = tell
        self.configured = False
        self._pods: dict[str, Any] = {}
        """By id, of the runtime's list so far."""
        self._listed: dict[str, Any] = {}
        """Containers, likewise."""
        self._calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "Configure": (m.ConfigureRequest, self._configure),
            "Synchronize": (m.SynchronizeRequest, self._synchronize),
            "CreateContainer": (m.CreateContainerRequest, self._create),
            "StopContainer": (m.StopContainerRequest, self._stop),
            "StateChange": (m.StateChangeEvent, self._changed),
            "Shutdown": (m.Empty, lambda _: m.Empty()),
        }

    def answer(self, method: str, payload: bytes) -> tuple[bytes, int, str]:
        """Payload, status code and message.  Raises RemoteProtocolError."""
        if method not in self._calls:
            return b"", m.UNIMPLEMENTED, f"nvshare does not serve {method}"
        kind, call = self._calls[method]
        request = parsed(kind, payload)
        try:
            return call(request).SerializeToString(), 0, ""
        except MarkError as error:
            return b"", m.UNKNOWN, f"nvshare: {error}"
        except Exception:
            log.exception("%s: answered without a change", method)
            return b"", 0, ""

    def _configure(self, request: Any) -> Any:
        log.info("connected to %s %s", request.runtime_name, request.runtime_version)
        self.configured = True
        self._listed, self._pods = {}, {}
        return m.ConfigureResponse(events=_EVENTS)

    # --- containers ---------------------------------------------------------------------------------------------------

    def _create(self, request: Any) -> Any:
        pod, container = request.pod, request.container
        answer = m.CreateContainerResponse()
        promise = self._promise(pod, container)
        if promise is None:
            return answer
        for finding in promise.ignored:
            log.warning("%s: %s", _named(pod, container), finding.text)
        installed = library.current(self._options.library_dir)
        destinations = {mount.destination for mount in container.mounts}
        missing = OTHER_PRELOAD if SYSTEM_PRELOAD in destinations else "" if installed else NO_LIBRARY
        try:
            slot = self._write(promise, pod, container, installed or "", missing)
        except (OSError, SlotError, ValidationError) as error:
            self._without_hook(pod, container, f"it has no slot: {error}")
            return answer
        if not missing:
            self._adjust(answer.adjust, slot, destinations, _environment(container))
        return answer

    def _adjust(self, adjust: Any, slot: Slot, destinations: set[str], environment: dict[str, str]) -> None:
        """The pod's own variables and mounts of these names are removed first."""
        options = self._options
        for mount in hook_mounts(options.slots_dir / slot.slot, options.library_dir / slot.library):
            if mount.container_path in destinations:
                adjust.mounts.add(destination=f"-{mount.container_path}")
            adjust.mounts.add(
                source=str(mount.host_path), destination=mount.container_path, type="bind", options=["rbind", "ro"]
            )
        variables = hook_environment(options)
        variables |= boundary.environment(slot.limit_bytes, options.memory_boundary, options.processes)
        for name, value in variables.items():
            if name in environment:
                adjust.env.add(key=f"-{name}")
            adjust.env.add(key=name, value=value)

    def _stop(self, request: Any) -> Any:
        self._end(request.container.id)
        return m.Empty()  # as empty as StopContainerResponse

    def _changed(self, request: Any) -> Any:
        if request.event == m.REMOVE_CONTAINER:
            self._end(request.container.id)
        return m.Empty()

    def _end(self, container: str) -> None:
        for name, slot in slots.read_all(self._options.slots_dir).items():
            if slot.allocation == _OURS + container:
                slots.remove(self._options.slots_dir, name)

    # --- what was there before ----------------------------------------------------------------------------------------

    def _synchronize(self, request: Any) -> Any:
        """The list comes in parts, a container also before its pod."""
        self._pods |= {pod.id: pod for pod in request.pods}
        self._listed |= {each.id: each for each in request.containers if each.state != m.STOPPED}
        if not request.more:
            self._audit()
            self._listed, self._pods = {}, {}
        return m.SynchronizeResponse(more=request.more)

    def _audit(self) -> None:
        """Ends slots of containers that are gone; each that misses the hook or its slot has one that says so.

        A container may miss the hook in spite of its slot: the plugin's answer was late.
        """
        known = {slot.allocation: slot for slot in slots.read_all(self._options.slots_dir).values()}
        for allocation, slot in known.items():
            if allocation.startswith(_OURS) and allocation.removeprefix(_OURS) not in self._listed:
                slots.remove(self._options.slots_dir, slot.slot)
        for number, container in self._listed.items():
            pod, before = self._pods.get(container.pod_sandbox_id), known.get(_OURS + number)
            hooked = any(Path(mount.source).parent == self._options.slots_dir for mount in container.mounts)
            if pod is None or (before is not None and (hooked or before.hook_missing)):
                continue
            try:
                promise = self._promise(pod, container)
                if promise is not None:
                    self._write(promise, pod, container, "", LOST if hooked else AWAY)
            except (MarkError, OSError, SlotError, ValidationError) as error:
                self._without_hook(pod, container, str(error))

    # --- both ---------------------------------------------------------------------------------------------------------

    def _promise(self, pod: Any, container: Any) -> Promise | None:
        environment, annotations = _environment(container), dict(pod.annotations)
        return marks.read(environment, annotations, pod.namespace, container.name, self._rules)

    def _write(self, promise: Promise, pod: Any, container: Any, installed: str, missing: str) -> Slot:
        """Raises OSError, SlotError, ValidationError."""
        limits = [size for size in (promise.limit_bytes, int(promise.words.get("memory_limit", 0))) if size]
        slot = Slot(
            slot=slot_name(pod.uid, container.name),
            allocation=_OURS + container.id,
            allocated_at_s=time.time(),
            gpus=promise.gpus,
            device_ids=promise.gpus,
            library=installed,
            policy=promise.words | ({"memory_limit": str(min(limits))} if limits else {}),
            pod=PodRef(namespace=pod.namespace, name=pod.name, container=container.name),
            hook_missing=missing,
        )
        slots.write(self._options.slots_dir, slot)
        if missing:
            self._without_hook(pod, container, missing)
        else:
            log.info("slot %s: %s", slot.slot, _named(pod, container))
        return slot

    def _without_hook(self, pod: Any, container: Any, why: str) -> None:
        log.warning("%s runs without the hook: %s", _named(pod, container), why)
        self._tell(pod, container, why)


def slot_name(pod_uid: str, container: str) -> str:
    """The same for each start of the container; shortened by a digest."""
    name = f"{pod_uid}-{container}"
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_BYTES - len(digest) - 1]}-{digest}"


def _named(pod: Any, container: Any) -> str:
    return f"{pod.namespace}/{pod.name}/{container.name}"


def _environment(container: Any) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in container.env)}
