"""GPUs in the log."""

from __future__ import annotations

import logging

from nvshare.coordinator.daemon.log_names import GpuNames
from nvshare.coordinator.system.devices import Device


def test_the_log_names_gpus_as_the_tools_do() -> None:
    """Broken: an operator has to look up which GPU a line of the log is about."""
    names = GpuNames([Device(0, "GPU-a", "card", 1), Device(1, "GPU-ab", "card", 1)])
    record = logging.LogRecord("nvshare", logging.INFO, "", 0, "%s: 5%% of GPU-a, not of %s", ("GPU-ab", "GPU-x"), None)
    assert names.filter(record)
    assert record.getMessage() == "GPU 1: 5% of GPU 0, not of GPU-x"
