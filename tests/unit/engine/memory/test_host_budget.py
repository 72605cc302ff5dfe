"""Shares of pinned host memory, and what they let a client have on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvshare.coordinator.model import events
from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.messages import HOST, MemoryMode
from nvshare.coordinator.system.host_memory import LEAST_BYTES, default_budget_bytes
from nvshare.scheduler_policies.registry import create
from tests.harness import Harness, ScriptedClient, one_gpu


def make_harness(budget: int = 100, times: int = 8) -> Harness:
    """A GPU of 100, and a budget."""
    harness = one_gpu(100, host_budget_bytes=budget, host_fair_times=times)
    harness.milliseconds(1_000)  # nobody comes back from an earlier coordinator
    return harness


def ask(client: ScriptedClient, size: int) -> int:
    """The share that it has afterwards."""
    client.ask_host(size)
    (share,) = client.reserved()
    assert client.targets[HOST].answers == client.states[HOST].asks
    return share


def all_it_gets(client: ScriptedClient, has: int = 0) -> int:
    """The share of one that asks for more until it is refused a single byte."""
    step = 1 << 20
    while step:
        if ask(client, has + step) > has:
            has += step
        else:
            step //= 2
    return has


def shared(harness: Harness) -> int:
    """By everybody."""
    return harness.scheduler.snapshot(harness.clock.now_ns).host_shared_bytes


def test_all_shares_together_stay_within_the_budget() -> None:
    """Broken: programs pin more memory than the node has."""
    harness = make_harness(times=0)
    a, b = harness.client(), harness.client()
    assert ask(a, 70) == 70
    assert ask(b, 40) == 0, "refused: unchanged"
    assert harness.notifications("refused")[0]["why"] == "host"
    assert ask(b, 30) == 30
    assert ask(a, 20) == 20, "giving back is always allowed"
    assert ask(b, 80) == 80
    assert shared(harness) == 100


@pytest.mark.parametrize(("times", "share"), [(8, 800), (0, 900)])
def test_one_user_alone_has_nearly_all_of_it(times: int, share: int) -> None:
    """Broken: fairness towards people who are not there costs the one who is, most of all where a coordinator lets no
    other user in."""
    assert all_it_gets(make_harness(900, times=times).client()) == share


def test_who_comes_later_finds_something() -> None:
    """Broken: one user fills the budget, and nobody else can allocate anything any more."""
    harness = make_harness(81_000)
    found = [all_it_gets(harness.client(user_id=user)) for user in range(3)]
    assert found == [72_000, 8_000, 888], "eight ninths of what was left, each"


@pytest.mark.parametrize(
    ("one", "another", "owner"),
    [({"user_id": 7}, {"user_id": 8}, "user 7"), ({"group": "a"}, {"group": "b"}, "slot a")],
)
def test_starting_more_programs_gives_nobody_more(one: dict[str, Any], another: dict[str, Any], owner: str) -> None:
    """Broken: the rule is evaded by a second process; or in Kubernetes, where everybody is root, one pod takes all."""
    harness = make_harness(900)
    first, second, other = harness.client(**one), harness.client(**one), harness.client(**another)
    assert all_it_gets(first) == 800
    assert all_it_gets(second) == 0
    refused = harness.notifications("refused")[-1]
    assert (refused["why"], refused["owner"]) == ("host share", owner)
    assert all_it_gets(other) == 88


def test_what_is_given_back_goes_to_those_who_have_less() -> None:
    """Broken: who came first keeps his advantage for ever, though he gives memory back and takes it again."""
    harness = make_harness(1_700)
    a, b = harness.client(user_id=1), harness.client(user_id=2)
    has, other = all_it_gets(a), all_it_gets(b)
    assert (has, other) == (1_511, 168)
    while ask(a, has - 10) and ask(a, has) < has:
        has -= 10
        other = all_it_gets(b, other)
    assert abs(has - other) <= 20, "only then it could have again what it gave back"
    assert 780 <= other <= 820


def test_a_refusal_says_why_to_the_program_too() -> None:
    """Broken: who may not ask the coordinator is out of memory and cannot find out by what."""
    harness = make_harness(9 << 30)
    a, b = harness.client(user_id=1), harness.client(user_id=2)
    assert ask(a, 4 << 30) == 4 << 30
    b.take(messages.Rejected)
    assert ask(b, 5 << 30) == 0
    (why,) = b.take(messages.Rejected)
    assert why.code == messages.Rejection.OUT_OF_MEMORY
    assert not why.final
    assert "user 2 has 0B, 5GiB of 9GiB are left" in why.text
    assert "8 times" in why.text


def test_a_promise_is_kept_when_others_come() -> None:
    """Broken: a share that data lies in is taken away, or given back and lost."""
    harness = make_harness(900)
    a, b = harness.client(user_id=1), harness.client(user_id=2)
    assert all_it_gets(a) == 800
    assert all_it_gets(b) == 88
    assert ask(a, 801) == 800, "no more while it has more than its part, and no less"
    assert ask(a, 780) == 780
    assert ask(a, 781) == 780, "it is above what it could get now"
    assert ask(b, 96) == 96, "the other one is not"


def test_the_share_of_the_dead_is_free_at_once() -> None:
    """Broken: invariant 6 for host memory."""
    harness = make_harness(900)
    a, b = harness.client(user_id=1), harness.client(user_id=2)
    ask(a, 800)
    a.die()
    assert ask(b, 800) == 800


def test_what_is_pinned_already_is_counted_after_a_restart() -> None:
    """Broken: a new coordinator gives away what is pinned already, or forgets it since the rule would not allow it."""
    harness = one_gpu(100, host_budget_bytes=900)
    later, first = harness.client(user_id=2), harness.client(user_id=1)
    assert ask(later, 88) == 88
    assert ask(first, 800) == 800, "more than it could get, and there all the same"
    assert ask(later, 95) == 88, "the second question is a wish"
    harness.milliseconds(1_100)
    assert ask(harness.client(user_id=3), 100) == 0, "so is anybody's first one when all have come back"


def test_the_first_second_gives_nobody_more_than_the_rule() -> None:
    """Broken: whoever asks right after a start has the whole budget, or more, and says that it is pinned already."""
    harness = one_gpu(100, host_budget_bytes=8_100)
    assert [ask(harness.client(user_id=1), 1 << 47) for _ in range(2)] == [7_200, 0]
    assert ask(harness.client(user_id=2), 1 << 47) == 800
    assert ask(harness.client(user_id=3), 10) == 10
    ones_own = Harness(create, host_budget_bytes=900, host_fair_times=0)
    ones_own.gpu(capacity=100)
    assert [ask(ones_own.client(), 600) for _ in range(2)] == [600, 300]


def test_a_process_that_comes_back_has_what_it_had() -> None:
    """Broken: a lost connection makes memory that is pinned be given to others."""
    harness = make_harness(900)
    a, b = harness.client(user_id=1, process_id=50), harness.client(user_id=2)
    assert ask(a, 800) == 800
    a.die()
    assert ask(b, 700) == 700
    assert ask(harness.client(user_id=1, process_id=50), 810) == 800, "as much as it had, and no more"
    assert shared(harness) == 1_500
    assert ask(b, 701) == 700


def test_that_is_soon_forgotten() -> None:
    """Broken: who gets the number of a process that died has what that had."""
    harness = make_harness(900)
    a, b = harness.client(user_id=1, process_id=50), harness.client(user_id=2)
    ask(a, 800)
    a.die()
    ask(b, 700)
    harness.milliseconds(5_000)
    assert ask(harness.client(user_id=1, process_id=50), 800) == 0


def test_the_budget_changes_while_programs_run() -> None:
    """Broken: lowering it takes memory away that holds data, or lets more be given."""
    harness = make_harness(100)
    a, b = harness.client(user_id=1), harness.client(user_id=2)
    ask(a, 80)
    harness.handle(events.Set("host_budget", 50))
    assert shared(harness) == 80
    assert ask(b, 10) == 0
    assert harness.notifications("refused")[-1]["why"] == "host"
    assert ask(a, 81) == 80
    harness.handle(events.Set("host_budget", 200))
    assert ask(b, 100) == 100


def test_what_the_host_has_no_room_for_is_not_admitted() -> None:
    """Broken: invariant 9, what is admitted could not be evicted."""
    harness = make_harness(budget=90)
    a = harness.client(mode=MemoryMode.SWAP, wanted=True)
    assert a.reserve(85) == 85, "it takes no part in the budget"
    b = harness.client(mode=MemoryMode.SWAP)
    ask(b, 10)
    assert b.reserve(81) == 0
    assert harness.notifications("refused")[-1]["why"] == "host"
    assert b.reserve(80) == 80


def test_what_was_moved_away_may_come_back_whatever_the_limits_are_now() -> None:
    """Broken: a lowered limit or budget shuts a program out of its own memory, and it tries again for ever."""
    harness = make_harness(budget=900)
    a = harness.client(mode=MemoryMode.SWAP, wanted=True)
    ask(a, 60)
    a.report(allocated=60, resident=20, host=40)
    harness.handle(events.Set("limit", 10, client=a.client))
    harness.handle(events.Set("host_budget", 1))
    assert a.reserve(60) == 60
    assert a.reserve(61) == 60, "but no more than that"
    assert harness.notifications("refused")[-1]["why"] == "limit"


def test_nobody_is_told_to_evict_what_the_host_has_no_room_for() -> None:
    """Broken: targets that must fail, while others could make the room."""
    harness = make_harness(budget=9)
    a, b = harness.client(mode=MemoryMode.SWAP, wanted=True), harness.client(mode=MemoryMode.SWAP)
    ask(a, 8)
    a.report(allocated=60, resident=60)
    b.report(allocated=60, resident=40, host=20)
    harness.milliseconds(100)
    b.request()
    a.release(wanted=True)
    assert a.told() == [52]


def test_memory_from_before_a_restart_can_be_evicted_though_its_share_is_refused() -> None:
    """Broken: shares exceed the budget, the coordinator restarts, and memory that nobody may evict blocks its GPU."""
    harness = one_gpu(100, host_budget_bytes=50, host_fair_times=0)
    a, b = harness.client(mode=MemoryMode.SWAP), harness.client(mode=MemoryMode.SWAP)
    assert ask(a, 60) == 50
    assert ask(b, 80) == 0
    b.report(allocated=80, resident=80)
    a.report(allocated=60, resident=20, host=40)
    a.request()
    assert b.told() == [40]
    assert ask(b, 81) == 0, "it is given no more"
    assert shared(harness) == 50


def test_a_claim_of_memory_from_before_a_restart_never_grows() -> None:
    """Broken: a program that has freed memory puts more on the host than it has a share for."""
    harness = one_gpu(100, host_budget_bytes=50, host_fair_times=0)
    a, b = harness.client(), harness.client(mode=MemoryMode.SWAP)
    ask(a, 50)
    for size in (80, 10, 80):
        assert ask(b, size) == 0
    b.report(allocated=80, resident=80)
    a.report(allocated=60, resident=20, host=40)
    a.request()
    assert b.told() == [70]


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
