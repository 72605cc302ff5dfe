"""What a picture of the core looks like on the control socket."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgpack

from coordinator import events
from coordinator.administration import plain
from coordinator.scheduler import Scheduler
from coordinator.snapshot import Snapshot
from coordinator.wire import MemoryMode
from scheduler_policies import registry

GPU = "GPU-00000000-0000-0000-0000-000000000000"


def picture() -> Snapshot:
    scheduler = Scheduler(registry.create)
    scheduler.handle(events.GpuAdded(GPU, "card", 8 << 30, 6 << 30), 1)
    scheduler.handle(events.ClientRegistered(1, "a", "b", 7, 0, 3, MemoryMode.SWAP, 0), 2)
    scheduler.handle(events.GpuAttached(1, 0, GPU, 0, True), 3)
    return scheduler.snapshot(4)


def test_every_value_arrives_in_msgpack_and_json() -> None:
    """Broken if a new field of a picture could not be sent, or an enumeration came as a number."""
    snapshot = picture()
    records: list[Any] = [*snapshot.gpus, *snapshot.clients]
    for record in records:
        values = plain(record)
        assert set(values) == {field.name for field in dataclasses.fields(record)}
        assert msgpack.unpackb(msgpack.packb(values)) == json.loads(json.dumps(values))
    gpu, client = plain(snapshot.gpus[0]), plain(snapshot.clients[0])
    assert gpu["sharing"] == "exclusive"
    assert client["memory_mode"] == "swap"
    assert client["seats"][0]["phase"] == "holding"
