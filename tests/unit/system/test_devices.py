"""Which scheduling domains NVML's answers make.  NVML is the system's edge; here it is played."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nvshare import simulated_gpu
from nvshare.coordinator.daemon.coordinator import Options
from nvshare.coordinator.daemon.main import find_devices
from nvshare.coordinator.daemon.settings_file import StartError, capacity_bytes
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.system import devices
from nvshare.coordinator.system.devices import NoGpuError, discover, load_simulated_nvml
from nvshare.coordinator.system.gpu_processes import read_memory
from nvshare.coordinator.system.runtime_dir import RuntimeDir


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


class NotSupportedError(NvmlError):
    """Stands for pynvml.NVMLError_NotSupported."""


@dataclass
class Card:
    """A card, or a MIG instance in one of its slots."""

    uuid: str
    gib: int = 80
    mig: list[Card | None] = field(default_factory=list)
    has_mig: bool = True
    peers: dict[str, int] = field(default_factory=dict)
    """NVML's level of other cards; -1: joined by NVLink too."""
    integrated: bool = False


def play(monkeypatch: pytest.MonkeyPatch, cards: list[Card], *, failing: str = "") -> None:
    module: Any = ModuleType("pynvml")

    def slot_of(card: Card, index: int) -> Card:
        found = card.mig[index]
        if found is None:
            raise NvmlError("not found")
        return found

    def mode(card: Card) -> tuple[int, int]:
        if not card.has_mig:
            raise NvmlError("not supported")
        return int(bool(card.mig)), 0

    def level(card: Card, other: Card) -> int:
        if other.uuid not in card.peers:
            raise NvmlError("not supported")
        return max(10, card.peers[other.uuid])

    def memory(card: Card) -> SimpleNamespace:
        if card.integrated:
            raise NotSupportedError("not supported")
        return SimpleNamespace(total=card.gib << 30, used=0)

    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.mig),
        "nvmlDeviceGetMigDeviceHandleByIndex": slot_of,
        "nvmlDeviceGetUUID": lambda card: card.uuid,
        "nvmlDeviceGetName": lambda card: "Card",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetHandleByUUID": lambda uuid: next(card for card in cards if card.uuid == uuid),
        "nvmlDeviceGetTopologyCommonAncestor": level,
        "nvmlDeviceGetComputeRunningProcesses": memory,
        "nvmlDeviceGetP2PStatus": lambda card, other, capability: 0 if card.peers[other.uuid] < capability else 3,
    }

    def fail(*_: object) -> None:
        raise NvmlError("Driver Not Loaded")

    for name, function in functions.items():
        setattr(module, name, fail if name == failing else function)
    module.NVMLError, module.NVMLError_NotSupported = NvmlError, NotSupportedError
    module.NVML_DEVICE_MIG_ENABLE = 1
    module.NVML_P2P_CAPS_INDEX_NVLINK, module.NVML_P2P_STATUS_OK = 2, 0
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_cards_are_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a card were lost, or its UUID came out in another spelling than CUDA's."""
    play(monkeypatch, [Card("GPU-a", 80), Card("GPU-b", 16, has_mig=False)])
    found = discover()
    assert [(device.index, device.uuid, device.total_bytes) for device in found] == [
        (0, "GPU-a", 80 << 30),
        (1, "GPU-b", 16 << 30),
    ]


@pytest.mark.parametrize("card", [Card("GPU-a", integrated=True), Card("GPU-a", gib=0)])
def test_a_card_whose_memory_nvml_does_not_say_has_the_machines(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    """Broken: the coordinator does not start on such a machine, or programs may have all of its memory."""
    play(monkeypatch, [card])
    monkeypatch.setattr(devices, "integrated_bytes", lambda: (128 << 30, 100 << 30))
    (found,) = discover()
    assert (found.integrated, found.total_bytes) == (True, 128 << 30)
    assert capacity_bytes(Settings(), found, real=True) == 96 << 30
    assert capacity_bytes(Settings(capacity_bytes=120 << 30), found, real=True) == 120 << 30


def test_the_hosts_figures_count_where_nvml_lists_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: programs get no memory on a Jetson, because its NVML has figures of nothing."""
    play(monkeypatch, [Card("GPU-a", integrated=True)])
    monkeypatch.setattr(devices, "integrated_bytes", lambda: (128 << 30, 100 << 30))
    assert read_memory("GPU-a", by_process=True) == ({}, 28 << 30)


def test_how_far_cards_are_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a program on two cards gets a pair without NVLink, or a driver without topology ends the start."""
    far = Card("GPU-c", peers={"GPU-a": 50})
    play(monkeypatch, [Card("GPU-a", peers={"GPU-b": -1, "GPU-c": 50}), Card("GPU-b", peers={"GPU-a": 40}), far])
    assert [device.distances for device in discover()] == [{"GPU-b": 0, "GPU-c": 50}, {"GPU-a": 40}, {"GPU-a": 50}]


def test_a_partitioned_card_is_its_instances_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if the card beside its instances were a domain: no program can use it."""
    play(monkeypatch, [Card("GPU-a", mig=[Card("MIG-1", 10), None, Card("MIG-2", 20)]), Card("GPU-b")])
    found = discover()
    assert [(device.uuid, device.is_mig) for device in found] == [("MIG-1", True), ("MIG-2", True), ("GPU-b", False)]
    assert [device.index for device in found] == [0, 1, 2]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_a_driver_that_fails_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Broken if a broken driver gave a traceback."""
    play(monkeypatch, [Card("GPU-a")], failing=failing)
    with pytest.raises(NoGpuError, match=r"Driver Not Loaded.*nvidia-smi"):
        discover()


def test_a_node_without_cards_is_told_of_the_simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: a coordinator without GPUs runs, and every client waits; or a command without --simulate advises it."""
    play(monkeypatch, [])
    with pytest.raises(NoGpuError, match=r"no GPU$"):
        discover()
    with pytest.raises(StartError, match=r"no GPU, or run on a simulated GPU with --simulate$"):
        find_devices(Options(RuntimeDir(tmp_path)))


def test_a_simulation_that_is_not_built_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: `nvshare-coordinator --simulate` from a checkout ends in a traceback."""

    def nowhere() -> Path:
        raise simulated_gpu.LibraryNotFoundError("in none of: here. Install the package")

    monkeypatch.setattr("nvshare.simulated_gpu.environment.library_directory", nowhere)
    with pytest.raises(NoGpuError, match="Install the package"):
        load_simulated_nvml(tmp_path / "state", None)
