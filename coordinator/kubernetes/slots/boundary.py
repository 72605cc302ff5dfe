"""A container's memory limit by the driver, beside ours: `NVIDIA_GPU_MEMORY_LIMIT`.

NVIDIA's container toolkit reads the variable from the environment of a new container, in MiB, and sets the driver's
limit on its control group.  The driver counts contexts, some half a gigabyte for each process, and no managed memory;
ours counts allocations.  So the variable is our limit and `CONTEXT_MIB` for each process that is expected.

The kubelet's Allocate does not name the pod, and so no limit.  The device plugin then names a CDI device of the slot,
whose file it writes before the container starts; a pod cannot replace a variable of CDI.

Invariant: without a limit of ours there is no variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

VARIABLE: Final = "NVIDIA_GPU_MEMORY_LIMIT"
CONTEXT_MIB: Final = 512
DRIVER: Final = 615
"""The first branch of the driver that knows the limit."""
TOOLKIT: Final = (1, 20, 1)
Mode = Literal["off", "on", "auto"]
CDI_KIND: Final = "nvshare.com/slot"

_MODULE: Final = Path("/sys/module/nvidia/version")
_CGROUP_2: Final = Path("/sys/fs/cgroup/cgroup.controllers")


def environment(limit_bytes: int, mode: Mode, processes: int = 1) -> dict[str, str]:
    """The variable of a container with this limit of ours; 0: none."""
    if not limit_bytes or not is_wanted(mode):
        return {}
    return {VARIABLE: str(-(-limit_bytes // (1 << 20)) + CONTEXT_MIB * processes)}


def is_wanted(mode: Mode) -> bool:
    """Whether containers get the variable; `auto`: where this node's driver applies it."""
    return mode == "on" or (mode == "auto" and not obstacle(_driver()))


def cdi_specification(slot: str, variables: Mapping[str, str]) -> bytes:
    """The file of a slot's CDI device."""
    edits = {"env": [f"{name}={value}" for name, value in variables.items()]}
    made = {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": [{"name": slot, "containerEdits": edits}]}
    return json.dumps(made).encode()


def obstacle(driver: str, toolkit: str | None = None) -> str:
    """Why the limit has no effect on this node; "": it has one.  `toolkit` None: from here it cannot be known."""
    if not re.match(r"\d+", driver) or int(driver.partition(".")[0]) < DRIVER:
        return f"driver {driver or 'unknown'} is older than r{DRIVER}"
    if not _CGROUP_2.exists():
        return "the node has no cgroup v2"
    if toolkit is not None and tuple(map(int, re.findall(r"\d+", toolkit)[:3])) < TOOLKIT:
        needed = ".".join(map(str, TOOLKIT))
        return f"NVIDIA's container toolkit is {toolkit or 'not installed'}, and {needed} is needed"
    return ""


def _driver() -> str:
    try:
        return _MODULE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
