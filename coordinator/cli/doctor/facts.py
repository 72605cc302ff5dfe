"""Facts that the doctor gathers, and its findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nvshare.coordinator.system.processes import ProcessFacts

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one subject.  `remedy` is empty where nothing is to be done."""

    level: Level
    about: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Driver, cards and libraries."""

    driver: str
    """Its version; empty without a usable driver."""
    driver_error: str
    cards: tuple[str, ...]
    memory_mode: str
    """The mode of `--memory auto` for a program that uses all GPUs that CUDA shows here; empty if CUDA does not answer.

    `integrated`: `device`, because a GPU has the host's memory.
    """
    glibc: tuple[int, int] | None
    """None: this Python is not linked against glibc."""
    hook: str
    """Path of the hook library; empty if it is not found."""
    hook_error: str
    hook_glibc: tuple[int, int] | None
    """The newest glibc version that the hook names."""
    mps_directory: str
    """Pipe directory in which an MPS control daemon answers; empty without one."""
    cannot_park: str = ""
    """Why no program can be parked by a coordinator in this environment; empty: some may be."""
    no_boundary: str = ""
    """Why the driver applies no memory limit to containers; empty: it does."""
    version: str = ""
    """Of nvshare; the doctor's own."""
    installation: str = ""
    """Directory of its package."""
    installed_s: float = 0.0
    """When its hook library was written, since 1970; 0: there is none."""


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """The runtime directory.  `hooks` and `control` are errors of connecting to the sockets; empty: connected."""

    path: str
    exists: bool
    owner: int
    mode: int
    hooks: str
    control: str


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """The answer to `status`, or the error."""

    status: Mapping[str, Any] | None
    error: str


@dataclass(frozen=True, slots=True)
class ShellFacts:
    """The environment in which the doctor was called."""

    user_id: int
    environ: Mapping[str, str]
    python_without_nvshare: str
    """The environment of the first `python` in PATH, if nvshare is not installed there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything.  `wanted` is the process id of the command line; `memory_bytes` the limit of its control group."""

    machine: MachineFacts
    directory: DirectoryFacts
    coordinator: CoordinatorFacts
    shell: ShellFacts
    memory_bytes: int
    wanted: int | None
    process: ProcessFacts | None
    process_without_nvshare: str
    unhooked: tuple[tuple[int, ProcessFacts], ...]
