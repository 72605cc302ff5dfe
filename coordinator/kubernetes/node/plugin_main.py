"""`nvshare-device-plugin`: the command line of the device plugin.

Invariants: every option has an environment variable, NVSHARE_ and its name.  An invalid option stops the start with a
message that names it.  SIGTERM ends the plugin; running containers keep their slots and their library.

Non-goals: the process (plugin_process.py) and its imports such as gRPC: `--help` works without them.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nvshare.coordinator.kubernetes.cluster import command
from nvshare.coordinator.kubernetes.cluster.api import NotInClusterError
from nvshare.coordinator.kubernetes.cluster.command import given, place
from nvshare.coordinator.kubernetes.cluster.options import (
    Containers,
    OptionError,
    Options,
    duration_ns,
    log_to_stderr,
    read_rules,
)
from nvshare.coordinator.kubernetes.slots.device_ids import MAX_SLOTS_PER_GPU, Preference
from nvshare.coordinator.system.runtime_dir import SYSTEM_DIRECTORY
from nvshare.coordinator.system.version import VersionOption

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


SlotsPerGpu = Annotated[
    int, given("SLOTS_PER_GPU", "number of containers that may share one GPU", least=1, most=MAX_SLOTS_PER_GPU)
]
Resource = Annotated[str, given("RESOURCE", "resource name of the slots")]
PluginDir = Annotated[Path, place("PLUGIN_DIR", "the kubelet's directory for plugin sockets")]
PodResources = Annotated[Path, place("POD_RESOURCES_SOCKET", "the kubelet's PodResources socket")]
Several = Annotated[
    bool, given("ALLOW_SEVERAL_SLOTS", "allow one container several slots of the same GPU", "--allow-several-slots")
]
Preferred = Annotated[Preference, given("PREFERRED", "order of allocation: spread over the GPUs, or pack")]
Grace = Annotated[str, given("COORDINATOR_GRACE", "time without a coordinator after which slots are unhealthy")]
WatchPods = Annotated[bool, given("WATCH_PODS", "apply the annotations of this node's pods", "--watch-pods")]
NodeName = Annotated[
    str | None, typer.Option(envvar=["NVSHARE_NODE_NAME", "NODE_NAME"], help="with --watch-pods: name of this node")
]
PriorityClasses = Annotated[
    Path | None, given("PRIORITY_CLASSES", "JSON file: settings of the cluster's priority classes")
]
MetricsPort = Annotated[int | None, given("METRICS_PORT", "port for Prometheus metrics; 0: any free port")]
MetricsAddress = Annotated[str, given("METRICS_ADDRESS", "address for Prometheus metrics")]
MetricsTls = Annotated[Path | None, given("METRICS_TLS_DIR", "directory with tls.crt and tls.key for the metrics")]


@app.command(help="Kubernetes device plugin: offers several slots of each GPU and loads the hook into containers.")
def run(
    slots_per_gpu: SlotsPerGpu = 4,
    resource: Resource = "nvshare.com/gpu",
    plugin_dir: PluginDir = Path("/var/lib/kubelet/device-plugins"),
    pod_resources_socket: PodResources = Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
    library_dir: command.LibraryDir = Path("/var/lib/nvshare/lib"),
    slots_dir: command.SlotsDir = Path("/run/nvshare/slots"),
    runtime_dir: command.RuntimeDirectory = SYSTEM_DIRECTORY,
    allow_several_slots: Several = False,
    preferred: Preferred = "spread",
    memory: command.MemoryMode = "auto",
    on_loss: command.LossAction = "run",
    loss_timeout: command.LossTimeout = "5m",
    coordinator_grace: Grace = "30s",
    cdi_kind: command.CdiKind = "",
    memory_boundary: command.MemoryBoundary = "off",
    processes: command.Processes = 1,
    cdi_dir: command.CdiDir = Path("/var/run/cdi"),
    ignored_xids: command.IgnoredXids = None,
    watch_pods: WatchPods = False,
    node_name: NodeName = None,
    priority_classes: PriorityClasses = None,
    priority_range: command.PriorityRange = "-1000:1000",
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = "0.0.0.0",
    metrics_tls_dir: MetricsTls = None,
    log_level: command.LogLevel = "info",
    version: VersionOption = False,
) -> None:
    """The command line as Typer reads it."""
    log_to_stderr("nvshare-device-plugin", log_level)
    timeout_ns = duration_ns("--loss-timeout", loss_timeout) if loss_timeout else None
    options = Options(
        Containers(
            slots_dir, library_dir, cdi_dir, memory, on_loss, timeout_ns, cdi_kind, memory_boundary, processes
        ),
        plugin_dir,
        pod_resources_socket,
        runtime_dir,
        slots_per_gpu=slots_per_gpu,
        resource=resource,
        allow_several_slots=allow_several_slots,
        preference=preferred,
        coordinator_grace_ns=duration_ns("--coordinator-grace", coordinator_grace),
    )
    if watch_pods and not node_name:
        raise OptionError("--watch-pods: needs --node-name or NODE_NAME (spec.nodeName by the downward API)")
    rules = read_rules(resource, priority_range, priority_classes)
    with command.kubernetes_extra():
        from nvshare.coordinator.kubernetes.node.plugin_process import Extras, serve
    watched = node_name if watch_pods else None
    serve(options, Extras(metrics_address, metrics_port, metrics_tls_dir, watched, rules, tuple(ignored_xids or ())))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    command.end(app, argv, "nvshare-device-plugin", {NotInClusterError: "--watch-pods: "})


if __name__ == "__main__":
    main()
