"""The GPUs of this node as scheduling domains: cards and MIG instances, by NVML.

Invariants: a card with MIG enabled is represented by its instances only, for CUDA programs see nothing else of it;
UUIDs are spelled as NVML spells them, which is what CUDA gives once formatted.

May not go here: settings, scheduling.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NVML: Final = "libnvidia-ml.so.1"


class NoGpuError(Exception):
    """No GPU can be used; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Device:
    """One scheduling domain.  `index` counts domains from 0, in NVML's order."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    is_mig: bool = False


def discover() -> list[Device]:
    """All domains of this node.  Raises NoGpuError when there is no driver or no GPU."""
    import pynvml  # loads the driver's library: only where it is needed, and after a double was put in front

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(
            f"the NVIDIA driver cannot be used ({error}); install or load it (`nvidia-smi` must work), or run on a "
            "simulated GPU with --simulate"
        ) from None
    try:
        found: list[Device] = []
        for card in range(pynvml.nvmlDeviceGetCount()):
            _add_card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(card), found)
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML does not describe the GPUs ({error}); check `nvidia-smi`") from None
    finally:
        pynvml.nvmlShutdown()
    if not found:
        raise NoGpuError("this node has a driver but no GPU; run on a simulated GPU with --simulate")
    return found


def put_double_in_front(state: Path, cards: str | None) -> None:
    """Makes NVML in this process that of the simulated GPUs, whose shared state is this file.

    Raises ValueError for cards that cannot be, NoGpuError when the simulation is not installed.
    """
    from nvshare.simulated_gpu import LibraryNotFoundError
    from nvshare.simulated_gpu.environment import simulated_environment

    try:
        environment = simulated_environment(state, cards, os.environ)
    except (OSError, LibraryNotFoundError) as error:
        raise NoGpuError(str(error)) from None
    os.environ.update({name: environment[name] for name in environment if name.startswith("NVSHARE_SIM")})
    folders = environment["LD_LIBRARY_PATH"].split(":")
    for folder in folders:
        library = Path(folder) / NVML
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # pynvml asks by SONAME, and gets the one that is loaded
            return
    raise NoGpuError(f"the simulated GPU's {NVML} is not in {folders[0]}; reinstall nvshare")


def _add_card(pynvml: Any, handle: Any, found: list[Device]) -> None:
    if not _mig_enabled(pynvml, handle):
        found.append(_describe(pynvml, handle, len(found), is_mig=False))
        return
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError:  # an empty slot
            continue
        found.append(_describe(pynvml, instance, len(found), is_mig=True))


def _mig_enabled(pynvml: Any, handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # a card or a driver without MIG
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _describe(pynvml: Any, handle: Any, index: int, *, is_mig: bool) -> Device:
    return Device(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        is_mig=is_mig,
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
