"""The common options of the device plugin, the NRI plugin and the DRA driver, and the exit of their commands.

Invariant: an error with a cause outside of the program ends the program with one line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from nvshare.coordinator.kubernetes.cluster.options import Level, OnLoss, OptionError
from nvshare.coordinator.kubernetes.slots.boundary import Mode
from nvshare.coordinator.kubernetes.slots.slot import SlotError
from nvshare.coordinator.system.extras import install_command
from nvshare.coordinator.system.version import run_command

_GRPC: Final = ("grpc", "google")


def given(variable: str, text: str, *names: str, least: int | None = None, most: int | None = None) -> Any:
    """An option, also given by NVSHARE_`variable`."""
    return typer.Option(*names, envvar="NVSHARE_" + variable, help=text, min=least, max=most)


def place(variable: str, text: str) -> Any:
    """A path, which becomes absolute."""

    def absolute(path: Path) -> Path:
        return path.absolute()

    return typer.Option(envvar="NVSHARE_" + variable, help=text, callback=absolute)


LibraryDir = Annotated[Path, place("LIBRARY_DIR", "directory of the installed hook libraries on the host")]
SlotsDir = Annotated[Path, place("SLOTS_DIR", "directory of slots on the host")]
RuntimeDirectory = Annotated[Path, place("RUNTIME_DIR", "runtime directory of the node's coordinator")]
CdiKind = Annotated[
    str, given("CDI_KIND", "also name CDI devices of this kind, such as nvidia.com/gpu, for container runtimes")
]
MemoryMode = Annotated[str, given("MEMORY", "memory mode of containers: auto, swap, managed, device")]
LossAction = Annotated[OnLoss, given("ON_LOSS", "behaviour of containers without a coordinator")]
LossTimeout = Annotated[str | None, given("LOSS_TIMEOUT", "with --on-loss=run: time before they run, such as 5m")]
MemoryBoundary = Annotated[
    Mode, given("MEMORY_BOUNDARY", "have the driver hold memory limits too, by CDI; auto: if it is r615 or newer")
]
Processes = Annotated[
    int, given("PROCESSES", "with --memory-boundary: processes of a container, 512 MiB for each context", least=1)
]
IgnoredXids = Annotated[
    list[int] | None, given("IGNORED_XIDS", "an XID error that leaves a GPU healthy; repeatable", "--ignored-xid")
]
PriorityRange = Annotated[str, given("PRIORITY_RANGE", "MIN:MAX allowed in the priority annotation")]
LogLevel = Annotated[Level, given("LOG_LEVEL", "least important messages that are logged")]
CdiDir = Annotated[Path, place("CDI_DIR", "directory of the container runtime's CDI files")]


@contextlib.contextmanager
def kubernetes_extra() -> Iterator[None]:
    """For imports that need gRPC or protobuf.  Raises OptionError, with the command that installs what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _GRPC:
            raise
        raise OptionError(f"{error.name} is not installed; install it: {install_command('kubernetes')}") from None


def end(app: typer.Typer, argv: Sequence[str] | None, name: str, prefixes: Mapping[type[Exception], str]) -> NoReturn:
    """Runs the command and exits: 0 stopped, 1 failed, 2 wrong command line.

    `prefixes`: more exceptions that end in one line, and the beginning of that line.
    """
    code, text = 0, ""
    known: dict[type[Exception], str] = {SlotError: "--slots-dir: ", **prefixes}
    try:
        code = run_command(app, list(sys.argv[1:] if argv is None else argv), name) or 0
    except OptionError as error:
        code, text = 2, str(error)
    except tuple(known) as error:
        code, text = 1, known[type(error)] + str(error)
    except OSError as error:
        code, text = 1, f"{error.filename or 'system'}: {error.strerror}"
    if text:
        sys.stderr.write(f"{name}: {text}\n")
    raise SystemExit(code)
