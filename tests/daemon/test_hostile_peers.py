"""Peers that send anything: each test ends with a good client that is served, and never loses the lease over it."""

from __future__ import annotations

import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from nvshare.bench.harness.wire_client import GREETING, Link, frame, ready
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import ControlCaller
from nvshare.coordinator.protocol import messages
from tests.daemon.made_up_gpus import uuid_of
from tests.daemon.processes import Coordinators, Hook, Running
from tests.waiting import BOUND_S, eventually

Connect = Callable[..., Hook]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One coordinator for all tests that change nothing in it."""
    with tempfile.TemporaryDirectory(prefix="nvs-") as base:
        running = Coordinators(Path(base)).start()
        yield running
        running.kill()


@pytest.fixture
def served(shared: Running, connect: Connect) -> Iterator[Running]:
    """A coordinator with one client, which still holds its lease afterwards while a newcomer is served."""
    coordinator = shared
    eventually(lambda: coordinator.ask(api.Ping())["clients"] == 0, "the end of the test before")
    holder = connect(coordinator).hello("good").attach(wanted=True)
    lease = holder.next(messages.Grant)
    yield coordinator
    assert coordinator.process.poll() is None, coordinator.log.read_text()
    assert connect(coordinator).hello("newcomer").next(messages.Welcome)
    names = [client["name"] for client in coordinator.status()["clients"]]
    assert "good" in names
    holder.release(lease.lease_id, wanted=True)
    assert holder.next(messages.Grant).lease_id > lease.lease_id


def closed(link: Link | socket.socket) -> bool:
    """Whether the other side ended the connection; what else it says is skipped."""
    raw = link.socket if isinstance(link, Link) else link
    raw.settimeout(BOUND_S)
    try:
        while raw.recv(65_536):
            pass
    except ConnectionError:
        return True
    return True


def refusal(hook: Hook) -> messages.Rejected:
    rejected = hook.next(messages.Rejected)
    assert rejected.final
    return rejected


def test_random_bytes_on_every_socket(served: Running) -> None:
    """Broken if bytes that are no ZMTP could hurt; the seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for path in (served.directory.hooks_socket, served.directory.control_socket, served.directory.events_socket):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.settimeout(BOUND_S)
                try:
                    raw.sendall(chance.randbytes(chance.randrange(1, 4000)))
                except (BrokenPipeError, ConnectionResetError):
                    continue


def test_random_frames_after_a_handshake(served: Running) -> None:
    """Broken if frames that are no messages could hurt; the seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(60):
        link = Link(served.directory.hooks_socket)
        if number % 2:
            link.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "bad", "bad", 1, 0)))
        for _ in range(5):
            content = chance.randbytes(chance.randrange(0, 200))
            if number % 3:
                content = msgpack.packb([chance.randrange(0, 12), *(chance.randrange(-9, 99) for _ in range(9))])
            try:
                link.send(content)
            except ConnectionError:
                break
        link.close()


def test_a_chosen_identity_means_nothing(served: Running, connect: Connect) -> None:
    """Broken if a client could take the place of another by the routing id that it asks for."""
    links = [Link(served.directory.hooks_socket, identity=identity) for identity in (b"mine", b"mine", b"\0" * 5)]
    for link in links:
        link.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "same", "bad", 1, 0)))
    eventually(lambda: served.ask(api.Ping())["clients"] == 1 + len(links), "one client for each connection")
    for link in links:
        link.close()
    eventually(lambda: served.ask(api.Ping())["clients"] == 1, "their end")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (messages.Release, [0, 1, 0, True, False, 0, 0, (1 << 48) + 1]),
        (messages.State, [0, 0, 0, 0, 0, messages.MOST_BYTES + 1]),
        (messages.State, [messages.HOST, *13 * [0], 1, (1 << 64) - 1]),
    ],
)
def test_a_number_that_cannot_be_is_refused(
    served: Running, connect: Connect, kind: type[messages.Message], fields: list[object]
) -> None:
    """Broken if sums of what clients say could overflow, and end whoever reads them."""
    hook = connect(served).hello().attach()
    hook.next(messages.GpuSettings)
    hook.socket.send(msgpack.packb([kind.TYPE, *fields]))
    assert "is not allowed" in refusal(hook).text
    assert served.status()["gpus"]


def test_nothing_that_a_peer_nests_ends_the_coordinator(served: Running, connect: Connect) -> None:
    """Broken if one frame of nested arrays or maps could end the coordinator, with a hello or without."""
    before, deep = served.ask(api.Ping())["pid"], b"\x91" * 1010 + b"\xc0"
    for hook in (connect(served), connect(served).hello("nests")):
        hook.socket.send(bytes((0x92, messages.Request.TYPE)) + deep)
        assert "an array is not allowed" in refusal(hook).text
    caller = ControlCaller(served.directory.control_socket)
    for nested in (deep, b"\x81\xa1a" * 300 + b"\xc0"):
        with pytest.raises(api.ControlError, match="plain values"):
            api.decode_reply(caller.call(b"\x82\xa7version\x01\xa3ask" + nested))
    caller.close()
    assert served.ask(api.Ping())["pid"] == before
    assert "Traceback" not in served.log.read_text()


def test_another_protocol_version_is_told_the_remedy(served: Running, connect: Connect) -> None:
    """Broken if an old hook were served by rules that it does not know, or left without an answer."""
    hook = connect(served)
    hook.socket.send(msgpack.packb([1, 1, "old", "python", 7, -3, 1, 0, "0.1.0", 300, "pair", "", True]))
    rejected = refusal(hook)
    assert rejected.code == messages.Rejection.PROTOCOL_VERSION
    assert "same nvshare version" in rejected.text


def test_hello_is_said_once(served: Running, connect: Connect) -> None:
    """Broken if a client could become two."""
    hook = connect(served).hello()
    hook.next(messages.Welcome)
    assert "second Hello" in refusal(hook.hello()).text


def test_an_unknown_gpu_and_an_unknown_message_cost_only_themselves(served: Running, connect: Connect) -> None:
    """Broken if a newer hook, or one with a card that is not served, lost its connection."""
    hook = connect(served).hello()
    hook.send(messages.AttachGpu(0, "GPU-nowhere", 0, True, 0, 0, 0))
    assert hook.next(messages.Rejected).code == messages.Rejection.UNKNOWN_GPU
    hook.socket.send(msgpack.packb([200, "new"]))
    unknown = hook.next(messages.Rejected)
    assert (unknown.code, unknown.final) == (messages.Rejection.UNKNOWN_MESSAGE, False)
    assert hook.attach().next(messages.GpuSettings)


def test_a_refused_client_is_cut(served: Running) -> None:
    """Broken if a client that broke the protocol kept its connection, or could go on over it."""
    link = Link(served.directory.hooks_socket)
    link.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "bad", "bad", 1, 0)))
    link.send(b"\xc1")
    assert closed(link)


def test_a_flood_costs_the_flooder_its_connection(coordinators: Coordinators, connect: Connect) -> None:
    """Broken if one client could keep the coordinator busy."""
    running = coordinators.start("--log-level", "error", NVSHARE_MAX_MESSAGES_PER_S="200")
    link = Link(running.directory.hooks_socket)
    link.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "flood", "bad", 1, 0)))
    link.send(messages.encode(messages.AttachGpu(0, uuid_of(0), 0, False, 0, 0, 0)))
    flood = frame(messages.encode(messages.State(0, 0, 0, 0, 0, 0))) * 2_000
    try:
        link.socket.sendall(flood)
    except ConnectionError:
        pass
    else:
        assert closed(link)
    eventually(lambda: running.ask(api.Ping())["clients"] == 0, "the flooder's end")
    assert connect(running).hello().next(messages.Welcome)


def test_a_name_cannot_steer_a_terminal(served: Running, connect: Connect) -> None:
    """Broken if a client's name could print escape sequences on an operator's terminal."""
    connect(served).hello("\x1b[2Jx\nroot").next(messages.Welcome)
    assert {client["name"] for client in served.status()["clients"]} == {"good", "?[2Jx?root"}


def test_garbage_on_the_control_socket_is_answered(served: Running) -> None:
    """Broken if a wrong request stopped the coordinator or stayed without an answer."""
    caller = ControlCaller(served.directory.control_socket)
    version = api.CONTROL_VERSION
    for request in (
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb({"version": 99, "ask": "status"}),
        msgpack.packb({"version": version, "ask": "destroy"}),
        msgpack.packb({"version": version, "ask": "pause"}),
        msgpack.packb({"version": version, "ask": "pause", "client": "x" * 999}),
        msgpack.packb({"version": version, "ask": "set", "setting": "quantum", "value": 1}),
        msgpack.packb({"version": version, "ask": "status", "more": 1}),
    ):
        with pytest.raises(api.ControlError):
            api.decode_reply(caller.call(request))
    caller.close()


def test_subscriptions_without_end_do_not_matter(served: Running) -> None:
    """Broken if a reader of events could fill the coordinator's memory or stop it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.connect(f"ipc://{served.directory.events_socket}")
    for number in range(500):
        reader.setsockopt(zmq.SUBSCRIBE, number.to_bytes(4, "big"))
    served.ask(api.Ping())
    context.destroy(0)


def test_connections_that_do_not_register_in_time_are_closed(coordinators: Coordinators) -> None:
    """Broken if connections without a hello or handshake stayed."""
    running = coordinators.start(NVSHARE_HELLO_TIMEOUT="50ms")
    assert closed(Link(running.directory.hooks_socket))
    for half in (b"", GREETING[:11], GREETING, GREETING + ready()[:9]):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(running.directory.hooks_socket))
            raw.sendall(half)
            assert closed(raw)
