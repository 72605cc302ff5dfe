"""Health of the node's GPUs and MIG instances, and of the coordinator.

Invariants: a GPU stays listed for as long as the plugin runs, unhealthy while it is lost, so that its device ids keep
their meaning.  A coordinator that is away for less than the grace time (an upgrade) changes nothing.

Non-goals: gRPC.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from nvshare.coordinator.system.devices import Device, NoGpuError, discover, nvml

log: Final = logging.getLogger("nvshare.plugin")

PERIOD_S: Final = 5.0
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of programs, after which the GPU is well."""
MAX_EVENTS: Final = 1000
"""Read at one time."""


class Probe(Protocol):
    """The monitor's view of the driver: NVML, or a test's double."""

    def devices(self) -> list[Device]:
        """GPUs and MIG instances that can be scheduled now.  Raises NoGpuError."""

    def problems(self, uuids: Sequence[str]) -> dict[str, str]:
        """UUID -> why this GPU cannot be used; healthy GPUs are absent."""


class NvmlProbe:
    """The node's driver, by NVML."""

    def __init__(self, ignored_xids: Iterable[int] = ()) -> None:
        self._xids = XidWatch(ignored_xids)

    def devices(self) -> list[Device]:
        return discover()

    def problems(self, uuids: Sequence[str]) -> dict[str, str]:
        import pynvml

        found: dict[str, str] = {}
        try:
            with nvml():
                for uuid in uuids:
                    try:
                        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
                    except pynvml.NVMLError as error:
                        found[uuid] = str(error)
                return self._xids.look(pynvml, uuids) | found
        except pynvml.NVMLError as error:
            return dict.fromkeys(uuids, f"the NVIDIA driver cannot be used: {error}")


class XidWatch:
    """Critical XID errors of the driver.  A GPU keeps its error until the plugin restarts: only a reset mends it.

    A driver that reports no XID errors leaves all GPUs without one.
    """

    def __init__(self, ignored: Iterable[int] = ()) -> None:
        self._ignored = APPLICATION_XIDS | set(ignored)
        self._set: Any = None
        self._instances: dict[str, dict[str, int | None]] = {}
        """Card -> its devices, each with its GPU instance; None: the whole card."""
        self._errors: dict[str, str] = {}

    def look(self, pynvml: Any, uuids: Sequence[str]) -> dict[str, str]:
        """UUID -> its error.  NVML is initialised."""
        try:
            if self._set is None:
                pynvml.nvmlInit()  # the set lives as long as NVML is initialised
                self._set = pynvml.nvmlEventSetCreate()
            for uuid in set(uuids).difference(*self._instances.values()):
                self._register(pynvml, uuid)
            for _ in range(MAX_EVENTS):
                self._note(pynvml, pynvml.nvmlEventSetWait_v2(self._set, 0))
        except pynvml.NVMLError_Timeout:
            pass
        except pynvml.NVMLError as error:
            log.debug("no XID errors from the driver: %s", error)
            self._forget(pynvml)
        return {uuid: text for uuid, text in self._errors.items() if uuid in uuids}

    def _register(self, pynvml: Any, uuid: str) -> None:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        instance: int | None = None
        if uuid.startswith("MIG-"):
            instance = pynvml.nvmlDeviceGetGpuInstanceId(handle)
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        card = pynvml.nvmlDeviceGetUUID(handle)
        if card not in self._instances:
            with contextlib.suppress(pynvml.NVMLError_NotSupported):
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        self._instances.setdefault(card, {})[uuid] = instance

    def _note(self, pynvml: Any, event: Any) -> None:
        if event.eventData in self._ignored:
            return
        devices = self._instances.get(pynvml.nvmlDeviceGetUUID(event.device), {})
        hit = [uuid for uuid, instance in devices.items() if instance == event.gpuInstanceId]
        for uuid in hit or devices:
            self._errors[uuid] = f"XID {event.eventData}; after a reset of the GPU restart the device plugin"

    def _forget(self, pynvml: Any) -> None:
        self._instances.clear()
        if self._set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._set)
            self._set = None
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class State:
    """GPUs and their problems at one time.  `problems`: (UUID, text) of unhealthy GPUs."""

    devices: tuple[Device, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    coordinator_away: bool = False

    def health(self) -> dict[str, bool]:
        """UUID -> whether its slots may be allocated."""
        unhealthy = dict(self.problems)
        return {device.uuid: device.uuid not in unhealthy and not self.coordinator_away for device in self.devices}


class Monitor:
    """Checks every few seconds and calls its listeners after a change."""

    def __init__(self, probe: Probe, coordinator_answers: Callable[[], bool], grace_ns: int) -> None:
        self._probe = probe
        self._coordinator_answers = coordinator_answers
        self._grace_ns = grace_ns
        self._answered_ns = time.monotonic_ns()
        self._listeners: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self.state = State()
        self.coordinator_up = False

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a listener, which the monitor's thread calls after each change."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Checks once, then in the background."""
        self.check(time.monotonic_ns())
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self, now_ns: int) -> None:
        """Checks the coordinator and all GPUs once."""
        self.coordinator_up = self._coordinator_answers()
        if self.coordinator_up:
            self._answered_ns = now_ns
        away = now_ns - self._answered_ns > self._grace_ns
        devices = {device.uuid: device for device in self.state.devices}
        try:
            devices.update({device.uuid: device for device in self._probe.devices()})
        except NoGpuError as error:
            if not devices:
                log.warning("%s", error)
        problems = self._probe.problems(list(devices))
        fresh = State(tuple(devices.values()), tuple(sorted(problems.items())), away)
        if fresh == self.state:
            return
        self._log_changes(self.state, fresh)
        self.state = fresh
        for listener in self._listeners:
            listener()

    def _log_changes(self, before: State, after: State) -> None:
        known = {device.uuid for device in before.devices}
        for device in after.devices:
            if device.uuid not in known:
                log.info("GPU %s: %s%s", device.uuid, device.name, " (MIG)" if device.is_mig else "")
        old, new = dict(before.problems), dict(after.problems)
        for uuid in new.keys() - old.keys():
            log.warning("GPU %s is not healthy: %s", uuid, new[uuid])
        for uuid in old.keys() - new.keys():
            log.info("GPU %s is healthy again", uuid)
        if after.coordinator_away != before.coordinator_away:
            if after.coordinator_away:
                log.warning("no coordinator answers: all slots are unhealthy")
            else:
                log.info("the coordinator answers again")

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.check(time.monotonic_ns())
