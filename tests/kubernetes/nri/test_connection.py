"""The mux and ttrpc of NRI: cut, joined and hostile frames."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.nri import messages as m
from nvshare.coordinator.kubernetes.nri.connection import (
    MAX_MESSAGE_BYTES,
    PLUGIN,
    REQUEST,
    RESPONSE,
    RUNTIME,
    Message,
    Parser,
    parsed,
    serve,
    written,
)
from nvshare.coordinator.protocol.fields import RemoteProtocolError

CALLS = st.tuples(st.sampled_from([PLUGIN, RUNTIME]), st.integers(0, 2**32 - 1), st.binary(max_size=40))


def frame(connection: int, data: bytes) -> bytes:
    return struct.pack(">II", connection, len(data)) + data


def header(length: int, kind: int) -> bytes:
    return struct.pack(">IIBB", length, 1, kind, 0)


@given(st.lists(CALLS, max_size=6), st.randoms(use_true_random=False))
def test_cuts_change_nothing(calls: list[tuple[int, int, bytes]], random: object) -> None:
    """Broken: a message in several frames, or a frame in several reads, is lost, joined with another, or cut."""
    cut = random.randint  # type: ignore[attr-defined]
    sent, raw = [], b""
    for connection, stream, data in calls:
        kind = REQUEST if connection == PLUGIN else RESPONSE
        sent.append(Message(connection, stream, kind, data))
        message = struct.pack(">IIBB", len(data), stream, kind, 0) + data
        while message:
            size = cut(0, len(message))
            raw += frame(connection, message[:size])
            message = message[size:]
    parser, found = Parser(), []
    while raw:
        size = cut(1, len(raw))
        found += parser.feed(raw[:size])
        raw = raw[size:]
    assert found == sent


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame(3, b""), "frame of connection 3"),
        (frame(0, b""), "frame of connection 0"),
        (struct.pack(">II", PLUGIN, MAX_MESSAGE_BYTES + 11), "frame of 4194315 bytes"),
        (struct.pack(">II", PLUGIN, 0xFFFFFFFF), "frame of 4294967295 bytes"),
        (frame(PLUGIN, header(MAX_MESSAGE_BYTES + 1, REQUEST)), "message of 4194305 bytes"),
        (frame(PLUGIN, header(0, RESPONSE)), "message of type 2 on connection 1"),
        (frame(RUNTIME, header(0, REQUEST)), "message of type 1 on connection 2"),
        (frame(RUNTIME, header(0, 3)), "message of type 3 on connection 2"),
    ],
)
def test_hostile_frames_are_an_error(data: bytes, why: str) -> None:
    """Broken: a peer that is not NRI makes the plugin wait for ever or take all memory."""
    with pytest.raises(RemoteProtocolError, match=why):
        Parser().feed(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(data: bytes) -> None:
    """Broken: garbage raises something else than an error of the protocol."""
    try:
        for message in Parser().feed(data):
            parsed(m.Request, message.data)
    except RemoteProtocolError:
        pass


def test_the_largest_message_passes() -> None:
    """Broken: a list of many containers is refused."""
    data = bytes(MAX_MESSAGE_BYTES)
    (found,) = Parser().feed(frame(PLUGIN, header(len(data), REQUEST) + data))
    assert found.data == data


def runtime(reply: bytes) -> tuple[list[bytes], str]:
    """What a plugin sends to a runtime that sends this and closes; how it ends."""
    ours, theirs = socket.socketpair()
    ended: list[str] = []

    def run() -> None:
        try:
            serve(ours, "nvshare", "10", lambda method, payload: (payload, 12 if method == "Odd" else 0, "no"))
        except (RemoteProtocolError, OSError) as error:
            ended.append(str(error))
        finally:
            ours.close()

    thread = threading.Thread(target=run)
    thread.start()
    theirs.sendall(reply)
    theirs.shutdown(socket.SHUT_WR)
    raw = b""
    while data := theirs.recv(1 << 16):
        raw += data
    thread.join()
    theirs.close()
    frames = []
    while raw:
        connection, length = struct.unpack_from(">II", raw)
        frames.append(bytes([connection]) + raw[18 : 8 + length])
        raw = raw[8 + length :]
    return frames, "".join(ended)


def test_it_registers_and_answers_each_call() -> None:
    """Broken: the runtime does not know the plugin, or waits two seconds for an answer and cuts it off."""
    calls = [
        written(PLUGIN, stream, REQUEST, m.Request(method=method, payload=b"x"))
        for stream, method in ((1, "Some"), (3, "Odd"))
    ]
    (registration, some, odd), ended = runtime(written(RUNTIME, 1, RESPONSE, m.Response()) + b"".join(calls))
    request = m.Request.FromString(registration[1:])
    assert (registration[0], request.service, request.method) == (RUNTIME, m.RUNTIME_SERVICE, "RegisterPlugin")
    asked = m.RegisterPluginRequest.FromString(request.payload)
    assert (asked.plugin_name, asked.plugin_idx) == ("nvshare", "10")
    assert m.Response.FromString(some[1:]).payload == b"x"
    assert m.Response.FromString(odd[1:]).status.code == 12
    assert ended == ""


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (written(RUNTIME, 1, RESPONSE, m.Response(status={"code": 9, "message": "not you"})), "not you"),
        (frame(PLUGIN, header(1, REQUEST) + b"\xff"), "not a Request"),
        (b"HTTP/1.1 400 Bad Request\r\n", "frame of connection"),
    ],
)
def test_a_runtime_that_is_none_ends_the_connection(reply: bytes, why: str) -> None:
    """Broken: the plugin hangs on, or dies of, a runtime that refuses it or speaks something else."""
    assert why in runtime(reply)[1]
