"""`nvshare-nri`: the command line of the NRI plugin, and its connection, which is made again whenever it ends.

Invariants: every option has an environment variable, NVSHARE_ and its name.  An invalid option stops the start with a
message that names it.  SIGTERM ends the plugin; running containers keep their slots and their library.
"""

from __future__ import annotations

import nvshare.coordinator.search_path  # noqa: F401 (before packages that PYTHONPATH may hide)

# isort: split
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nvshare.coordinator.kubernetes.cluster import command
from nvshare.coordinator.kubernetes.cluster.command import given
from nvshare.coordinator.kubernetes.cluster.options import Containers, duration_ns, log_to_stderr, read_rules
from nvshare.coordinator.protocol.fields import RemoteProtocolError
from nvshare.coordinator.system.version import VersionOption

if TYPE_CHECKING:
    from nvshare.coordinator.kubernetes.nri.plugin import Plugin

log: Final = logging.getLogger("nvshare.nri")

NAME: Final = "nvshare"
"""What `required-plugins.noderesource.dev` names."""
INDEX: Final = "10"
RETRY_S: Final = 0.05
"""A container that starts while the plugin is away has no hook."""
LAST_RETRY_S: Final = 5.0
"""For a runtime that accepts the connection and then cuts it off."""

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


class Link:
    """The connection to the runtime."""

    def __init__(self, path: Path, plugin: Plugin) -> None:
        self._path = path
        self._plugin = plugin
        self._stopping = threading.Event()
        self._connected: socket.socket | None = None

    def run(self) -> None:
        """Serves until `stop`."""
        pause_s, logged = RETRY_S, ""
        while not self._stopping.wait(pause_s):
            self._plugin.configured = False
            why = self._serve()
            accepted = self._plugin.configured
            if self._stopping.is_set():
                return
            if accepted or why != logged:
                log.warning("%s: %s; containers start without the hook until it is connected again", self._path, why)
                logged = why
            pause_s = RETRY_S if accepted or self._connected is None else min(2 * pause_s, LAST_RETRY_S)

    def _serve(self) -> str:
        """One connection, and why it ended."""
        from nvshare.coordinator.kubernetes.nri.connection import serve

        self._connected = None
        with socket.socket(socket.AF_UNIX) as made:
            try:
                made.connect(str(self._path))
                self._connected = made
                if not self._stopping.is_set():  # a signal between these lines
                    serve(made, NAME, INDEX, self._plugin.answer)
            except OSError as error:
                return error.strerror or str(error)
            except RemoteProtocolError as error:
                return str(error)
        return "the container runtime has closed the connection"

    def stop(self, *_: object) -> None:
        """Ends `run`; a signal handler."""
        self._stopping.set()
        if self._connected is not None:
            with contextlib.suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)


@app.command(
    help="NRI plugin: makes a slot of each part of a GPU that KAI or NvFractions has given to a container, and loads "
    "the hook into the container.",
)
def run(
    nri_socket: Annotated[Path, given("NRI_SOCKET", "the container runtime's NRI socket")] = Path(
        "/var/run/nri/nri.sock"
    ),
    library_dir: command.LibraryDir = Path("/var/lib/nvshare/lib"),
    slots_dir: command.SlotsDir = Path("/run/nvshare/slots"),
    memory: command.MemoryMode = "auto",
    on_loss: command.LossAction = "run",
    loss_timeout: command.LossTimeout = "5m",
    priority_range: command.PriorityRange = "-1000:1000",
    memory_boundary: command.MemoryBoundary = "off",
    processes: command.Processes = 1,
    log_level: command.LogLevel = "info",
    version: VersionOption = False,
) -> None:
    """The command line as Typer reads it."""
    log_to_stderr("nvshare-nri", log_level)
    timeout_ns = duration_ns("--loss-timeout", loss_timeout) if loss_timeout else None
    rules = read_rules("nvshare.com/gpu", priority_range, None)
    with command.kubernetes_extra():
        from nvshare.coordinator.kubernetes.nri.plugin import Plugin
        from nvshare.coordinator.kubernetes.nri.pod_events import PodEvents
    containers = Containers(
        slots_dir, library_dir, memory=memory, on_loss=on_loss, loss_timeout_ns=timeout_ns,
        memory_boundary=memory_boundary, processes=processes,
    )  # fmt: skip
    link = Link(nri_socket, Plugin(containers, rules, PodEvents().tell))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, link.stop)
    link.run()
    log.info("stopped; running containers keep their slots")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    command.end(app, argv, "nvshare-nri", {})


if __name__ == "__main__":
    main()
