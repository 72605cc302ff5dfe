"""The client's lease state machine (lease_machine.c), step by step and against a model of what must always hold."""

from __future__ import annotations

import ctypes
import enum
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.coordinator.protocol import messages
from tests.hook.compiled import SOURCE, compile_c

PROGRAMS = Path(__file__).parent / "programs"
MS = 1_000_000
NEVER = 2**64 - 1


class On(enum.IntEnum):
    """nvs_lease_event_kind."""

    WANTED = 0
    CONNECTED = 1
    DISCONNECTED = 2
    GRANT = 3
    REVOKE = 4
    WAITERS = 5
    SETTINGS = 6
    TICK = 7
    BUSY = 8
    DRAINED = 9
    YIELD = 10
    NOT_MANAGED = 11


class Do(enum.IntFlag):
    """NVS_LEASE_DO_*."""

    NOTHING = 0
    CLOSE = 1
    RELEASE = 2
    ATTACH = 4
    REQUEST = 8
    OPEN = 16
    WARN = 32


NONE, ASKED, HELD, ENDING, FREE, FREE_ENDING, UNMANAGED, FORBIDDEN = range(8)
FIELDS = (
    "state", "lease_id", "wanted", "paced", "waiters", "released_id", "reason", "release_wanted", "end_by_ns", "open",
)  # fmt: skip


class Lease:
    """One lease of the C state machine."""

    def __init__(self, library: ctypes.CDLL, *, run_on_loss: bool = False) -> None:
        self._c = library
        self._at = ctypes.c_void_p(library.shim_new(int(run_on_loss), ctypes.c_uint64(1000 * MS)))
        self.now_ns = 1_000 * MS

    def __del__(self) -> None:
        self._c.shim_free(self._at)

    def on(self, kind: On, *, lease_id: int = 0, number: int = 0, other: int = 0, flag: bool = False) -> Do:
        """Tells it an event."""
        values = [ctypes.c_uint64(v) for v in (self.now_ns, lease_id, number, other)]
        return Do(self._c.shim_event(self._at, int(kind), *values, int(flag)))

    def use(self) -> Do:
        """The application begins to use the GPU."""
        return Do(self._c.shim_use(self._at, ctypes.c_uint64(self.now_ns)))

    def next_tick_ns(self) -> int:
        """When it wants to be asked."""
        return int(self._c.shim_next_tick(self._at, ctypes.c_uint64(self.now_ns)))

    def get(self, name: str) -> int:
        """One of FIELDS."""
        return int(self._c.shim_get(self._at, FIELDS.index(name)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("lease") / "lease.so"
    flags = ("-shared", "-fPIC", "-std=c11")
    machine = SOURCE / "coord/protocol/lease_machine.c"
    loaded = ctypes.CDLL(str(compile_c(out, machine, PROGRAMS / "lease_shim.c", flags=flags)))
    loaded.shim_new.restype = ctypes.c_void_p
    loaded.shim_get.restype = loaded.shim_next_tick.restype = ctypes.c_uint64
    return loaded


@pytest.fixture
def held(library: ctypes.CDLL) -> Lease:
    """Lease 5, nobody waiting, released after 2 ms of idleness."""
    lease = Lease(library)
    assert lease.on(On.CONNECTED) == Do.NOTHING
    assert lease.use() == Do.ATTACH
    assert lease.on(On.SETTINGS, other=2 * MS) == Do.NOTHING
    assert lease.on(On.WANTED) == Do.REQUEST
    assert lease.on(On.GRANT, lease_id=5) == Do.OPEN
    return lease


def test_revoked(held: Lease) -> None:
    """Broken: a revoked lease is not released exactly once, with the wish of those who wait."""
    assert held.on(On.REVOKE, lease_id=5, number=10 * MS) == Do.CLOSE
    assert held.get("end_by_ns") == held.now_ns + 10 * MS
    assert held.on(On.REVOKE, lease_id=5, number=10 * MS) == Do.NOTHING
    assert held.on(On.DRAINED, flag=True) == Do.RELEASE
    assert (held.get("released_id"), held.get("release_wanted")) == (5, 1)
    assert held.get("reason") == messages.ReleaseReason.REVOKED
    assert held.on(On.DRAINED) == Do.NOTHING
    assert held.on(On.WANTED) == Do.NOTHING, "the release asked already"
    assert held.on(On.GRANT, lease_id=6) == Do.OPEN


def test_idle_release(held: Lease) -> None:
    """Broken: an idle holder keeps a GPU that others wait for, or an active one loses it."""
    assert held.next_tick_ns() == NEVER, "nobody waits: nothing to do"
    held.on(On.WAITERS, lease_id=5, number=1)
    assert held.next_tick_ns() == held.now_ns + MS
    for calls in (1, 2, 3):
        held.now_ns += MS
        assert held.on(On.TICK, number=calls) == Do.NOTHING
    held.now_ns += 3 * MS
    assert held.on(On.TICK, number=3, flag=True) == Do.NOTHING, "a thread is inside a call"
    held.now_ns += MS
    assert held.on(On.TICK, number=3) == Do.NOTHING
    held.now_ns += MS
    assert held.on(On.TICK, number=3) == Do.CLOSE
    assert held.on(On.DRAINED) == Do.RELEASE
    assert held.get("reason") == messages.ReleaseReason.IDLE


def test_busy_after_all(held: Lease) -> None:
    """Broken: a lease is given back as idle while a long kernel runs."""
    held.on(On.WAITERS, lease_id=5, number=1)
    held.now_ns += 5 * MS
    assert held.on(On.TICK) == Do.CLOSE
    assert held.on(On.BUSY) == Do.OPEN
    assert held.get("state") == HELD
    assert held.on(On.TICK) == Do.NOTHING, "idleness is counted anew"
    held.now_ns += 5 * MS
    assert held.on(On.TICK) == Do.CLOSE
    held.on(On.REVOKE, lease_id=5, number=MS)
    assert held.on(On.BUSY) == Do.NOTHING, "revoked meanwhile: it ends"
    assert held.on(On.DRAINED) == Do.RELEASE


def test_a_long_kernel_is_not_disturbed_again_and_again(held: Lease) -> None:
    """Broken: looking whether a holder is idle closes its gate every few ms, or its end is noticed far too late."""
    held.on(On.WAITERS, lease_id=5, number=1)
    held.on(On.TICK, number=1)
    looks = []
    for ms in range(1, 201):
        held.now_ns += MS
        if held.on(On.TICK, number=1) == Do.CLOSE:
            looks.append(ms)
            assert held.on(On.BUSY) == Do.OPEN
    assert looks[:5] == [2, 6, 14, 30, 62], "twice as late each time"
    assert all(after - before == 32 for before, after in itertools.pairwise(looks[4:])), "within a bound"
    held.now_ns += MS
    assert held.on(On.TICK, number=1, flag=True) == Do.NOTHING, "it waits for its kernel in a call"
    held.now_ns += 2 * MS
    assert held.on(On.TICK, number=1) == Do.CLOSE, "which has come back: as soon as ever"


def test_pacing_follows_the_settings(held: Lease) -> None:
    """Broken: a holder alone pays for pacing, or one among others is not paced."""
    assert held.get("paced") == 0
    assert held.on(On.SETTINGS, number=10 * MS, other=2 * MS) == Do.OPEN
    assert held.get("paced") == 1
    assert held.on(On.SETTINGS, number=20 * MS, other=2 * MS) == Do.NOTHING
    assert held.on(On.SETTINGS, other=2 * MS) == Do.OPEN
    assert held.get("paced") == 0


def test_holder_survives_the_loss_and_claims(held: Lease) -> None:
    """Broken: the application stops when the coordinator dies, or two hold the lease afterwards."""
    held.on(On.WAITERS, lease_id=5, number=2)
    assert held.on(On.DISCONNECTED) == Do.NOTHING
    assert (held.get("open"), held.get("waiters"), held.next_tick_ns()) == (1, 0, NEVER)
    assert held.on(On.CONNECTED) == Do.ATTACH
    assert held.get("lease_id") == 5
    assert held.on(On.GRANT, lease_id=5, number=1) == Do.OPEN
    assert held.get("waiters") == 1


def test_loss_while_draining(held: Lease) -> None:
    """Broken: a lease that was drained without a connection is claimed or released later."""
    held.on(On.REVOKE, lease_id=5, number=MS)
    held.on(On.DISCONNECTED)
    assert held.on(On.DRAINED, flag=True) == Do.NOTHING
    assert held.on(On.CONNECTED) == Do.ATTACH
    assert (held.get("lease_id"), held.get("wanted"), held.get("state")) == (0, 1, ASKED)


def test_claim_while_draining(held: Lease) -> None:
    """Broken: a lease that is claimed in the middle of its drain is never released."""
    held.on(On.REVOKE, lease_id=5, number=MS)
    held.on(On.DISCONNECTED)
    assert held.on(On.CONNECTED) == Do.ATTACH
    assert held.get("lease_id") == 5
    assert held.on(On.GRANT, lease_id=5) == Do.NOTHING
    assert held.on(On.DRAINED) == Do.RELEASE


def test_refused_claim_does_not_bind_the_numbering(held: Lease) -> None:
    """Broken: a coordinator that lost its journal and counts from one again can never grant to a former holder."""
    held.on(On.DISCONNECTED)
    held.on(On.CONNECTED)
    assert held.on(On.REVOKE, lease_id=5) == Do.CLOSE
    assert held.on(On.DRAINED, flag=True) == Do.RELEASE
    assert held.on(On.GRANT, lease_id=5) == Do.NOTHING
    assert held.on(On.GRANT, lease_id=2) == Do.OPEN
    assert held.on(On.GRANT, lease_id=1) == Do.NOTHING


def test_run_on_loss(library: ctypes.CDLL) -> None:
    """Broken: NVSHARE_ON_LOSS=run does not run, runs too early, or goes on beside a coordinator that is back."""
    lease = Lease(library, run_on_loss=True)
    lease.on(On.WANTED)
    assert lease.next_tick_ns() == lease.now_ns + 1000 * MS
    lease.now_ns += 999 * MS
    assert lease.on(On.TICK) == Do.NOTHING
    lease.now_ns += MS
    assert lease.on(On.TICK) == Do.OPEN | Do.WARN
    assert lease.on(On.CONNECTED) == Do.CLOSE
    assert lease.get("open") == 0
    assert lease.on(On.DRAINED, flag=True) == Do.ATTACH
    assert lease.get("state") == ASKED


def test_yield_only_for_somebody(held: Lease) -> None:
    """Broken: nvshare_yield costs a program that is alone its lease, or does nothing for one that is not."""
    held.on(On.WAITERS, lease_id=4, number=1)
    assert held.on(On.YIELD) == Do.NOTHING, "they wait for an older lease"
    held.on(On.WAITERS, lease_id=5, number=1)
    assert held.on(On.YIELD) == Do.CLOSE
    assert held.on(On.BUSY) == Do.NOTHING
    assert held.on(On.DRAINED) == Do.RELEASE


def test_not_managed_is_open_for_good(held: Lease) -> None:
    """Broken: a GPU that the coordinator does not know blocks the program."""
    assert held.on(On.NOT_MANAGED) == Do.OPEN
    for kind in On:
        assert held.on(kind, lease_id=5, number=1) == Do.NOTHING
        assert held.get("open") == 1


def test_forbidden_is_closed_for_good(library: ctypes.CDLL, held: Lease) -> None:
    """Broken: a GPU that the program may not use opens, by a reconnection, a grant or NVSHARE_ON_LOSS=run."""
    lease = Lease(library, run_on_loss=True)
    lease.on(On.CONNECTED)
    lease.on(On.WANTED)
    assert lease.on(On.NOT_MANAGED, flag=True) == Do.NOTHING
    for kind in On:
        assert lease.on(kind, lease_id=5, number=1) == Do.NOTHING
        assert (lease.get("open"), lease.next_tick_ns()) == (0, NEVER)
    assert held.on(On.NOT_MANAGED, flag=True) == Do.CLOSE
    assert held.on(On.DRAINED, flag=True) == Do.NOTHING
    assert held.get("open") == 0


class Model:
    """Invariants of every sequence of events.  Plays the agent and remembers its messages to the coordinator."""

    def __init__(self, lease: Lease, *, run_on_loss: bool) -> None:
        self.lease = lease
        self.run_on_loss = run_on_loss
        self.connected = self.attached = self.asked = self.gate_open = self.closing = False
        self.waiting = False
        self.granted: set[int] = set()
        self.released: list[int] = []
        self.newest = 0

    def told(self, todo: Do) -> None:
        """Carries out what the state machine answered."""
        lease = self.lease
        if todo & Do.CLOSE:
            assert not self.closing, "closed twice"
            self.gate_open, self.closing = False, True
        if todo & Do.RELEASE:
            assert not self.gate_open, "released with the gate open"
            assert not self.closing, "released before it was drained"
            assert self.attached, "released to nobody"
            released = lease.get("released_id")
            assert released in self.granted - set(self.released), "released what was not held, or twice"
            self.released.append(released)
            self.asked = bool(lease.get("release_wanted"))
        if todo & Do.ATTACH:
            assert (self.connected, self.attached) == (True, False), "attached twice on a connection"
            self.attached, self.asked = True, bool(lease.get("wanted"))
            assert lease.get("lease_id") in {0, *self.granted} - set(self.released), "claims what it does not hold"
        if todo & Do.REQUEST:
            assert (self.attached, self.asked) == (True, False), "asked twice"
            self.asked = True
        if todo & Do.OPEN:
            self.gate_open, self.closing, self.waiting = True, False, False

    def check(self) -> None:
        """The invariants of lease_machine.h."""
        state, held = self.lease.get("state"), self.lease.get("lease_id")
        assert self.gate_open == bool(self.lease.get("open"))
        if self.gate_open:
            assert held in self.granted or (state == FREE and self.run_on_loss and not self.connected), (
                "open without a lease"
            )
        assert not (held and held in self.released), "holds what it gave back"
        if self.waiting and self.attached and not self.gate_open and not self.closing:
            assert self.asked, "a thread waits and nobody was asked"

    def step(self, action: int, number: int, flag: bool) -> None:
        """One thing that can happen."""
        lease = self.lease
        lease.now_ns += number * MS // 4
        held = lease.get("lease_id")
        if action == 0 and not self.gate_open:
            self.waiting = True
            if not self.closing:
                self.told(lease.on(On.WANTED))
        elif action == 1 and not self.connected:
            self.connected, self.attached, self.asked = True, False, False
            self.newest = max(self.newest, held)
            self.told(lease.on(On.CONNECTED))
        elif action == 2 and self.connected:
            self.connected = self.attached = self.asked = False
            self.told(lease.on(On.DISCONNECTED))
        elif action == 3 and self.attached:  # a right grant
            if not held and not self.closing:
                self.newest += 1
                self.granted.add(self.newest)
                self.asked = False
                todo = lease.on(On.GRANT, lease_id=self.newest, number=number % 3)
                assert todo == Do.OPEN, "a grant did not open the gate"
                self.told(todo)
        elif action == 4 and self.attached and held:  # a right revoke
            before = lease.get("state")
            todo = lease.on(On.REVOKE, lease_id=held, number=10 * MS)
            assert (todo == Do.CLOSE) == (before == HELD), "a revoke must end the lease"
            self.told(todo)
        elif action == 5:  # stale messages
            kind = [On.GRANT, On.REVOKE, On.WAITERS][number % 3]
            stale = self.newest - 1 - number % 2
            if stale > 0 and stale != held:
                everything = [lease.get(name) for name in FIELDS]
                assert lease.on(kind, lease_id=stale, number=number) == Do.NOTHING, "a stale message had an effect"
                assert everything == [lease.get(name) for name in FIELDS]
        elif action == 6:
            self.told(lease.on(On.WAITERS, lease_id=held, number=number % 3))
        elif action == 7:
            self.told(lease.on(On.TICK, number=number if flag else 0, flag=flag))
        elif action == 8 and self.closing:
            self.told(lease.on(On.BUSY))
        elif action == 9 and self.closing:
            before_id, connected = held, self.attached
            self.closing = False
            todo = lease.on(On.DRAINED, flag=self.waiting)
            assert bool(todo & Do.RELEASE) == (bool(before_id) and connected), "a lease ends with one release"
            self.told(todo)
        elif action == 10:
            self.told(lease.on(On.SETTINGS, number=number * flag, other=2 * MS))
        elif action == 11:
            self.told(lease.on(On.YIELD))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.booleans(), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5000), st.booleans()), min_size=5, max_size=80)
)
def test_always(library: ctypes.CDLL, run_on_loss: bool, steps: list[tuple[int, int, bool]]) -> None:
    """Broken: some order of events opens the gate without a lease, loses a request, or releases twice or never."""
    model = Model(Lease(library, run_on_loss=run_on_loss), run_on_loss=run_on_loss)
    for step in steps:
        model.step(*step)
        model.check()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(list(On)), st.integers(0, 6), st.integers(0, 5), st.booleans()), max_size=60))
def test_any_messages(library: ctypes.CDLL, steps: list[tuple[On, int, int, bool]]) -> None:
    """Broken: messages in an order that no coordinator would send crash it or leave the gate open without a lease."""
    lease = Lease(library)
    for kind, lease_id, number, flag in steps:
        lease.on(kind, lease_id=lease_id, number=number, other=MS, flag=flag)
        if lease.get("open"):
            assert lease.get("lease_id") != 0 or lease.get("state") == UNMANAGED
