"""Replies of `status`, as a coordinator gives them, from scripted programs on GPUs of 4 GiB."""

from __future__ import annotations

from typing import Any

from nvshare.coordinator.daemon.control.server import plain
from nvshare.coordinator.protocol.messages import MemoryMode
from nvshare.coordinator.system.sensors import CardSensors
from tests.harness import Harness, one_gpu

GIB = 1 << 30
LONG = "package.with_a_long_name.experiments.train_everything"


def three_programs() -> Harness:
    """One runs, two wait.  The last one is half evicted and has a long name and a long user number."""
    harness = one_gpu(4 * GIB)
    for name, user in (("train.py", 0), ("study.ipynb", 0), (LONG, 4_123_456_789)):
        client = harness.client(name=name, user_id=user, mode=MemoryMode.MANAGED, wanted=True)
        evicted = 600_000_000 if name == LONG else 0
        client.report(allocated=1_200_000_000, resident=1_200_000_000 - evicted, host=evicted)
    return harness


SLOT: dict[str, Any] = {
    "slot": "slot-0123456789abcdef",
    "namespace": "research",
    "pod": "trainer-7d9f8",
    "container": "main",
    "gpus": ["GPU-0"],
    "clients": 3,
    "priority": None,
    "weight": 100,
    "class": "best-effort",
    "share_request": None,
    "share_limit": 0.5,
    "gang": None,
    "allocated_bytes": GIB,
    "limit_bytes": 2 * GIB,
    "leases": 12_345,
    "used_ns": 10**12,
    "waited_ns": 0,
    "registered": True,
}


def status(harness: Harness) -> dict[str, Any]:
    """The reply of a coordinator at this time."""
    picture = harness.scheduler.snapshot(harness.clock.now_ns)
    gpus = []
    for index, gpu in enumerate(picture.gpus):
        values = plain(gpu)
        for name in ("handovers", "drains"):
            values[f"{name}_us"] = {"p50": 123.0, "p99": 456.0} if values.pop(f"recent_{name}_ns") else None
        gpus.append({"index": index, "is_mig": False, **values, "sensors": CardSensors().plain()})
    facts: dict[str, Any] = {"pid": 4242, "simulated": True, "runtime_dir": "/run/nvshare", "now_ns": picture.now_ns}
    host = {"host_budget_bytes": picture.host_budget_bytes, "host_shared_bytes": picture.host_shared_bytes}
    more: dict[str, Any] = {"problems": [], "live": [], "mps": {"mode": "off"}, "gangs": [], "host_owners": []}
    return {**facts, **host, "gpus": gpus, "clients": [plain(client) for client in picture.clients], **more}
