"""The application's own virtual memory management in mode `swap`: real coordinator and hook, a card too small for two.

Non-goals: what one call answers (tests/hook/swap/test_swap_vmm.py).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.end_to_end.conftest import Node, Told, finish, until_evicted
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.hook.compiled import compile_c
from tests.waiting import eventually

MIB = 1 << 20
OUT_OF_MEMORY = 2
EXPORTABLE = 1 | 8
"""A POSIX file descriptor or a fabric handle: what JAX asks for."""
SOURCE = Path(__file__).parent / "programs" / "vmm_program.c"


@pytest.fixture(scope="session")
def vmm_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """programs/vmm_program.c, linked with the simulated driver."""
    return compile_c(tmp_path_factory.mktemp("vmm") / "vmm_program", SOURCE, built.sim_dir / "libcuda.so.1")


@pytest.mark.parametrize("node", ["1x128MiB"], indirect=True)
def test_handles_move_and_keep_their_contents(node: Node, vmm_program: Path) -> None:
    """Broken: what a program mapped itself is lost, mixed up or pinned when another one takes the card."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # pytest shows it when the test fails
    node.start_coordinator("--quantum=20ms")

    def pair() -> None:
        both = [node.run([str(vmm_program), str(seed + i), "80", "85"], "--memory=swap") for i in range(2)]
        results = [finish(process) for process in both]
        assert all(result["mismatches"] == result["failures"] == 0 for result in results), results
        assert all(result["left"] == 0 for result in results), results

    until_evicted(node, pair)


def preallocated(node: Node, size: int, name: str) -> tuple[Told, int, int]:
    """A program with one allocation that it may export, mapped and written; the handle and the address."""
    program = node.told("--memory=swap", f"--name={name}")
    result, handle = program.ask(f"create_as {size} {EXPORTABLE} 1")
    assert result == 0
    result, address = program.ask(f"reserve {size}")
    assert result == 0
    assert program.ask(f"map {address} {size} 0 {handle}") == 0
    assert program.ask(f"allow {address} {size} 0 3") == 0
    return program, handle, address


@pytest.mark.parametrize("node", ["1x64MiB"], indirect=True)
def test_two_programs_that_preallocate_most_of_the_card_take_turns(node: Node) -> None:
    """Broken: JAX, which takes 75 % of the card at once, locks every other program out, or is refused beside one."""
    size = 48 * MIB
    node.start_coordinator("--quantum=20ms")
    both = [preallocated(node, size, name) for name in ("one", "other")]
    for turn in range(4):
        for number, (program, _, address) in enumerate(both):
            assert turn == 0 or program.ask(f"same {address} {size} {2 * turn + number}") is True
            assert program.ask(f"write {address} {size} {2 * turn + number + 2}") == 0
    status = node.control("status")
    assert status["gpus"][0]["evicted_bytes"] >= 7 * 32 * MIB
    assert all(client["seats"][0]["pinned_bytes"] == 0 for client in status["clients"])
    (one, handle, address), (other, *_) = both
    assert other.ask(f"create_as {20 * MIB} {EXPORTABLE} 1")[0] == OUT_OF_MEMORY, "more than the card, at once"
    assert one.ask(f"export {handle} 1")[0] == OUT_OF_MEMORY, "the other one would never run again"
    assert one.ask(f"same {address} {size} 8") is True
    other.process.kill()
    other.process.wait()
    eventually(lambda: one.ask(f"export {handle} 1")[0] == 0, "the room that it left")
    assert one.ask(f"same {address} {size} 8") is True


@pytest.mark.sanitizer
@pytest.mark.parametrize("node", ["1x128MiB"], indirect=True)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_handles_under_sanitizers(node: Node, vmm_program: Path, kind: str) -> None:
    """Broken: a race or a use after free between the program's calls, and the mover."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")

    def pair() -> None:
        words = [[str(vmm_program), seed, "40", "85"] for seed in ("1", "2")]
        finish_sanitized(*(node.run(command, "--memory=swap", variables=variables) for command in words))

    until_evicted(node, pair)
