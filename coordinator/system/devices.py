"""Discovers the GPUs and MIG instances of this node with NVML, and reads their memory.

Invariants: a GPU with MIG enabled is represented by its instances only, as CUDA sees it.  UUIDs have NVML's spelling,
which equals CUDA's formatted one.  An *integrated* GPU (GB10, Jetson) has no memory of its own: it uses the machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.system.host_memory import machine_bytes

NVML: Final = "libnvidia-ml.so.1"


class NoGpuError(Exception):
    """No usable GPU; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance.  `index` counts them from 0, in NVML's order."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    is_mig: bool = False
    integrated: bool = False
    """Its memory is the machine's."""
    distances: Mapping[str, int] = field(default_factory=dict, compare=False)
    """NVML's topology level to the other GPUs, as far as it knows, by UUID; 0 over NVLink."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The driver's NVML for the length of the block.  Raises pynvml.NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def real_card() -> bool:
    """Whether NVML finds a GPU."""
    import pynvml

    try:
        with nvml():
            found: int = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return False
    return found > 0


def discover() -> list[Device]:
    """All GPUs and MIG instances of this node.  Raises NoGpuError without a driver or GPU."""
    import pynvml  # loads the driver's library: only when needed, and after `load_simulated_nvml`

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(
            f"the NVIDIA driver is not usable ({error}); install or load it (`nvidia-smi` must work)"
        ) from None
    try:
        found: list[Device] = []
        for card in range(pynvml.nvmlDeviceGetCount()):
            _add_card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(card), found)
        found = [replace(device, distances=_distances(pynvml, device, found)) for device in found]
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML cannot describe the GPUs ({error}); check `nvidia-smi`") from None
    finally:
        pynvml.nvmlShutdown()
    if not found:
        raise NoGpuError("this node has a driver but no GPU")
    return found


def load_simulated_nvml(state: Path, cards: str | None) -> None:
    """Loads the simulated NVML into this process; `state` is the file of the simulated GPUs' shared state.

    Raises ValueError for faulty `cards`, NoGpuError when the simulation is not installed.
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
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # pynvml opens it by SONAME and gets this one
            return
    raise NoGpuError(f"the simulated GPU's {NVML} is not in {folders[0]}; reinstall nvshare")


def _add_card(pynvml: Any, handle: Any, found: list[Device]) -> None:
    if not mig_enabled(pynvml, handle):
        found.append(_describe(pynvml, handle, len(found), is_mig=False))
        return
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError:  # an empty slot
            continue
        found.append(_describe(pynvml, instance, len(found), is_mig=True))


def mig_enabled(pynvml: Any, handle: Any) -> bool:
    """Whether MIG divides this GPU."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # a GPU or driver without MIG
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a GPU; of an integrated one, that of the machine, whoever uses it."""

    total_bytes: int
    used_bytes: int
    integrated: bool = False


def memory_figures(pynvml: Any, handle: Any) -> MemoryFigures:
    """NVML does not say how much memory an integrated GPU has.  Raises pynvml.NVMLError."""
    try:
        figures = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if figures.total:
            return MemoryFigures(int(figures.total), int(figures.used))
    except pynvml.NVMLError_NotSupported:
        pass
    total, available = integrated_bytes()
    return MemoryFigures(total, total - available, integrated=True)


def integrated_bytes() -> tuple[int, int]:
    """Total and available memory of an integrated GPU's machine, as it is or as it is simulated."""
    simulated = getattr(ctypes.CDLL(NVML), "nvs_sim_host_memory", None)
    figures = (ctypes.c_uint64(), ctypes.c_uint64())
    if simulated is not None and simulated(*map(ctypes.byref, figures)):
        return figures[0].value, figures[1].value
    return machine_bytes()


def _describe(pynvml: Any, handle: Any, index: int, *, is_mig: bool) -> Device:
    memory = memory_figures(pynvml, handle)
    return Device(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total_bytes,
        is_mig=is_mig,
        integrated=memory.integrated,
    )


def _distances(pynvml: Any, device: Device, devices: Sequence[Device]) -> dict[str, int]:
    """Empty where NVML or the driver does not know."""
    found = {}
    for other in devices if not device.is_mig else ():
        if other is device or other.is_mig:
            continue
        with contextlib.suppress(pynvml.NVMLError):
            pair = [pynvml.nvmlDeviceGetHandleByUUID(each.uuid) for each in (device, other)]
            found[other.uuid] = int(pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair))
            if pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
                found[other.uuid] = 0
    return found
