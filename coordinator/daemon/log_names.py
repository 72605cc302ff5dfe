"""Names GPUs in the log by their indices, as the tools do; the core knows their UUIDs alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from nvshare.coordinator.system.devices import Device


class GpuNames(logging.Filter):
    """Passes all lines."""

    def __init__(self, devices: Iterable[Device]) -> None:
        super().__init__()
        self._names = {device.uuid: f"GPU {device.index}" for device in devices}
        self._uuids = re.compile("|".join(map(re.escape, sorted(self._names, key=len, reverse=True))))

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._uuids.sub(lambda found: self._names[found[0]], record.getMessage()), ()
        return True
