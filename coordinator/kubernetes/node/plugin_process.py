"""The device plugin's process: its parts, started and stopped together.

Non-goals: the command line (plugin_main.py), the kubelet's calls (resources.py, allocation.py).
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.annotations import Rules
from nvshare.coordinator.kubernetes.cluster.options import OptionError, Options, socket_name
from nvshare.coordinator.kubernetes.cluster.pods import PodWatch
from nvshare.coordinator.kubernetes.node import library
from nvshare.coordinator.kubernetes.node.allocation import SlotStore
from nvshare.coordinator.kubernetes.node.health import Monitor, NvmlProbe, Probe
from nvshare.coordinator.kubernetes.node.plugin import PluginServer
from nvshare.coordinator.kubernetes.node.plugin_metrics import Collector, Facts, KubeletCounts
from nvshare.coordinator.kubernetes.node.registration import Registrar
from nvshare.coordinator.kubernetes.node.resources import SlotResource
from nvshare.coordinator.kubernetes.node.tenancy import Tenancy, list_tenants
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.system.http.metrics import AccessError, MetricsServer
from nvshare.coordinator.system.runtime_dir import RuntimeDir

log: Final = logging.getLogger("nvshare.plugin")


@dataclass(frozen=True, slots=True)
class Extras:
    """Options of the process alone: metrics and the watch of pods."""

    metrics_address: str = "0.0.0.0"
    metrics_port: int | None = None
    metrics_tls_dir: Path | None = None
    watched_node: str | None = None
    """The node whose pods to watch; None: no watch."""
    rules: Rules = field(default_factory=Rules)
    ignored_xids: tuple[int, ...] = ()


class Plugin:
    """One device plugin with all its parts."""

    def __init__(self, options: Options, probe: Probe, watch: PodWatch | None = None) -> None:
        """Prepares the slots' directory.  Raises SlotError."""
        slots.prepare(options.containers.slots_dir)
        self.options = options
        self._watch = watch
        self.store = SlotStore(options.containers.slots_dir)
        self.counts = KubeletCounts()
        coordinator = RuntimeDir(options.runtime_dir)
        self.monitor = Monitor(probe, coordinator.answers, options.coordinator_grace_ns)
        self.tenancy = Tenancy(self.store, self._tenants, policies=watch)
        self._resource = SlotResource(options, lambda: self.monitor.state, self.store, self.tenancy)
        server = PluginServer(self._resource, options.plugin_dir / socket_name(options.resource), self.counts.allocated)
        self._ended = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._registrar = Registrar(options.plugin_dir, server, self._wake_read, self.counts.registered)
        self.monitor.listen(server.changed)

    def run(self) -> None:
        """Serves until `stop`."""
        self.monitor.start()
        try:
            self.tenancy.start()
            self._registrar.run()
        finally:
            self._ended = True
            self.tenancy.stop()
            self.monitor.stop()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def stop(self) -> None:
        """Ends `run`.  Callable from any thread and from signal handlers, also after the end."""
        if not self._ended:
            os.write(self._wake_write, b"\0")

    def facts(self) -> Facts:
        """The values of one scrape."""
        found = self.store.all().values()
        health = [healthy for _, healthy in self._resource.devices()]
        devices = [(self._resource.name, sum(health), len(health) - sum(health))]
        return Facts(
            devices=devices,
            connected=self._registrar.connected,
            coordinator_up=self.monitor.coordinator_up,
            library=library.current(self.options.containers.library_dir),
            slots=len(found),
            slots_without_pod=sum(slot.pod is None for slot in found),
            pod_resources_failures=self.tenancy.failures,
            watch=self._watch.counts if self._watch is not None else None,
        )

    def _tenants(self) -> Any:
        return list_tenants(self.options.pod_resources_socket, self.options.resource)


def serve(options: Options, extras: Extras) -> None:
    """Serves until a signal.  Raises the errors of parts that cannot start."""
    watch: PodWatch | None = None
    if extras.watched_node is not None:
        watch = PodWatch(node_name=extras.watched_node, changed=lambda: plugin.tenancy.wake(), rules=extras.rules)
    plugin = Plugin(options, NvmlProbe(extras.ignored_xids), watch)
    metrics = None
    if extras.metrics_port is not None:
        collector = Collector(plugin.counts, plugin.facts)
        try:
            metrics = MetricsServer(extras.metrics_address, extras.metrics_port, collector, extras.metrics_tls_dir)
        except AccessError as error:
            raise OptionError(f"--metrics-address, --metrics-tls-dir: {error}") from None
        except OSError as error:
            where = f"{extras.metrics_address}:{extras.metrics_port}"
            raise OptionError(f"--metrics-port: {where}: {error.strerror}; choose another") from None
        log.info("metrics on port %d", metrics.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: plugin.stop())
    try:
        if watch is not None:
            watch.start()
        plugin.run()
    finally:
        if watch is not None:
            watch.stop()
        if metrics is not None:
            metrics.close()
    log.info("stopped; running containers keep their slots")
