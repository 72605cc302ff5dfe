"""`nvshare-dra`: the command line of the DRA driver.

Invariants: every option has an environment variable, NVSHARE_ and its name.  An invalid option stops the start with a
message that names it, and so does a cluster that cannot do what the driver needs.  SIGTERM ends the driver; prepared
claims keep their slots, and running containers their library.

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
    check_cdi_kind,
    check_hook,
    duration_ns,
    log_to_stderr,
)
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.boundary import Mode
from nvshare.coordinator.system.extras import install_command
from nvshare.coordinator.system.runtime_dir import SYSTEM_DIRECTORY
from nvshare.coordinator.system.version import Versioned, run_command

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _given(variable: str, text: str, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, envvar="NVSHARE_" + variable, help=text, min=least)


@app.command(
    cls=Versioned,
    help="Kubernetes DRA driver gpu.nvshare.com: publishes GPUs whose memory and time claims share, and makes slots of "
    "claims.",
)
def run(
    node_name: Annotated[
        str, typer.Option(envvar=["NVSHARE_NODE_NAME", "NODE_NAME"], help="name of this node", show_default=False)
    ] = "",
    kubelet_dir: Annotated[Path, _given("KUBELET_DIR", "the kubelet's --root-dir")] = Path("/var/lib/kubelet"),
    cdi_dir: Annotated[Path, _given("CDI_DIR", "directory of the container runtime's CDI files")] = Path(
        "/var/run/cdi"
    ),
    library_dir: Annotated[Path, _given("LIBRARY_DIR", "directory of the installed hook libraries on the host")] = Path(
        "/var/lib/nvshare/lib"
    ),
    slots_dir: Annotated[Path, _given("SLOTS_DIR", "directory of slots on the host")] = Path("/run/nvshare/slots"),
    runtime_dir: Annotated[
        Path, _given("RUNTIME_DIR", "runtime directory of the node's coordinator")
    ] = SYSTEM_DIRECTORY,
    slots_per_gpu: Annotated[
        int, _given("SLOTS_PER_GPU", "a claim that names no memory gets one of so many parts of a GPU's", least=1)
    ] = 4,
    memory: Annotated[str, _given("MEMORY", "memory mode of containers: auto, swap, managed, device")] = "auto",
    on_loss: Annotated[str, _given("ON_LOSS", "behaviour of containers without a coordinator: wait, or run")] = "run",
    loss_timeout: Annotated[
        str | None, _given("LOSS_TIMEOUT", "with --on-loss=run: time before they run, such as 5m")
    ] = "5m",
    coordinator_grace: Annotated[
        str, _given("COORDINATOR_GRACE", "time without a coordinator after which GPUs are unhealthy")
    ] = "30s",
    cdi_kind: Annotated[str, _given("CDI_KIND", "also name CDI devices of this kind, such as nvidia.com/gpu")] = "",
    memory_boundary: Annotated[
        Mode, _given("MEMORY_BOUNDARY", "have the driver hold memory limits too; auto: if it is r615 or newer")
    ] = "off",
    processes: Annotated[
        int, _given("PROCESSES", "with --memory-boundary: processes of a container, 512 MiB for each", least=1)
    ] = 1,
    ignored_xids: Annotated[
        list[int] | None, _given("IGNORED_XIDS", "an XID error that leaves a GPU healthy; repeatable", "--ignored-xid")
    ] = None,
    log_level: Annotated[str, _given("LOG_LEVEL", "debug, info, warning, error")] = "info",
) -> None:
    """The command line as Typer reads it."""
    log_to_stderr("nvshare-dra", log_level)
    check_hook(memory, on_loss)
    check_cdi_kind(cdi_kind)
    if not node_name:
        raise OptionError("--node-name: needed, or NODE_NAME (spec.nodeName by the downward API)")
    timeout_ns = duration_ns("--loss-timeout", loss_timeout) if loss_timeout else None
    grace_ns = duration_ns("--coordinator-grace", coordinator_grace)
    try:
        from nvshare.coordinator.kubernetes.dra.driver import Options
        from nvshare.coordinator.kubernetes.dra.plugin_process import Node, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("grpc", "google"):
            raise
        raise OptionError(f"{error.name} is not installed; install it: {install_command('kubernetes')}") from None
    options = Options(
        slots_dir.absolute(), library_dir.absolute(), cdi_dir.absolute(), memory, on_loss, timeout_ns, cdi_kind,
        memory_boundary, processes,
    )  # fmt: skip
    serve(options, Node(node_name, kubelet_dir.absolute(), runtime_dir, grace_ns, slots_per_gpu, ignored_xids or ()))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.  Exit codes: 0 stopped, 1 failed, 2 wrong command line."""
    from nvshare.coordinator.kubernetes.dra.publisher import ClusterError

    code, text = 0, ""
    try:
        code = run_command(app, list(sys.argv[1:] if argv is None else argv), "nvshare-dra") or 0
    except OptionError as error:
        code, text = 2, str(error)
    except slots.SlotError as error:
        code, text = 1, f"--slots-dir: {error}"
    except (NotInClusterError, ClusterError) as error:
        code, text = 1, str(error)
    except OSError as error:
        code, text = 1, f"{error.filename or 'system'}: {error.strerror}"
    if text:
        sys.stderr.write(f"nvshare-dra: {text}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
