"""The DRA driver's process: its parts, started and stopped together.

Claims are served only after the cluster was found to suffice.

Non-goals: the command line (plugin_main.py).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess
from nvshare.coordinator.kubernetes.cluster.options import Containers
from nvshare.coordinator.kubernetes.dra import slices
from nvshare.coordinator.kubernetes.dra.driver import Driver
from nvshare.coordinator.kubernetes.dra.publisher import API, Publisher
from nvshare.coordinator.kubernetes.dra.service import Service
from nvshare.coordinator.kubernetes.node.health import Monitor, NvmlProbe
from nvshare.coordinator.system.runtime_dir import RuntimeDir

log: Final = logging.getLogger("nvshare.dra")


@dataclass(frozen=True, slots=True)
class Node:
    """The node, and what it offers."""

    name: str
    kubelet_dir: Path
    runtime_dir: Path
    coordinator_grace_ns: int = 30_000_000_000
    slots_per_gpu: int = 4
    ignored_xids: Sequence[int] = ()


def serve(containers: Containers, node: Node) -> None:
    """Serves until a signal.  Raises the errors of parts that cannot start."""
    api = ApiAccess.from_cluster()

    def claim(namespace: str, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = api.call("GET", f"/apis/{API}/namespaces/{namespace}/resourceclaims/{name}")
        return found

    coordinator = RuntimeDir(node.runtime_dir)
    monitor = Monitor(NvmlProbe(node.ignored_xids), coordinator.answers, node.coordinator_grace_ns)
    publisher = Publisher(api, node.name, lambda: monitor.state, node.slots_per_gpu)
    service = Service(Driver(containers, lambda: slices.uuids(monitor.state)), claim, node.kubelet_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: publisher.stop())
    monitor.listen(publisher.wake)
    publisher.run(publisher.check, once=True)
    monitor.start()
    try:
        service.start()
        publisher.run(publisher.follow)
    finally:
        service.stop()
        monitor.stop()
    log.info("stopped; prepared claims keep their slots")
