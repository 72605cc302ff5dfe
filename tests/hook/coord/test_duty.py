"""The rate that a lease's gate holds (duty.c): the cycle by itself, and in real programs over the simulated GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.simulated_gpu.trace import Busy, read_trace
from tests.hook.compiled import SOURCE, compile_c
from tests.hook.conftest import StartClient
from tests.hook.coord.test_agent import MS, hold
from tests.hook.scripted import ScriptedClient, ScriptedCoordinator

S = 1_000 * MS
PERIOD_NS = 30 * MS
OFF, OPEN, CLOSING, CLOSED = range(4)


class Duty(ctypes.Structure):
    """nvs_duty."""

    _fields_ = (
        ("phase", ctypes.c_int),
        ("rate", ctypes.c_uint16),
        ("credit_ns", ctypes.c_int64),
        ("at_ns", ctypes.c_uint64),
        ("until_ns", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
    )


class Cycle:
    """A duty cycle, and a gate that follows it."""

    def __init__(self, library: ctypes.CDLL, rate: int) -> None:
        self.library = library
        self.duty = Duty()
        self.now = S
        self.calls = 0
        library.nvs_duty_init(ctypes.byref(self.duty))
        self.call("set_rate", rate, self.now)
        self.call("opened", self.now)

    def call(self, name: str, *arguments: int) -> bool:
        """One of its functions."""
        function = getattr(self.library, f"nvs_duty_{name}")
        first, *rest = arguments or (0,)
        kind = ctypes.c_uint32 if name == "set_rate" else ctypes.c_uint64
        return bool(function(ctypes.byref(self.duty), kind(first), *map(ctypes.c_uint64, rest)))

    def turn(self, drain_ns: int, late_ns: int = 0) -> int:
        """One cycle of a busy program.  The time that the gate and the drain took."""
        begin = self.now
        self.calls += 1
        self.now = self.duty.until_ns + late_ns
        assert self.call("begin_close", self.now, self.calls, 0)
        self.now += drain_ns
        self.call("drained", self.now, self.calls)
        used = self.now - begin
        self.now = self.duty.until_ns + late_ns
        self.call("opened", self.now)
        return used


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """duty.c."""
    out = tmp_path_factory.mktemp("duty") / "duty.so"
    loaded = ctypes.CDLL(str(compile_c(out, SOURCE / "coord/protocol/lease_machine.c", flags=("-shared", "-fPIC"))))
    loaded.nvs_duty_begin_close.restype = loaded.nvs_duty_wait_on.restype = ctypes.c_bool
    return loaded


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(20, 999),
    drains=st.lists(st.integers(0, 40 * MS), min_size=1, max_size=5),
    late_ns=st.integers(0, 2 * MS),
)
def test_share_over_ten_seconds(library: ctypes.CDLL, rate: int, drains: list[int], late_ns: int) -> None:
    """Broken: long drains or a late agent add up, and a program gets more or less than its rate."""
    cycle = Cycle(library, rate)
    used, drain = 0, itertools.cycle(drains)
    while cycle.now < 11 * S:
        used += cycle.turn(next(drain), late_ns)
    at_most = rate + 10
    assert used * 1000 / (cycle.now - S) <= at_most
    if max(drains) + 2 * late_ns <= PERIOD_NS * (1000 - rate) // 1000:  # else it asks for less than the rate
        assert used * 1000 / (cycle.now - S) >= rate - 10


def test_idle_time_earns_one_cycle(library: ctypes.CDLL) -> None:
    """Broken: a program that has been idle takes the GPU for as long afterwards, or its gate closes for nothing."""
    cycle = Cycle(library, 300)
    cycle.turn(0)
    for _ in range(1000):
        cycle.now = cycle.duty.until_ns
        assert not cycle.call("begin_close", cycle.now, cycle.calls, 0)
        assert cycle.duty.phase == OPEN
    begin = cycle.now
    used = sum(cycle.turn(0) for _ in range(10))
    assert used <= 0.3 * (cycle.now - begin) + 0.3 * PERIOD_NS


def test_first_phase_counts(library: ctypes.CDLL) -> None:
    """Broken: work from before the first rate is taken for an idle GPU, or a call under way for none."""
    cycle = Cycle(library, 300)
    assert cycle.call("begin_close", cycle.duty.until_ns, cycle.calls, 0)
    cycle = Cycle(library, 300)
    cycle.turn(0)
    assert cycle.call("begin_close", cycle.duty.until_ns, cycle.calls, 1)


def test_endless_drain_opens_the_gate(library: ctypes.CDLL) -> None:
    """Broken: work that waits for another thread's call never ends, as that waits for the drain."""
    cycle = Cycle(library, 300)
    assert cycle.call("begin_close", cycle.duty.until_ns, 1, 0)
    begin = cycle.now = cycle.duty.at_ns
    looks = 0
    while cycle.call("wait_on", cycle.now):
        looks += 1
        cycle.now = max(cycle.duty.until_ns, cycle.now + 5 * MS)
    assert cycle.now - begin >= S
    assert looks <= 200
    cycle.call("opened", cycle.now)
    assert cycle.duty.phase == OPEN
    assert cycle.duty.credit_ns < -500 * MS  # and it owes that time


def test_new_rates(library: ctypes.CDLL) -> None:
    """Broken: a higher rate waits for the end of a long phase, or the end of a limit leaves something behind."""
    cycle = Cycle(library, 10)
    assert cycle.call("begin_close", cycle.duty.until_ns, 1, 0)
    cycle.call("drained", cycle.duty.at_ns + 20 * MS, 1)
    now = cycle.duty.at_ns
    assert cycle.duty.until_ns - now > S
    cycle.call("set_rate", 500, now)
    assert cycle.duty.until_ns - now < 50 * MS
    cycle.call("set_rate", 0, now)
    assert cycle.duty.rate == 1
    assert cycle.duty.until_ns - now <= 10 * S
    cycle.call("set_rate", 1000, now)
    assert (cycle.duty.phase, cycle.duty.credit_ns) == (OFF, 0)
    cycle.call("opened", now)
    assert cycle.duty.phase == OFF


def allot(coordinator: ScriptedCoordinator, rate: int) -> None:
    """From now on."""
    coordinator.settings(rate=rate)


@pytest.fixture
def state(hook_env: dict[str, str]) -> Path:
    """State file of the simulated GPU."""
    return Path(hook_env["NVSHARE_SIM_STATE"])


def share(work: Sequence[Busy]) -> float:
    """The part of the time from the first start to the last end in which work ran; it is of one stream."""
    return sum(b.end_ns - b.start_ns for b in work) / (work[-1].end_ns - work[0].start_ns)


def run_until(state: Path, work: Callable[[], object], holds: Callable[[float], bool]) -> list[Busy]:
    """Repeats work until this holds of its share, which a busy machine moves either way; what ran last."""
    for _ in range(20):
        before = len(read_trace(state))
        work()
        done = read_trace(state)[before:]
        if holds(share(done)):
            return done
    pytest.fail(f"a share of {share(done)}")


def test_kernels(coordinator: ScriptedCoordinator, client: ScriptedClient, state: Path) -> None:
    """Broken: a program gets more than its rate, or keeps a limit that was taken back.

    That it gets no less: test_share_over_ten_seconds, as a busy machine starves the program itself.
    """

    def kernels() -> None:
        assert client.do(f"count 60 {MS}") == "counted"
        assert client.do("sync") == "synchronised"

    hold(coordinator, client)
    allot(coordinator, 30)
    run_until(state, kernels, lambda found: found < 0.045)
    allot(coordinator, 1000)
    run_until(state, kernels, lambda found: found > 0.12)
    assert coordinator.revoke(7).submissions == len(read_trace(state))


def owe(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """The gate is closed for seconds, and a thread waits before it."""
    hold(coordinator, client)
    allot(coordinator, 10)
    assert client.do(f"launch {100 * MS}") == "launched"
    assert client.do("sync") == "synchronised"
    assert client.do("background 1000") == "begun"
    while client.do("state").split()[4] != "1":
        pass


def test_revocation_while_closed(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a closed phase delays a revocation, or the next lease begins with the debt of this one."""
    owe(coordinator, client)
    release = coordinator.revoke(7)
    assert (release.drained, release.wanted, release.submissions) == (True, True, 2)
    coordinator.grant(8)
    assert client.answer() == "background launched"


def test_memory_grows_while_closed(coordinator: ScriptedCoordinator, start: StartClient) -> None:
    """Broken: memory that a program allocates before its closed gate keeps the gate closed."""
    client = start(NVSHARE_MEMORY="swap")
    hold(coordinator, client)
    allot(coordinator, 100)
    for _ in range(5):
        assert client.do(f"launch {10 * MS}") == "launched"
        assert client.do("sync") == "synchronised"
        assert client.do(f"alloc {64 << 20}") == "allocated"
    coordinator.settings(pacing_budget_ns=5 * MS, rate=100)
    assert client.do("launch 1000") == "launched"
    assert coordinator.revoke(7).submissions == 7


def test_limit_ends_while_closed(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: the gate stays closed when the limit ends."""
    owe(coordinator, client)
    allot(coordinator, 1000)
    assert client.answer() == "background launched"


def test_loss_while_closed(coordinator: ScriptedCoordinator, client: ScriptedClient) -> None:
    """Broken: a program keeps the limit of a coordinator that is gone."""
    owe(coordinator, client)
    coordinator.stop()
    assert client.answer() == "background launched"
