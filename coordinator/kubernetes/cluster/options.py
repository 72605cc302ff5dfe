"""Options of the device plugin, checked; an error names the option."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast, get_args

from nvshare.coordinator.kubernetes.cluster.annotations import Rules, RulesError, rules_from
from nvshare.coordinator.kubernetes.slots import boundary
from nvshare.coordinator.kubernetes.slots.device_ids import MAX_SLOTS_PER_GPU, Preference
from nvshare.coordinator.model.profile import MEMORY_MODES
from nvshare.coordinator.system.runtime_dir import MAX_SOCKET_PATH_BYTES
from nvshare.coordinator.units import parse_duration

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_FILE_BYTES: Final = 1 << 20


class OptionError(Exception):
    """An invalid option; the text names it."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of the host.  A containerised plugin has them mounted at the same paths."""

    plugin_dir: Path
    pod_resources_socket: Path
    library_dir: Path
    slots_dir: Path
    runtime_dir: Path
    cdi_dir: Path = Path("/var/run/cdi")


@dataclass(frozen=True, slots=True)
class Options:
    """All options of one plugin."""

    paths: Paths
    slots_per_gpu: int = 4
    resource: str = "nvshare.com/gpu"
    allow_several_slots: bool = False
    preference: Preference = "spread"
    memory: str = "auto"
    on_loss: str = "run"
    loss_timeout_ns: int | None = 300_000_000_000
    coordinator_grace_ns: int = 30_000_000_000
    cdi_kind: str = ""
    memory_boundary: boundary.Mode = "off"
    processes: int = 1
    """Processes that a container is expected to have on a GPU, each with a context."""

    def __post_init__(self) -> None:
        """Raises OptionError."""
        if not 1 <= self.slots_per_gpu <= MAX_SLOTS_PER_GPU:
            raise OptionError(f"--slots-per-gpu: {self.slots_per_gpu} is not within 1 to {MAX_SLOTS_PER_GPU}")
        name = self.resource
        if name.count("/") != 1 or not all(name.split("/")) or len(name) > 253:
            raise OptionError(f"--resource: {name!r} is no resource name; write DOMAIN/NAME, such as nvshare.com/gpu")
        check_cdi_kind(self.cdi_kind)
        check_hook(self.memory, self.on_loss)
        path = self.paths.plugin_dir / socket_name(self.resource)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            text = f"{path} is longer than a socket path may be ({MAX_SOCKET_PATH_BYTES} bytes)"
            raise OptionError(f"--plugin-dir: {text}")


def check_cdi_kind(kind: str) -> None:
    """Checks a kind of CDI devices; "": none.  Raises OptionError."""
    if kind and not re.fullmatch(r"[a-z0-9.-]{1,253}/[A-Za-z0-9._-]{1,63}", kind):
        raise OptionError(f"--cdi-kind: {kind!r} is no kind; write VENDOR/CLASS, such as nvidia.com/gpu")


def check_hook(memory: str, on_loss: str) -> None:
    """Checks the options of the hook.  Raises OptionError."""
    if memory not in MEMORY_MODES:
        raise OptionError(f"--memory: {memory!r} is none of {', '.join(MEMORY_MODES)}")
    if on_loss not in ("wait", "run"):
        raise OptionError(f"--on-loss: {on_loss!r} is neither wait nor run")


def duration_ns(option: str, text: str, parse: Callable[[str], int] = parse_duration) -> int:
    """The value of an option.  Raises OptionError."""
    try:
        return parse(text)
    except ValueError as error:
        raise OptionError(f"{option}: {error}") from None


def log_to_stderr(program: str, level: str) -> None:
    """Logs from now on.  Raises OptionError for an unknown level."""
    if level not in LEVELS:
        raise OptionError(f"--log-level: {level!r} is none of {', '.join(LEVELS)}")
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


def preference(text: str) -> Preference:
    """The value of --preferred.  Raises OptionError."""
    if text not in get_args(Preference):
        raise OptionError(f"--preferred: {text!r} is neither spread nor pack")
    return cast(Preference, text)


def socket_name(resource: str) -> str:
    """Name of a resource's socket in the kubelet's plugin directory."""
    return resource.replace("/", "_") + ".sock"
