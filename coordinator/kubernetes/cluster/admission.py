"""`nvshare-admission`: command line and process of the webhook for clusters without MutatingAdmissionPolicy.

Invariants: a wrong option stops the start with a message that names the option.  SIGTERM stops the server within a
bound: probes fail first, while reviews are still answered, so that the service's endpoints drop this server; then
connections end.

Non-goals: the meaning of reviews, HTTP.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.kubernetes.cluster.admission_metrics import Metrics
from nvshare.coordinator.kubernetes.cluster.admission_review import Settings
from nvshare.coordinator.kubernetes.cluster.admission_server import BoundedServer
from nvshare.coordinator.kubernetes.cluster.annotations import GPU_RESOURCE, HOOK_IN_CONTAINER
from nvshare.coordinator.kubernetes.cluster.options import (
    LEVELS,
    OptionError,
    duration_ns,
    log_to_stderr,
    read_rules,
)
from nvshare.coordinator.system.http.certificate import Certificate, CertificateError
from nvshare.coordinator.system.version import Versioned
from nvshare.coordinator.units import parse_duration_or_never

log = logging.getLogger("nvshare-admission")

_HELP: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)


@app.command(
    cls=Versioned, help="Admission webhook for pods: appends the hook to LD_PRELOAD and checks nvshare annotations."
)
def run(
    certificates: Annotated[
        Path,
        typer.Option("--certificate-dir", help="directory with tls.crt and tls.key"),
    ] = Path("/etc/nvshare/tls"),
    port: Annotated[int, typer.Option(min=0, max=65_535, help="port for reviews, over TLS; 0: any free port")] = 8443,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="port for /metrics and /healthz, without TLS; 0: any free port")
    ] = 9402,
    address: Annotated[str, typer.Option(help="address to listen on; default: all addresses")] = "",
    enforce: Annotated[
        bool, typer.Option("--enforce", help="refuse pods with invalid annotations; default: warn")
    ] = False,
    resource: Annotated[str, typer.Option(help="the slots' resource name")] = GPU_RESOURCE,
    priority_classes: Annotated[
        Path | None, typer.Option(help='JSON file: {"CLASS": 10} or {"CLASS": {"priority": 10, "weight": 2}}')
    ] = None,
    priority_range: Annotated[str, typer.Option(help="MIN:MAX allowed in the priority annotation")] = "-1000:1000",
    hook_path: Annotated[str, typer.Option(help="path of the hook in containers")] = HOOK_IN_CONTAINER,
    leave: Annotated[str, typer.Option(help="time to keep serving after SIGTERM")] = "3s",
    log_level: Annotated[str, typer.Option(help=", ".join(LEVELS))] = "info",
) -> None:
    """The command line as Typer reads it.  `main` prints the exceptions."""
    log_to_stderr("nvshare-admission", log_level)
    if not hook_path.startswith("/") or any(letter in hook_path for letter in " :"):
        raise OptionError(f"--hook-path: {hook_path!r}: write an absolute path without spaces and colons")
    leave_ns = duration_ns("--leave", leave, parse_duration_or_never)
    settings = Settings(read_rules(resource, priority_range, priority_classes), hook_path, enforce)
    metrics = Metrics()
    where = address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    try:
        option, chosen = "--certificate-dir", port
        certificate = Certificate(certificates, metrics.failed_reloads.inc)
        certificate.context()
        option = "--port"
        reviews = BoundedServer((where, port), settings, metrics, certificate=certificate)
        option, chosen = "--metrics-port", metrics_port
        probes = BoundedServer((where, metrics_port), settings, metrics)
    except CertificateError as error:
        raise OptionError(f"{option}: {error}") from None
    except OSError as error:
        raise OptionError(f"{option}: cannot listen on {where} port {chosen}: {error.strerror or error}") from None
    serve(reviews, probes, leave_ns)


def serve(reviews: BoundedServer, probes: BoundedServer, leave_ns: int) -> None:
    """Serves until SIGTERM or SIGINT; a second signal ends the wait at once.

    `sigwait` and no handler: a handler that sets an Event deadlocks when it interrupts that Event's `wait`.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start: they inherit the mask
    reviews.start()
    probes.start()
    log.info("reviews on port %d, metrics on port %d", reviews.port, probes.port)
    signal.sigwait(signals)
    log.info("leaving")
    reviews.leave()
    probes.leave()
    signal.sigtimedwait(signals, leave_ns / 1e9)
    reviews.close()
    probes.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.  Exit codes: 0 stopped, 2 could not start."""
    code = 0
    try:
        code = app(list(sys.argv[1:] if argv is None else argv), prog_name="nvshare-admission") or 0
    except OptionError as error:
        sys.stderr.write(f"nvshare-admission: {error}\n")
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
