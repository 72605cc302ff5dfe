"""NVML in a process under the hook: the virtual card, the same as cuMemGetInfo's and the coordinator's.

Over the double of NVML, by pynvml and ctypes in nvml_program.py, told by a scripted coordinator.

Non-goals: what a quota lets through (test_memory_process.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.memory.test_memory_process import GIB, MIB, PROGRAMS, attached
from tests.hook.scripted import JsonClient, ScriptedCoordinator
from tests.waiting import eventually

CARD = 16 * GIB


class Client(JsonClient):
    """nvml_program.py"""

    def card(self, index: int = 0) -> tuple[int, int, int]:
        """(total, free, used) as NVML's two versions have it, which must agree."""
        total, free, used, total_v2, reserved_v2, free_v2, used_v2 = self.ask("nvml", index)
        assert (total, free, used) == (total_v2, free_v2, used_v2)
        assert total == used + free + reserved_v2
        return total, free, used


Start = Callable[..., Client]


@pytest.fixture
def start_nvml(hook_env: dict[str, str]) -> Iterator[Start]:
    """Starts the program under the hook; keyword arguments change its environment, None removes a variable."""
    command = [sys.executable, str(PROGRAMS / "nvml_program.py")]
    with ExitStack() as stack:

        def run(**changes: str | None) -> Client:
            environment = {k: v for k, v in (hook_env | changes).items() if v is not None}
            return stack.enter_context(Client(command, environment))

        yield run


@pytest.mark.parametrize("mode", ["managed", "swap", "device"])
def test_nvml_agrees_with_cuda_and_coordinator(coordinator: ScriptedCoordinator, start_nvml: Start, mode: str) -> None:
    """Frameworks that size their pools by NVML would take memory that the quota does not give."""
    client = start_nvml(NVSHARE_MEMORY=mode)
    attached(client, coordinator, limit=4 * GIB)
    assert client.card() == (4 * GIB, 4 * GIB, 0)
    assert client.ask("alloc", 300 * MIB)[0] == 0
    _, free, total, of_device = client.ask("info")
    assert (free, total, of_device) == (4 * GIB - 300 * MIB, 4 * GIB, 4 * GIB)
    assert client.card() == (total, free, 300 * MIB)
    report = coordinator.expect(messages.State)
    while report.allocated_bytes == 0:
        report = coordinator.expect(messages.State)
    assert report.allocated_bytes == 300 * MIB


def shows(client: Client, limit: int) -> bool:
    """CUDA's figures are those of this limit."""
    return bool(client.ask("info")[2] == limit)


def test_a_limit_that_changes_shows_at_once(coordinator: ScriptedCoordinator, start_nvml: Start) -> None:
    """`nvshare-ctl set limit` would seem to do nothing, or the two interfaces would contradict each other."""
    client = start_nvml()
    attached(client, coordinator)
    assert client.card() == (CARD, CARD, 0)
    for limit in (8 * GIB, 2 * GIB, 12 * GIB):
        coordinator.settings(limit=limit)
        eventually(partial(shows, client, limit), "the new limit to arrive")
        assert client.card() == (limit, limit, 0)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_this_process_is_listed_with_what_it_is_charged(
    coordinator: ScriptedCoordinator, start_nvml: Start, version: int
) -> None:
    """A monitor inside of the program would show other figures than the quota is held against; others keep theirs."""
    other = start_nvml(NVSHARE_SOCKET=None)
    assert other.ask("start") == 0
    assert other.ask("alloc", 7 * MIB)[0] == 0
    client = start_nvml(NVSHARE_MEMORY="managed")
    attached(client, coordinator, limit=4 * GIB)
    assert client.ask("alloc", 300 * MIB)[0] == 0
    listed = dict(client.ask("processes", 0, version))
    assert listed == {client.ask("pid"): 300 * MIB, other.ask("pid"): 7 * MIB}
    assert other.ask("processes", 0, version) != sorted(listed.items())


def test_each_gpu_has_its_own_figures(coordinator: ScriptedCoordinator, start_nvml: Start) -> None:
    """With several cards, or renumbered ones, the quota of one would be shown for another."""
    client = start_nvml(NVSHARE_SIMULATE="2x16GiB", CUDA_VISIBLE_DEVICES="1,0")
    attached(client, coordinator, limit=4 * GIB)  # CUDA's GPU 0 is NVML's second card
    assert client.ask("alloc", 100 * MIB)[0] == 0
    assert client.card(1) == (4 * GIB, 4 * GIB - 100 * MIB, 100 * MIB)
    assert client.card(0) == (CARD, CARD, 0)
    assert client.ask("processes", 1, 3) == [[client.ask("pid"), 100 * MIB]]
    assert client.ask("processes", 0, 3) == []


def test_a_mig_instance_is_known_by_its_uuid(coordinator: ScriptedCoordinator, start_nvml: Start) -> None:
    """On split cards the instance's quota would be missed, or the whole card would seem to be as small."""
    client = start_nvml(NVSHARE_SIM_MIG="0:2")
    attached(client, coordinator, limit=1 * GIB)
    assert client.ask("alloc", 10 * MIB)[0] == 0
    assert client.card(100) == (1 * GIB, 1 * GIB - 10 * MIB, 10 * MIB)
    assert client.card(0)[0] > 1 * GIB


def test_a_tool_without_cuda_sees_the_limit_of_its_environment(start_nvml: Start) -> None:
    """`nvshare-run --gpu-memory-limit 4GiB -- nvidia-smi` would show a card that the user does not have."""
    client = start_nvml(NVSHARE_MEMORY_LIMIT="4GiB", NVSHARE_SIMULATE="2x16GiB")
    assert [client.card(index) for index in (0, 1)] == [(4 * GIB, 4 * GIB, 0)] * 2
    assert client.ask("processes", 0, 3) == []


def test_a_limit_above_the_card_shows_the_card(start_nvml: Start) -> None:
    """No quota makes a card bigger than it is."""
    assert start_nvml(NVSHARE_MEMORY_LIMIT="64GiB").card() == (CARD, CARD, 0)


@pytest.mark.parametrize("changes", [{"NVSHARE_SOCKET": None}, {"NVSHARE_DISABLE": "1"}])
def test_inert(start_nvml: Start, changes: dict[str, str | None]) -> None:
    """A hook that is switched off must not be noticed."""
    client = start_nvml(NVSHARE_MEMORY="managed", NVSHARE_MEMORY_LIMIT="4GiB", **changes)
    assert client.card() == (CARD, CARD, 0)
    assert client.ask("start") == 0
    assert client.ask("alloc", MIB)[0] == 0
    assert client.card() == (CARD, CARD - MIB, MIB)
    assert client.ask("paths") == [CARD] * 4


def test_every_way_to_the_function(start_nvml: Start) -> None:
    """A tool that finds the function by another look-up would see the real card."""
    assert start_nvml(NVSHARE_MEMORY_LIMIT="4GiB").ask("paths") == [4 * GIB] * 4


def test_what_is_not_there_stays_absent(start_nvml: Start) -> None:
    """Programs that ask whether NVML is there would be told so on a machine without it."""
    assert start_nvml(NVSHARE_MEMORY_LIMIT="4GiB").ask("absent") == [False] * 6


def test_errors_stay_what_they_are(start_nvml: Start) -> None:
    """A program that handles NVML's errors must meet them: wrong version, no such device, not initialised."""
    failing = [start_nvml(NVSHARE_SOCKET=socket).ask("failing") for socket in (None, "/nowhere/hooks.sock")]
    assert failing == [[25, 2, 1]] * 2


def test_a_linked_program(hook_env: dict[str, str], built: Built, tmp_path: Path) -> None:
    """Programs linked with NVML call through the PLT, where our symbol must come first, and may close NVML again."""
    source = tmp_path / "linked.c"
    source.write_text(
        "#include <stdio.h>\n"
        "int nvmlInit_v2(void), nvmlShutdown(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **);\n"
        "int nvmlDeviceGetMemoryInfo(void *, unsigned long long *);\n"
        "int main(void) { void *device; unsigned long long figures[3] = {0};\n"
        "  int failed = nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device) ||\n"
        "               nvmlDeviceGetMemoryInfo(device, figures) || nvmlShutdown();\n"
        '  printf("%d %llu\\n", failed, figures[0]); return 0; }\n'
    )
    program = compile_c(tmp_path / "linked", source, built.sim_dir / "libnvidia-ml.so.1")
    limited = hook_env | {"NVSHARE_MEMORY_LIMIT": "4GiB"}
    assert subprocess.check_output([program], env=limited, text=True) == f"0 {4 * GIB}\n"
