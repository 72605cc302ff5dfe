"""`nvshare-dra`: the command line of the DRA driver.

Invariants: every option has an environment variable, NVSHARE_ and its name.  An invalid option stops the start with a
message that names it, and so does a cluster that cannot do what the driver needs.  SIGTERM ends the driver; prepared
claims keep their slots, and running containers their library.

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
from nvshare.coordinator.kubernetes.cluster.options import Containers, OptionError, duration_ns, log_to_stderr
from nvshare.coordinator.kubernetes.dra.publisher import ClusterError
from nvshare.coordinator.system.runtime_dir import SYSTEM_DIRECTORY
from nvshare.coordinator.system.version import VersionOption

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(
    help="Kubernetes DRA driver gpu.nvshare.com: publishes GPUs whose memory and time claims share, and makes slots of "
    "claims.",
)
def run(
    node_name: Annotated[
        str, typer.Option(envvar=["NVSHARE_NODE_NAME", "NODE_NAME"], help="name of this node", show_default=False)
    ] = "",
    kubelet_dir: Annotated[Path, place("KUBELET_DIR", "the kubelet's --root-dir")] = Path("/var/lib/kubelet"),
    cdi_dir: command.CdiDir = Path("/var/run/cdi"),
    library_dir: command.LibraryDir = Path("/var/lib/nvshare/lib"),
    slots_dir: command.SlotsDir = Path("/run/nvshare/slots"),
    runtime_dir: command.RuntimeDirectory = SYSTEM_DIRECTORY,
    slots_per_gpu: Annotated[
        int, given("SLOTS_PER_GPU", "a claim that names no memory gets one of so many parts of a GPU's", least=1)
    ] = 4,
    memory: command.MemoryMode = "auto",
    on_loss: command.LossAction = "run",
    loss_timeout: command.LossTimeout = "5m",
    coordinator_grace: Annotated[
        str, given("COORDINATOR_GRACE", "time without a coordinator after which GPUs are unhealthy")
    ] = "30s",
    cdi_kind: command.CdiKind = "",
    memory_boundary: command.MemoryBoundary = "off",
    processes: command.Processes = 1,
    ignored_xids: command.IgnoredXids = None,
    log_level: command.LogLevel = "info",
    version: VersionOption = False,
) -> None:
    """The command line as Typer reads it."""
    log_to_stderr("nvshare-dra", log_level)
    if not node_name:
        raise OptionError("--node-name: needed, or NODE_NAME (spec.nodeName by the downward API)")
    timeout_ns = duration_ns("--loss-timeout", loss_timeout) if loss_timeout else None
    grace_ns = duration_ns("--coordinator-grace", coordinator_grace)
    with command.kubernetes_extra():
        from nvshare.coordinator.kubernetes.dra.plugin_process import Node, serve
    containers = Containers(
        slots_dir, library_dir, cdi_dir, memory, on_loss, timeout_ns, cdi_kind, memory_boundary, processes
    )
    serve(containers, Node(node_name, kubelet_dir, runtime_dir, grace_ns, slots_per_gpu, ignored_xids or ()))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    command.end(app, argv, "nvshare-dra", {NotInClusterError: "", ClusterError: ""})


if __name__ == "__main__":
    main()
