"""`nvshare-device-plugin`: the command line of the device plugin.

Invariants: every option has an environment variable, NVSHARE_ and its name.  An invalid option stops the start with a
message that names it.  SIGTERM ends the plugin; running containers keep their slots and their library.

Non-goals: the process (plugin_process.py) and its imports such as gRPC: `--help` works without them.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nvshare.coordinator.kubernetes.cluster.api import NotInClusterError
from nvshare.coordinator.kubernetes.cluster.options import (
    OptionError,
    Options,
    Paths,
    duration_ns,
    log_to_stderr,
    preference,
    read_rules,
)
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.boundary import Mode
from nvshare.coordinator.system.extras import install_command
from nvshare.coordinator.system.runtime_dir import SYSTEM_DIRECTORY
from nvshare.coordinator.system.version import Versioned, run_command

_GRPC = ("grpc", "google")

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _given(variable: str, text: str, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, envvar="NVSHARE_" + variable, help=text, min=least)


SlotsPerGpu = Annotated[int, _given("SLOTS_PER_GPU", "number of containers that may share one GPU")]
Resource = Annotated[str, _given("RESOURCE", "resource name of the slots")]
PluginDir = Annotated[Path, _given("PLUGIN_DIR", "the kubelet's directory for plugin sockets")]
PodResources = Annotated[Path, _given("POD_RESOURCES_SOCKET", "the kubelet's PodResources socket")]
LibraryDir = Annotated[Path, _given("LIBRARY_DIR", "directory of the installed hook libraries on the host")]
SlotsDir = Annotated[Path, _given("SLOTS_DIR", "directory of slots on the host")]
RuntimeDirectory = Annotated[Path, _given("RUNTIME_DIR", "runtime directory of the node's coordinator")]
Several = Annotated[
    bool, _given("ALLOW_SEVERAL_SLOTS", "allow one container several slots of the same GPU", "--allow-several-slots")
]
Preferred = Annotated[str, _given("PREFERRED", "order of allocation: spread over the GPUs, or pack")]
MemoryMode = Annotated[str, _given("MEMORY", "memory mode of containers: auto, swap, managed, device")]
OnLoss = Annotated[str, _given("ON_LOSS", "behaviour of containers without a coordinator: wait, or run")]
LossTimeout = Annotated[str | None, _given("LOSS_TIMEOUT", "with --on-loss=run: time before they run, such as 5m")]
Grace = Annotated[str, _given("COORDINATOR_GRACE", "time without a coordinator after which slots are unhealthy")]
CdiKind = Annotated[
    str, _given("CDI_KIND", "also name CDI devices of this kind, such as nvidia.com/gpu, for container runtimes")
]
MemoryBoundary = Annotated[
    Mode, _given("MEMORY_BOUNDARY", "have the driver hold memory limits too, by CDI; auto: if it is r615 or newer")
]
Processes = Annotated[
    int, _given("PROCESSES", "with --memory-boundary: processes of a container, 512 MiB for each context", least=1)
]
CdiDir = Annotated[Path, _given("CDI_DIR", "with --memory-boundary: directory of the container runtime's CDI files")]
IgnoredXids = Annotated[
    list[int] | None, _given("IGNORED_XIDS", "an XID error that leaves a GPU healthy; repeatable", "--ignored-xid")
]
WatchPods = Annotated[bool, _given("WATCH_PODS", "apply the annotations of this node's pods", "--watch-pods")]
NodeName = Annotated[
    str | None, typer.Option(envvar=["NVSHARE_NODE_NAME", "NODE_NAME"], help="with --watch-pods: name of this node")
]
PriorityClasses = Annotated[
    Path | None, _given("PRIORITY_CLASSES", "JSON file: settings of the cluster's priority classes")
]
PriorityRange = Annotated[str, _given("PRIORITY_RANGE", "MIN:MAX allowed in the priority annotation")]
MetricsPort = Annotated[int | None, _given("METRICS_PORT", "port for Prometheus metrics; 0: any free port")]
MetricsAddress = Annotated[str, _given("METRICS_ADDRESS", "address for Prometheus metrics")]
MetricsTls = Annotated[Path | None, _given("METRICS_TLS_DIR", "directory with tls.crt and tls.key for the metrics")]
LogLevel = Annotated[str, _given("LOG_LEVEL", "debug, info, warning, error")]


@app.command(
    cls=Versioned, help="Kubernetes device plugin: offers several slots of each GPU and loads the hook into containers."
)
def run(
    slots_per_gpu: SlotsPerGpu = 4,
    resource: Resource = "nvshare.com/gpu",
    plugin_dir: PluginDir = Path("/var/lib/kubelet/device-plugins"),
    pod_resources_socket: PodResources = Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
    library_dir: LibraryDir = Path("/var/lib/nvshare/lib"),
    slots_dir: SlotsDir = Path("/run/nvshare/slots"),
    runtime_dir: RuntimeDirectory = SYSTEM_DIRECTORY,
    allow_several_slots: Several = False,
    preferred: Preferred = "spread",
    memory: MemoryMode = "auto",
    on_loss: OnLoss = "run",
    loss_timeout: LossTimeout = "5m",
    coordinator_grace: Grace = "30s",
    cdi_kind: CdiKind = "",
    memory_boundary: MemoryBoundary = "off",
    processes: Processes = 1,
    cdi_dir: CdiDir = Path("/var/run/cdi"),
    ignored_xids: IgnoredXids = None,
    watch_pods: WatchPods = False,
    node_name: NodeName = None,
    priority_classes: PriorityClasses = None,
    priority_range: PriorityRange = "-1000:1000",
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = "0.0.0.0",
    metrics_tls_dir: MetricsTls = None,
    log_level: LogLevel = "info",
) -> None:
    """The command line as Typer reads it."""
    log_to_stderr("nvshare-device-plugin", log_level)
    paths = (plugin_dir, pod_resources_socket, library_dir, slots_dir, runtime_dir, cdi_dir)
    options = Options(
        Paths(*(path.absolute() for path in paths)),
        slots_per_gpu=slots_per_gpu,
        resource=resource,
        allow_several_slots=allow_several_slots,
        preference=preference(preferred),
        memory=memory,
        on_loss=on_loss,
        loss_timeout_ns=duration_ns("--loss-timeout", loss_timeout) if loss_timeout else None,
        coordinator_grace_ns=duration_ns("--coordinator-grace", coordinator_grace),
        cdi_kind=cdi_kind,
        memory_boundary=memory_boundary,
        processes=processes,
    )
    if watch_pods and not node_name:
        raise OptionError("--watch-pods: needs --node-name or NODE_NAME (spec.nodeName by the downward API)")
    rules = read_rules(resource, priority_range, priority_classes)
    try:
        from nvshare.coordinator.kubernetes.node.plugin_process import Extras, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _GRPC:
            raise
        raise OptionError(f"{error.name} is not installed; install it: {install_command('kubernetes')}") from None
    watched = node_name if watch_pods else None
    serve(options, Extras(metrics_address, metrics_port, metrics_tls_dir, watched, rules, tuple(ignored_xids or ())))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.  Exit codes: 0 stopped, 1 failed, 2 wrong command line."""
    code = 0
    try:
        code = run_command(app, list(sys.argv[1:] if argv is None else argv), "nvshare-device-plugin") or 0
    except OptionError as error:
        code = _report(str(error), 2)
    except slots.SlotError as error:
        code = _report(f"--slots-dir: {error}", 1)
    except NotInClusterError as error:
        code = _report(f"--watch-pods: {error}", 1)
    except OSError as error:
        code = _report(f"{error.filename or 'system'}: {error.strerror}", 1)
    raise SystemExit(code)


def _report(text: str, code: int) -> int:
    sys.stderr.write(f"nvshare-device-plugin: {text}\n")
    return code


if __name__ == "__main__":
    main()
