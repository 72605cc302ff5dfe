"""Programs on a simulated GPU that has the host's memory, a machine of 1 GiB."""

from __future__ import annotations

import pytest

from tests.daemon.processes import ctl
from tests.end_to_end.conftest import TOLD, Node, Told
from tests.waiting import eventually

MIB = 1 << 20


@pytest.fixture
def machine(node: Node) -> Node:
    """Programs may have 768 MiB, and the host keeps 102."""
    node.simulate = "1x1GiB"
    node.start_coordinator(variables={"NVSHARE_SIM_INTEGRATED": "1"})
    return node


def free_bytes(node: Node) -> int:
    """Beside what the host keeps."""
    gpu = node.control("status")["gpus"][0]
    return int(gpu["available_bytes"] - gpu["kept_bytes"])


def asks(node: Node, size: int) -> bool:
    """The only program waits for so much in all."""
    (seat,) = node.control("clients")["clients"][0]["seats"]
    return bool(seat["reserved_bytes"] < size <= seat["immovable_bytes"])


def test_what_the_host_does_not_have_is_refused_with_its_name(machine: Node) -> None:
    """Broken: two programs freeze the machine, or the second one's user looks for memory of the card."""
    first, second = machine.told("--name=first"), machine.told("--memory=swap")
    result, pointer = first.ask("alloc", 600 * MIB)
    assert result == 0
    assert second.ask("alloc", 200 * MIB)[0] == 2
    assert free_bytes(machine) >= 0
    assert first.ask("free", pointer) == 0
    eventually(lambda: second.ask("alloc", 200 * MIB)[0] == 0, "what the first one has given back")
    _, log = second.process.communicate()
    assert "swap would move nothing" in log
    assert "of the host's memory, with 1" in log
    assert "first (" in log


def test_a_program_waits_for_memory_of_the_host(machine: Node) -> None:
    """Broken: programs freeze a machine whose memory others have, or fail although it becomes free at once."""
    other, program = Told(machine.run_plain(TOLD)), machine.told()
    result, pointer = other.ask("pinned", 600 * MIB)
    assert result == 0
    assert program.ask("alloc", 100 * MIB)[0] == 0
    program.tell(f"alloc {300 * MIB}")
    eventually(lambda: asks(machine, 400 * MIB), "its question")
    assert other.ask("free_pinned", pointer) == 0
    assert program.result()[0] == 0
    assert free_bytes(machine) >= 0


def test_the_commands_show_figures_without_nvmls(machine: Node) -> None:
    """Broken: a view has no figures or fails where NVML does not say how much memory there is."""
    program = machine.told("--name=job")
    assert program.ask("alloc", 100 * MIB)[0] == 0
    line = "GPU 0 has no memory but the host's: programs may have 768MiB of 1GiB (capacity); 924MiB are free now"
    for words in ("status", "memory", "doctor"):
        shown = ctl(machine.directory, words).stdout
        assert line in shown, shown
    used = "100MiB of memory in use"
    eventually(lambda: used in ctl(machine.directory, "top", "--once").stdout, "the card's figures")
    assert "100/768MiB" in ctl(machine.directory, "top", "--once").stdout
    parked = ctl(machine.directory, "park", "job")
    assert (parked.returncode, "others have no more room" in parked.stdout) == (0, True)
    assert free_bytes(machine) == 924 * MIB - 1024 * MIB // 10
