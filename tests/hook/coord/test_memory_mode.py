"""`--memory auto`: the hook chooses the mode by what the card can, before the program's hello names it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.hook.conftest import StartClient
from tests.hook.scripted import ScriptedCoordinator

NO_VMM = "102=0"
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
NEITHER = "102=0,89=0"
"""Nor CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS."""
OF_HOST = "18=1"
"""CU_DEVICE_ATTRIBUTE_INTEGRATED."""


@pytest.mark.parametrize(
    ("attributes", "mode", "why"),
    [
        ("", MemoryMode.SWAP, "swap, as every GPU of this program has virtual memory management"),
        (NO_VMM, MemoryMode.MANAGED, "managed, as not every GPU"),
        (NEITHER, MemoryMode.DEVICE, "device, as not every GPU"),
        (OF_HOST, MemoryMode.DEVICE, "device, as a GPU of this program has no memory but the host's"),
    ],
)
@pytest.mark.parametrize(("asked", "gpus"), [(None, 1), ("auto", 2)])
def test_the_mode_is_what_the_card_can(
    start: StartClient,
    coordinator: ScriptedCoordinator,
    attributes: str,
    mode: MemoryMode,
    why: str,
    asked: str | None,
    gpus: int,
) -> None:
    """Broken: a card without virtual memory management gets swap, one with it another mode, or hello says a third."""
    client = start(
        NVSHARE_MEMORY=asked, NVSHARE_SIM_ATTRIBUTES=attributes, NVSHARE_SIMULATE=f"{gpus}x1GiB", NVSHARE_LOG="debug"
    )
    client.tell(f"alloc {1 << 20}")
    hello = coordinator.expect(messages.Hello)
    assert (hello.memory_mode, hello.memory_auto) == (mode, True)
    coordinator.send(messages.Welcome(1))
    coordinator.expect(messages.AttachGpu)
    coordinator.settings()
    assert client.answer() == "allocated"
    _, log = client.finish()
    assert log.count(f"memory mode {why}") == 1
    assert not [line for line in log.splitlines() if "warning" in line]


@pytest.mark.parametrize("mode", [MemoryMode.MANAGED, MemoryMode.DEVICE, MemoryMode.SWAP])
def test_a_mode_that_was_asked_for_stays(
    start: StartClient, coordinator: ScriptedCoordinator, mode: MemoryMode
) -> None:
    """Broken: `managed` is no longer one variable away, or the coordinator takes a user's choice for the hook's."""
    client = start(NVSHARE_MEMORY=mode.name.lower())
    client.tell(f"alloc {1 << 20}")
    hello = coordinator.expect(messages.Hello)
    assert (hello.memory_mode, hello.memory_auto) == (mode, False)


def test_swap_within_the_hosts_memory_is_device(start: StartClient, coordinator: ScriptedCoordinator) -> None:
    """Broken: memory is copied within one memory, or the user is not told that nothing moves."""
    client = start(NVSHARE_MEMORY="swap", NVSHARE_SIM_ATTRIBUTES=OF_HOST)
    client.tell(f"alloc {1 << 20}")
    hello = coordinator.expect(messages.Hello)
    assert (hello.memory_mode, hello.memory_auto) == (MemoryMode.DEVICE, False)
    coordinator.send(messages.Welcome(1))
    coordinator.expect(messages.AttachGpu)
    coordinator.settings()
    assert client.answer() == "allocated"
    _, log = client.finish()
    (line,) = [line for line in log.splitlines() if "warning" in line]
    assert "swap would move nothing" in line


def test_a_program_without_a_gpu_is_known_too(hook_env: dict[str, str], coordinator: ScriptedCoordinator) -> None:
    """Broken: a program whose cuInit fails never says hello, and its connection is closed and made anew without end."""
    code = "import ctypes, sys; ctypes.CDLL('libcuda.so.1').cuInit(0); sys.stdin.read()"
    environment = {**hook_env, "NVSHARE_MEMORY": "", "NVSHARE_SIM_FAULTS": "cuInit=100"}
    program = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE)
    try:
        assert coordinator.expect(messages.Hello).memory_auto
    finally:
        program.communicate()
