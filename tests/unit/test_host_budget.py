"""Shares of pinned host memory, and what they let a client have on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import events, wire
from coordinator.host_memory import LEAST_BYTES, default_budget_bytes
from coordinator.scheduler import Settings
from coordinator.testing import Desk, ScriptedClient
from coordinator.wire import MemoryMode
from scheduler_policies.registry import create


def make_desk(budget: int = 100) -> Desk:
    """A GPU of 100, and a budget."""
    desk = Desk(create, Settings(check_invariants=True, host_budget_bytes=budget))
    desk.gpu(capacity=100)
    return desk


def ask(client: ScriptedClient, size: int, sequence: int = 1) -> int:
    """The share that it has afterwards."""
    client.desk.handle(events.HostAsked(client.client, sequence, size))
    (answer,) = client.take(wire.HostReserved)
    assert answer.sequence == sequence
    return answer.bytes


def shared(desk: Desk) -> int:
    """By everybody."""
    return desk.scheduler.snapshot(desk.clock.now_ns).host_shared_bytes


def test_all_shares_together_stay_within_the_budget() -> None:
    """Broken: programs pin more memory than the node has."""
    desk = make_desk()
    a, b = desk.client(), desk.client()
    assert ask(a, 70) == 70
    assert ask(b, 40) == 0, "refused: unchanged"
    assert desk.notes("refused")[0]["why"] == "host"
    assert ask(b, 30, 2) == 30
    assert ask(a, 20, 3) == 20, "giving back is always allowed"
    assert ask(b, 80, 4) == 80
    assert shared(desk) == 100


def test_the_share_of_the_dead_is_free_at_once() -> None:
    """Broken: invariant 6 for host memory."""
    desk = make_desk()
    a, b = desk.client(), desk.client()
    ask(a, 100)
    a.die()
    assert ask(b, 100) == 100


def test_shares_are_learnt_again_after_a_restart() -> None:
    """Broken: a new coordinator gives away what is pinned already."""
    desk = make_desk()
    a, b = desk.client(memory=50), desk.client()
    assert ask(a, 60) == 60
    assert ask(b, 60) == 0


def test_the_budget_changes_while_programs_run() -> None:
    """Broken: lowering it takes memory away that holds data, or lets more be given."""
    desk = make_desk()
    a, b = desk.client(), desk.client()
    ask(a, 80)
    desk.handle(events.HostBudgetSet(50))
    assert shared(desk) == 80
    assert ask(b, 10) == 0
    assert ask(a, 81, 2) == 80
    desk.handle(events.HostBudgetSet(200))
    assert ask(b, 120, 3) == 120


def test_what_the_host_has_no_room_for_is_not_admitted() -> None:
    """Broken: invariant 9, what is admitted could not be evicted."""
    desk = make_desk(budget=60)
    a = desk.client(mode=MemoryMode.SWAP, wanted=True)
    assert a.reserve(80) == 80, "it takes no part in the budget"
    b = desk.client(mode=MemoryMode.SWAP)
    ask(b, 10)
    assert b.reserve(61, sequence=2) == 0
    assert desk.notes("refused")[-1]["why"] == "host"
    assert b.reserve(60, sequence=3) == 60


def test_nobody_is_told_to_evict_what_the_host_has_no_room_for() -> None:
    """Broken: orders that must fail, while others could make the room."""
    desk = make_desk(budget=5)
    a, b = desk.client(mode=MemoryMode.SWAP, wanted=True), desk.client(mode=MemoryMode.SWAP)
    ask(a, 5)
    a.report(allocated=60, resident=60)
    b.report(allocated=60, resident=40, host=20)
    desk.milliseconds(100)
    b.request()
    a.release(wanted=True)
    (evict,) = a.take(wire.Evict)
    assert evict.bytes == 5


def test_a_share_before_hello_is_nonsense() -> None:
    """Broken: a stranger could use up the budget."""
    desk = make_desk()
    with pytest.raises(wire.RemoteProtocolError):
        desk.handle(events.HostAsked(99, 1, 100))


# --- the default ----------------------------------------------------------------------------------------------------


def machine(root: Path, *, total_kib: int, cgroup: str = "", limits: dict[str, str] | None = None) -> Path:
    """Files as Linux has them."""
    files = {"proc/meminfo": f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n", "proc/self/cgroup": cgroup}
    for name, text in {**files, **(limits or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_default_is_a_part_of_the_machine(tmp_path: Path) -> None:
    """Broken: pinned memory could take all that the machine has."""
    assert default_budget_bytes(machine(tmp_path, total_kib=64 << 20)) == 48 << 30


@pytest.mark.parametrize(
    ("cgroup", "limits"),
    [
        (
            "0::/pod/app\n",
            {"sys/fs/cgroup/pod/memory.max": "8589934592\n", "sys/fs/cgroup/pod/app/memory.max": "max\n"},
        ),
        ("4:cpu,memory:/app\n", {"sys/fs/cgroup/memory/app/memory.limit_in_bytes": "8589934592\n"}),
    ],
)
def test_or_of_the_container(tmp_path: Path, cgroup: str, limits: dict[str, str]) -> None:
    """Broken: in a container the kernel would kill somebody before the budget is used."""
    assert default_budget_bytes(machine(tmp_path, total_kib=64 << 20, cgroup=cgroup, limits=limits)) == 6 << 30


def test_a_machine_that_tells_nothing_has_a_budget_too(tmp_path: Path) -> None:
    """Broken: no coordinator without /proc."""
    assert default_budget_bytes(tmp_path) == LEAST_BYTES
