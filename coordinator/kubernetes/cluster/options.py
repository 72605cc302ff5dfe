"""Options of the plugins, checked; an error names the option."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nvshare.coordinator.kubernetes.cluster.annotations import GPU_RESOURCE, QUALIFIED, Rules, RulesError, rules_from
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.kubernetes.slots.device_ids import Preference
from nvshare.coordinator.model.profile import MEMORY_MODES
from nvshare.coordinator.system.runtime_dir import MAX_SOCKET_PATH_BYTES
from nvshare.coordinator.units import parse_duration

MAX_FILE_BYTES: Final = 1 << 20
OnLoss = Literal["wait", "run"]
Level = Literal["debug", "info", "warning", "error"]


class OptionError(Exception):
    """An invalid option; the text names it."""


@dataclass(frozen=True, slots=True)
class Containers:
    """The settings of containers, for each plugin.  Paths are the host's; a containerised plugin has them too."""

    slots_dir: Path
    library_dir: Path
    cdi_dir: Path = Path("/var/run/cdi")
    memory: str = "auto"
    on_loss: OnLoss = "run"
    loss_timeout_ns: int | None = 300_000_000_000
    cdi_kind: str = ""
    """Also name CDI devices of this kind, by UUID."""
    memory_boundary: boundary.Mode = "off"
    processes: int = 1
    """Processes that a container is expected to have on a GPU, each with a context."""

    def __post_init__(self) -> None:
        """Raises OptionError."""
        if self.memory not in MEMORY_MODES:
            raise OptionError(f"--memory: {self.memory!r} is none of {', '.join(MEMORY_MODES)}")
        if self.cdi_kind and not QUALIFIED.fullmatch(self.cdi_kind):
            raise OptionError(f"--cdi-kind: {self.cdi_kind!r} is no kind; write VENDOR/CLASS, such as nvidia.com/gpu")


@dataclass(frozen=True, slots=True)
class Options:
    """All options of one device plugin."""

    containers: Containers
    plugin_dir: Path
    pod_resources_socket: Path
    runtime_dir: Path
    slots_per_gpu: int = 4
    resource: str = GPU_RESOURCE
    allow_several_slots: bool = False
    preference: Preference = "spread"
    coordinator_grace_ns: int = 30_000_000_000

    def __post_init__(self) -> None:
        """Raises OptionError."""
        path = self.plugin_dir / socket_name(self.resource)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            text = f"{path} is longer than a socket path may be ({MAX_SOCKET_PATH_BYTES} bytes)"
            raise OptionError(f"--plugin-dir: {text}")


def duration_ns(option: str, text: str) -> int:
    """The value of an option.  Raises OptionError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise OptionError(f"{option}: {error}") from None


def log_to_stderr(program: str, level: Level) -> None:
    """Logs from now on."""
    line = f"%(asctime)s {program} %(levelname)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=line, force=True)


def read_rules(resource: str, priority_range: str, priority_classes: Path | None) -> Rules:
    """The operator's rules.  Raises OptionError."""
    classes: object = None
    if priority_classes is not None:
        try:
            with priority_classes.open("rb") as file:
                classes = json.loads(file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise OptionError(f"--priority-classes: {priority_classes}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise OptionError(f"--priority-classes: {priority_classes}: not JSON: {error}") from None
    try:
        return rules_from(resource=resource, priority_range=priority_range, priority_classes=classes)
    except RulesError as error:
        raise OptionError(str(error)) from None


def socket_name(resource: str) -> str:
    """Name of a resource's socket in the kubelet's plugin directory."""
    return resource.replace("/", "_") + ".sock"
