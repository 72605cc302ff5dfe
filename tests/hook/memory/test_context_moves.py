"""Memory that moves while a context ends: what the hook copies with went with that context, and is not used again.

Non-goals: leases (test_context_ends.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nvshare.coordinator.protocol import messages
from tests.conftest import Built
from tests.hook.compiled import compile_c
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

PROGRAM = Path(__file__).parent / "programs" / "context_moves.c"
ALL, OTHER = 1 << 30, 16 << 20
ROUNDS = 20
"""When it was broken the 1st, 15th and 18th went wrong first, in three runs."""


EACH_S = 0.2
"""Time of a chunk or piece that is made to take long: several of them take longer than the hook once waited."""


def moved(before: messages.State, after: messages.State) -> int:
    """In either direction."""
    return after.moved_out_bytes + after.moved_in_bytes - before.moved_out_bytes - before.moved_in_bytes


def fill(client: ScriptedClient, coordinator: ScriptedCoordinator) -> None:
    """The program has its memory and has written it; its lease is taken back."""
    client.tell("make")
    coordinator.welcome()
    assert client.answer() == "0"
    client.tell("fill")
    coordinator.asked()
    coordinator.grant(7)
    assert client.answer() == "0"
    coordinator.revoke(7)


def test_a_context_ends_beside_moves(
    tmp_path: Path, built: Built, hook_env: dict[str, str], coordinator: ScriptedCoordinator
) -> None:
    """Broken: the mover uses streams of a context that is gone: moves fail, or streams of the program are destroyed
    that have their handles now."""
    program = compile_c(tmp_path / "moves", PROGRAM, built.sim_dir / "libcuda.so.1")
    with ScriptedClient(program, hook_env | {"NVSHARE_MEMORY": "swap"}) as client:
        fill(client, coordinator)
        for _ in range(ROUNDS):
            assert coordinator.evict(ALL)[1] == 0
            assert coordinator.restore(ALL)[1] == 0
            client.tell("end")
            assert coordinator.evict(ALL)[1] == 0
            assert client.answer() == "0"
            assert client.do("make") == "0"
        assert client.do("lost") == "0"


@pytest.mark.parametrize(
    ("mode", "size", "slow"),
    [("swap", 0, "cuMemUnmap"), ("swap", ALL, "cuMemMap"), ("managed", 0, "cuMemPrefetchAsync")],
)
def test_a_context_ends_in_the_middle_of_a_long_move(
    tmp_path: Path,
    built: Built,
    hook_env: dict[str, str],
    coordinator: ScriptedCoordinator,
    mode: str,
    size: int,
    slow: str,
) -> None:
    """Broken: a context is destroyed below the mover, which fails or crashes; or memory of another one stays behind."""
    program = compile_c(tmp_path / "moves", PROGRAM, built.sim_dir / "libcuda.so.1")
    faults = f"slow:{slow}={int(EACH_S * 1e9)}"
    with ScriptedClient(program, hook_env | {"NVSHARE_MEMORY": mode, "NVSHARE_SIM_FAULTS": faults}) as client:
        fill(client, coordinator)
        if size:
            assert coordinator.evict(ALL)[1] == 0
        coordinator.target(size)
        before = coordinator.state()
        while moved(before, coordinator.expect(messages.State)) == 0:
            pass
        assert not coordinator.state().at_rest
        client.tell("end")
        last = coordinator.rests()
        assert last.error == 0
        if mode == "swap":  # else the memory ends with the context
            assert moved(before, last) >= OTHER, "what the living context has moves on"
        assert client.answer() == "0"
        assert client.do("make") == "0"
