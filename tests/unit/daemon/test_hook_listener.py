"""The hooks' listening socket by itself: who is served, who is cut, and that nothing that one does stops the others.

Invariant: the test plays the loop: nothing is read or written unless it says so.  Non-goals: what frames mean.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from nvshare.coordinator.daemon import transport
from nvshare.coordinator.daemon.peers import Limits
from nvshare.coordinator.daemon.transport import PeerListener
from nvshare.coordinator.protocol import framing
from tests.waiting import BOUND_S

FOR_EVER_NS = 10**18
ROUNDS = 10_000
"""More than anything here takes."""


class Client:
    """The other end, read and written by hand."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.settimeout(BOUND_S)
        self._protocol = framing.Connection(b"DEALER", frozenset({b"ROUTER"}), 1 << 20)
        self.shaken = framing.GREETING + framing.ready(b"DEALER")
        """To be sent for the handshake."""

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: bytes) -> None:
        self.socket.sendall(b"".join(map(framing.frame, messages)))

    def heard(self) -> list[bytes]:
        """All that was said until the other end closed."""
        found: list[bytes] = []
        with suppress(ConnectionResetError):  # comes after the data, if something of ours was left unread
            while data := self.socket.recv(65_536):
                found += self._protocol.feed(data)
        return found

    def next(self) -> list[bytes]:
        """Messages that one read completes."""
        data = self.socket.recv(65_536)
        assert data, "closed"
        return self._protocol.feed(data)


class Bench:
    """A listener, its clients, and the loop between them."""

    def __init__(self, stack: ExitStack, limits: Limits) -> None:
        self._stack = stack
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nvs-"))
        self.path = Path(folder) / "hooks.sock"
        self.listener = PeerListener(self.path, 0o600, limits)
        stack.callback(self.listener.close)
        self.now_ns = 0
        self.gone: list[int] = []
        self.frames: list[tuple[int, bytes]] = []

    def client(self, *, greets: bool = True) -> Client:
        """One that is connected; `greets`: has begun to shake hands."""
        made = Client(self.path)
        self._stack.callback(made.close)
        if greets:
            made.socket.sendall(made.shaken)
        return made

    def turn(self) -> None:
        """As the server's loop does it."""
        gone, frames = self.listener.receive(self.now_ns)
        self.gone += gone
        self.frames += frames
        self.listener.flush()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Turns until it holds."""
        for _ in range(ROUNDS):
            if condition():
                return
            self.turn()
        raise AssertionError(f"waited in vain: {what}")

    def introduce(self, client: Client, text: bytes = b"hello") -> int:
        """Has a client say something; its connection's number."""
        client.send(text)
        before = len(self.frames)
        self.until(lambda: len(self.frames) > before, "the first message")
        number, content = self.frames[-1]
        assert content == text
        return number


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes listeners with these limits."""
    with ExitStack() as stack:
        yield lambda **limits: Bench(stack, Limits(**limits))


Make = Callable[..., Bench]


def test_messages_come_with_who_sent_them(bench: Make) -> None:
    """Broken: two clients are mixed up, or one's identity is not what the kernel says."""
    stand = bench()
    numbers = [stand.introduce(stand.client(), text) for text in (b"one", b"two")]
    assert len(set(numbers)) == 2
    for number in numbers:
        peer = stand.listener.peer(number)
        assert peer is not None
        assert (peer.process_id, peer.user_id) == (os.getpid(), os.getuid())
    assert stand.listener.peer(max(numbers) + 1) is None


def test_answers_arrive_in_order_however_slowly_they_are_read(bench: Make) -> None:
    """Broken: what the kernel does not take at once is lost, doubled or reordered."""
    stand = bench(queued_bytes=1 << 22)
    client = stand.client()
    number = stand.introduce(client)
    said = [str(count).encode() * (count % 97) for count in range(5000)]
    for message in said:
        stand.listener.send(number, message)
        stand.listener.flush()
    heard: list[bytes] = []
    while len(heard) < len(said):
        heard += client.next()
        stand.turn()
    assert heard == said
    assert stand.gone == []


def test_a_deaf_peer_is_cut_and_others_are_served(bench: Make) -> None:
    """Broken: one client that does not read fills the coordinator's memory, or stops its loop."""
    stand = bench(queued_bytes=10_000)
    deaf, good = stand.client(), stand.client()
    deaf_number, good_number = stand.introduce(deaf), stand.introduce(good)
    for _ in range(ROUNDS):
        stand.listener.send(deaf_number, b"x" * 500)
        stand.turn()
        if stand.gone:
            break
    assert stand.gone == [deaf_number]
    stand.listener.send(deaf_number, b"nobody")  # no error: it is gone, that is all
    stand.listener.send(good_number, b"for you")
    stand.turn()
    assert good.next() == [b"for you"]


def test_refusing_delivers_the_last_frame_and_closes(bench: Make) -> None:
    """Broken: a client is turned away without a word, or its end is told as if it had been one."""
    stand = bench()
    client = stand.client()
    number = stand.introduce(client)
    stand.listener.refuse(number, b"no, because", "a test")
    assert client.heard() == [b"no, because"]
    stand.turn()
    assert stand.gone == []
    assert stand.listener.refusals.total() == 1
    assert stand.listener.peer(number) is None
    stand.listener.refuse(number, b"again", "a test")
    assert stand.listener.refusals.total() == 1


def test_refusing_a_deaf_peer_does_not_wait(bench: Make) -> None:
    """Broken: the coordinator waits for a client that it wants to be rid of."""
    stand = bench(queued_bytes=1 << 30)
    client = stand.client()
    number = stand.introduce(client)
    for _ in range(1000):
        stand.listener.send(number, b"x" * 500)
    stand.turn()
    stand.listener.refuse(number, b"no", "a test")
    assert len(stand.listener) == 0


def test_an_end_is_told_once_and_only_of_those_who_spoke(bench: Make) -> None:
    """Broken: a lease of a client that left stays, or a client that never was is taken for one."""
    stand = bench()
    spoke, silent = stand.client(), stand.client()
    number = stand.introduce(spoke)
    stand.until(lambda: len(stand.listener) == 2, "both connections")
    for client in (spoke, silent):
        client.close()
    stand.until(lambda: len(stand.listener) == 0, "their ends")
    stand.turn()
    assert stand.gone == [number]


def test_what_was_said_before_the_end_is_heard_first(bench: Make) -> None:
    """Broken: the goodbye or the release of a program that ends at once is lost."""
    stand = bench()
    client = stand.client()
    number = stand.introduce(client)
    client.send(b"one", b"two")
    client.close()
    stand.until(lambda: stand.gone, "the end")
    assert stand.frames[1:] == [(number, b"one"), (number, b"two")]


def test_silent_connections_expire_and_others_stay(bench: Make) -> None:
    """Broken: connections that never introduce themselves stay for ever, or those that did are cut."""
    stand = bench(hello_ns=100)
    stand.now_ns = 1000
    good, silent = stand.client(), stand.client(greets=False)
    stand.listener.greeted(stand.introduce(good))
    stand.until(lambda: len(stand.listener) == 2, "both connections")
    assert stand.listener.next_deadline_ns() == 1100
    stand.listener.expire(1099)
    assert len(stand.listener) == 2
    stand.listener.expire(1100)
    assert len(stand.listener) == 1
    assert silent.heard() == []
    assert stand.listener.next_deadline_ns() is None
    assert stand.gone == []


def test_connections_that_end_leave_nothing_beside_a_silent_one(bench: Make) -> None:
    """Broken: connections that come and go fill the memory for as long as one silent connection stays."""
    stand = bench()
    stand.client(greets=False)
    for _ in range(20):
        stand.client().close()
    stand.client()
    stand.until(lambda: stand.listener._last_number == 22 and len(stand.listener) == 2, "the ends")
    assert len(stand.listener._deadlines) == 2


def test_a_flood_is_cut_but_the_same_over_time_is_not(bench: Make) -> None:
    """Broken: one client keeps the loop busy, or a busy client is cut though it keeps to the rate."""
    stand = bench(messages_per_s=10)
    patient, flooder = stand.client(), stand.client()
    for count in range(50):
        stand.now_ns = count * 200_000_000
        stand.introduce(patient, str(count).encode())
    number = stand.introduce(flooder)
    flooder.send(*[b"x"] * 200)
    stand.until(lambda: stand.gone, "the flooder's end")
    assert stand.gone == [number]


def test_a_flood_of_one_user_delays_no_other(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the messages of a user's many connections are all handled before another user's one."""
    stand = bench()
    user = 7
    monkeypatch.setattr(transport, "peer_of", lambda _: (4711, user))
    flooders = [stand.client() for _ in range(50)]
    numbers = [stand.introduce(flooder) for flooder in flooders]
    user = 8
    other = stand.client()
    number = stand.introduce(other)
    for _ in range(3):
        for flooder in flooders:
            flooder.send(*[b"x"] * 100)
        other.send(b"wanted")
        stand.frames.clear()
        stand.turn()
        assert (number, b"wanted") in stand.frames
        assert len(stand.frames) < 50
    stand.until(lambda: not stand.listener.pending and {n for n, _ in stand.frames} >= {*numbers}, "all are heard")


@pytest.mark.parametrize("one", [framing.frame(b"x"), b"\x04\x07\x04PING\x00\x00"])
def test_the_bound_on_messages_is_one_for_all_connections_of_a_user(
    one: bytes, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: more connections send more, pings count for nothing, or a quiet program pays for its user's others."""
    stand = bench(messages_per_s=1000)
    user = 7
    monkeypatch.setattr(transport, "peer_of", lambda _: (4711, user))
    quiet, *flooders = (stand.client() for _ in range(11))
    stand.introduce(quiet)
    numbers = {stand.introduce(flooder) for flooder in flooders}
    user = 8
    stand.introduce(stand.client())
    for flooder in flooders:
        flooder.socket.sendall(one * 150)
    stand.until(lambda: len(stand.gone) > 3, "an end")
    stand.turn()
    assert set(stand.gone) < numbers, "those that sent the most, until the rest is within the bound"


def test_no_more_connections_than_allowed(bench: Make) -> None:
    """Broken: connections without bound use up the coordinator's descriptors."""
    stand = bench(connections=2)
    first = stand.client()
    number = stand.introduce(first)
    stand.introduce(stand.client())
    third = stand.client(greets=False)
    stand.until(lambda: stand.listener.refusals.total() == 1, "the refusal")
    assert third.heard() == []
    first.close()
    stand.until(lambda: stand.gone == [number], "a free place")
    assert stand.introduce(stand.client()) > number


def test_without_a_free_descriptor_peers_are_refused(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a peer that cannot be accepted wakes the loop for ever, and it takes all of a processor."""
    stand = bench()
    number = stand.introduce(stand.client())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = stand.client(greets=False)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        stand.turn()
        assert stand.listener.refusals["full"] == 1
        assert not select.select([stand.listener.descriptor], [], [], 0)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert late.heard() == []
    assert stand.introduce(stand.client()) > number


def test_no_more_connections_of_one_user_than_allowed(
    bench: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: one user's silent connections keep the other users out, or nobody hears of it."""
    stand = bench(connections=4, connections_per_user=2)
    user = 7
    monkeypatch.setattr(transport, "peer_of", lambda _: (4711, user))
    silent = [stand.client(greets=False) for _ in range(5)]
    stand.until(lambda: stand.listener.refusals["user"] == 3, "the refusals")
    assert len(stand.listener) == 2
    assert silent[-1].heard() == []
    user = 8
    number = stand.introduce(stand.client())
    peer = stand.listener.peer(number)
    assert peer is not None
    assert peer.user_id == 8
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "refused process 4711 (user 7): this user already has 2 connections; raise max_clients for more "
        "(1 refusals so far)"
    ], "one line a second"
    silent[0].close()
    user = 7
    stand.until(lambda: len(stand.listener) == 2, "a free place")
    stand.introduce(stand.client())


@pytest.mark.parametrize("bad", [b"\x01\x01x", b"\x02" + (1 << 40).to_bytes(8, "big"), b"\x80\x00"])
def test_a_breach_after_the_handshake_is_handed_on_as_an_empty_frame(bench: Make, bad: bytes) -> None:
    """Broken: a client is cut without learning why, or goes on being read."""
    stand = bench()
    client = stand.client()
    number = stand.introduce(client)
    client.socket.sendall(bad)
    stand.until(lambda: len(stand.frames) > 1, "the breach")
    assert stand.frames[1:] == [(number, b"")]
    client.socket.sendall(framing.frame(b"more"))
    for _ in range(5):
        stand.turn()
    assert len(stand.frames) == 2
    stand.listener.refuse(number, b"malformed", "a test")
    assert client.heard() == [b"malformed"]


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n", framing.GREETING + framing.frame(b"early")])
def test_a_breach_before_the_handshake_is_cut(bench: Make, bad: bytes) -> None:
    """Broken: something that is no ZeroMQ peer reaches the coordinator, or is kept."""
    stand = bench()
    client = stand.client(greets=False)
    client.socket.sendall(bad)
    stand.until(lambda: stand.listener.refusals.total() == 1, "the end")
    assert (stand.frames, stand.gone, len(stand.listener)) == ([], [], 0)


def test_staying_awake_ends_with_data(bench: Make) -> None:
    """Broken: the message that was waited for lies there until the time is over (here: never), or is lost."""
    stand = bench()
    client = stand.client()
    stand.introduce(client)
    sender = threading.Thread(target=client.send, args=(b"now",))
    sender.start()
    stand.listener.stay_awake(time.monotonic_ns() + FOR_EVER_NS)
    sender.join()
    stand.turn()
    assert stand.frames[-1][1] == b"now"


def test_staying_awake_ends_with_its_time(bench: Make) -> None:
    """Broken: with nobody saying anything the coordinator never gets on."""
    stand = bench()
    stand.listener.stay_awake(time.monotonic_ns())
    stand.turn()
    assert stand.frames == []


def test_closing_hands_out_what_is_queued_and_leaves_no_file() -> None:
    """Broken: the last words of a coordinator that stops are lost, or its socket stays behind."""
    with ExitStack() as stack:
        stand = Bench(stack, Limits())
        client = stand.client()
        number = stand.introduce(client)
        stand.listener.send(number, b"goodbye")
        path = stand.path
        stand.listener.close()
        stack.pop_all()
        assert client.heard() == [b"goodbye"]
        assert not path.exists()
