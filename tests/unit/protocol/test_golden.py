"""Golden vectors: the bytes of every message, as literals, for both sides.

They hold the protocol of released versions: a line is never changed, new ones are added.
"""

from __future__ import annotations

import ctypes

import pytest

from nvshare.coordinator.protocol import messages
from tests.unit.protocol import codec

GOLDEN: list[tuple[messages.Message, str]] = [
    (
        messages.Hello(
            3,
            "trainer",
            "python3",
            2,
            4294967296,
            '["1f",true,"","x"]',
            True,
            True,
            "priority=-3\ngang=pair\n" + 240 * "x",
        ),
        "9a0103a7747261696e6572a7707974686f6e3302cf0000000100000000b25b223166222c747275652c"
        "22222c2278225dc3c3da01067072696f726974793d2d330a67616e673d706169720a" + 240 * "78",
    ),
    (
        messages.AttachGpu(0, "GPU-51a1c0de-0000-4000-8000-000000000000", 7, True, 1073741824, 536870912, 4096, True),
        "990200d9284750552d35316131633064652d303030302d343030302d383030302d30303030303030303030303007c3ce"
        "40000000ce20000000cd1000c3",
    ),
    (messages.Request(3), "920303"),
    (
        messages.Release(0, 7, 0, True, False, 1500000, 123456789012345, 1000),
        "9904000700c3c2ce0016e360cf00007048860ddf79cd03e8",
    ),
    (
        messages.State(
            0,
            12,
            1 << 30,
            1 << 29,
            4096,
            1 << 28,
            1 << 63,
            1 << 30,
            True,
            1 << 31,
            1 << 30,
            5000000,
            False,
            2,
            65536,
            1 << 33,
            65536,
            77,
            1 << 27,
        ),
        "dc00140f000cce40000000ce20000000cd1000ce10000000cf8000000000000000ce40000000c3ce80000000ce40000000"
        "ce004c4b40c202ce00010000cf0000000200000000ce000100004dce08000000",
    ),
    (messages.Goodbye(), "9108"),
    (messages.Welcome(99), "924063"),
    (
        messages.GpuSettings(
            0, 1 << 32, 1 << 34, True, 10**7, 2 * 10**6, 1 << 30, 1 << 29, True, True, True, 1 << 20,
            300, True, False
        ),
        "dc00104100cf0000000100000000cf0000000400000000c3ce00989680ce001e8480ce40000000"
        "ce20000000c3c3c3ce00100000cd012cc3c2",
    ),
    (messages.Grant(0, 8, 2), "9442000802"),
    (messages.Revoke(0, 8, 10000000000), "94430008cf00000002540be400"),
    (messages.Waiters(0, 8, 1), "9444000801"),
    (
        messages.Target(31, 14, 67108864, True, 65536, 1 << 33, True, 77, 1 << 26),
        "9a501f0ece04000000c3ce00010000cf0000000200000000c34dce04000000",
    ),
    (messages.Standby(1, 3000000), "934901ce002dc6c0"),
    (
        messages.Progress(1, 77, 123456789012, 987654321, 40000000, 50000000, 12),
        "980b014dcf0000001cbe991a14ce3ade68b1ce02625a00ce02faf0800c",
    ),
    (messages.ExplainWait(1), "920d01"),
    (messages.WaitExplained(1, 3, "waiting for GPU 3"), "944e0103b177616974696e6720666f72204750552033"),
    (messages.ParkAnswer(False, "captured"), "930ec2a86361707475726564"),
    (messages.Park(False, 1, "GPU-51a1", True), "954fc201a84750552d35316131c3"),
    (
        messages.Rejected(2, True, "GPU nicht bekannt – prüfen", 3),
        "954802c3bd475055206e696368742062656b616e6e7420e28093207072c3bc66656e03",
    ),
]

EARLIER: list[tuple[str, messages.Message]] = [
    (
        "960103a7747261696e6572a7707974686f6e3301cf0000000100000000",
        messages.Hello(3, "trainer", "python3", 1, 1 << 32),
    ),
    ("980200a54750552d3000c2000000", messages.AttachGpu(0, "GPU-0", 0, False, 0, 0, 0)),
    ("924fc2", messages.Park(False)),
    ("944fc201a84750552d35316131", messages.Park(False, 1, "GPU-51a1")),
    ("970f000cce40000000ce20000000cd1000ce10000000", messages.State(0, 12, 1 << 30, 1 << 29, 4096, 1 << 28)),
    ("9450000ece04000000", messages.Target(0, 14, 1 << 26)),
    ("944802c3a3475055", messages.Rejected(2, True, "GPU")),
    (
        "994100cf0000000100000000cf0000000400000000c3ce00989680ce001e8480ce80000000ce40000000",
        messages.GpuSettings(0, 1 << 32, 1 << 34, True, 10**7, 2 * 10**6, 1 << 31, 1 << 30),
    ),
]
"""Frames of released versions, which lack the fields that were appended since."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return codec.compile_library(tmp_path_factory.mktemp("codec"))


def test_every_message_has_a_vector() -> None:
    """Broken: a message was added without pinning its bytes."""
    assert {type(message) for message, _ in GOLDEN} == {*messages.TO_COORDINATOR.values(), *messages.TO_CLIENT.values()}


@pytest.mark.parametrize(("message", "text"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden(library: ctypes.CDLL, message: messages.Message, text: str) -> None:
    """Broken: a released hook or coordinator would misread this message."""
    frame = bytes.fromhex(text)
    direction = next(d for d, table in codec.TABLES.items() if message.TYPE in table)
    assert messages.encode(message) == frame
    assert messages.decode(frame, codec.TABLES[direction]) == message
    assert codec.c_decode(library, direction, frame) == (codec.OK, frame)


@pytest.mark.parametrize(("text", "message"), EARLIER)
def test_earlier_versions_are_understood(library: ctypes.CDLL, text: str, message: messages.Message) -> None:
    """Broken: a hook or a coordinator of an earlier version is refused, or taken for one that knows later fields."""
    direction = next(d for d, table in codec.TABLES.items() if message.TYPE in table)
    assert messages.decode(bytes.fromhex(text), codec.TABLES[direction]) == message
    verdict, read = codec.c_decode(library, direction, bytes.fromhex(text))
    assert (verdict, messages.decode(read, codec.TABLES[direction])) == (codec.OK, message)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("c0", "not an array"),
        ("90", "no type"),
        ("9303", "shorter than it says"),
        ("9203cd0100", "ordinal of 16 bits"),
        ("920303" + "00", "a byte after the end"),
        ("9203ff", "negative ordinal"),
        ("9203c3", "bool for an integer"),
        ("9203ca3f800000", "float for an integer"),
        ("9103", "field missing"),
        ("990400010 0c3c20000cf0001000000000001".replace(" ", ""), "more submissions than can be"),
        ("970f0000 00cf00010000000000010000".replace(" ", ""), "more bytes than can be"),
        ("94480001a100", "zero byte in text"),
        ("94480101a100", "integer for a bool"),
        ("944801c3a1ff", "no UTF-8"),
    ],
)
def test_malformed(library: ctypes.CDLL, text: str, why: str) -> None:
    """Broken: something that the protocol forbids is let through."""
    frame = bytes.fromhex(text)
    for direction in codec.TABLES:
        verdict, _ = codec.c_decode(library, direction, frame)
        assert verdict == codec.python_decode(direction, frame)[0]
        known = len(frame) > 1 and frame[1] in codec.TABLES[direction]
        assert verdict == codec.MALFORMED or (not known and verdict == codec.UNKNOWN), why


def test_encode_refuses_what_breaks_a_bound() -> None:
    """Broken: we send what the peer must refuse."""
    long, zero = messages.Rejected(1, True, "x" * 256), messages.Rejected(1, True, "\0")
    for message in (messages.Request(256), messages.Request(-1), long, zero):
        with pytest.raises(AssertionError):
            messages.encode(message)
