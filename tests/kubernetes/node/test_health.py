# ruff: noqa: N801, N815, N818 - NVML's names
"""XID errors: which make a GPU's slots unhealthy, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nvshare.coordinator.kubernetes.node.health import XidWatch

WHOLE = 0xFFFFFFFF


class Nvml:
    """NVML's event calls: two cards, the second divided into the instances 1 and 2."""

    class NVMLError(Exception):
        pass

    class NVMLError_Timeout(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int, int]] = []
        self.registered: list[str] = []
        self.broken = False
        self.initialised = 0

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlEventSetCreate(self) -> object:
        if self.broken:
            raise self.NVMLError("no events here")
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return int(handle[-1])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "GPU-b"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None:
        assert kinds == 8
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Any:
        assert milliseconds == 0
        if self.broken:
            raise self.NVMLError("lost")
        if not self.waiting:
            raise self.NVMLError_Timeout
        device, xid, instance = self.waiting.pop(0)
        return SimpleNamespace(device=device, eventData=xid, gpuInstanceId=instance)


DEVICES = ("GPU-a", "MIG-1", "MIG-2")


def test_critical_errors_stay_and_those_of_programs_do_not_count() -> None:
    """Broken: pods land on a card that fell off the bus, or one program's bad pointer takes a card from all."""
    nvml, watch = Nvml(), XidWatch([94])
    assert watch.look(nvml, DEVICES) == {}
    assert nvml.registered.count("GPU-b") == 1
    nvml.waiting = [("GPU-a", xid, WHOLE) for xid in (13, 31, 43, 45, 68, 109, 94)]
    assert watch.look(nvml, DEVICES) == {}
    nvml.waiting = [("GPU-a", 79, WHOLE)]
    assert list(watch.look(nvml, DEVICES)) == ["GPU-a"]
    assert "XID 79" in watch.look(nvml, DEVICES)["GPU-a"]


def test_an_instance_s_error_is_its_own() -> None:
    """Broken: a fault inside one MIG instance takes the others of its card."""
    nvml, watch = Nvml(), XidWatch()
    watch.look(nvml, DEVICES)
    nvml.waiting = [("GPU-b", 63, 2)]
    assert list(watch.look(nvml, DEVICES)) == ["MIG-2"]
    nvml.waiting = [("GPU-b", 48, WHOLE)]
    assert set(watch.look(nvml, DEVICES)) == {"MIG-1", "MIG-2"}


def test_a_driver_without_events_is_no_error() -> None:
    """Broken: an old driver makes every GPU unhealthy, or each look keeps NVML open once more."""
    nvml, watch = Nvml(), XidWatch()
    nvml.broken = True
    for _ in range(3):
        assert watch.look(nvml, DEVICES) == {}
        assert nvml.initialised == 0
    nvml.broken = False
    watch.look(nvml, DEVICES)
    nvml.waiting = [("GPU-a", 79, WHOLE)]
    assert list(watch.look(nvml, DEVICES)) == ["GPU-a"]
