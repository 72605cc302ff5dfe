"""The C decoder against the Python decoder: the same verdict and the same values for any bytes at all."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvshare.coordinator.protocol import messages
from tests.unit.protocol import codec


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return codec.compile_library(tmp_path_factory.mktemp("codec"))


def agree(library: ctypes.CDLL, frame: bytes) -> None:
    for direction in codec.TABLES:
        assert codec.c_decode(library, direction, frame) == codec.python_decode(direction, frame), frame.hex()


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(0, 2**64))
def test_made_frames(library: ctypes.CDLL, seed: int) -> None:
    """Broken: one side accepts what the other refuses, or reads another value from it."""
    agree(library, codec.random_frame(random.Random(seed)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=messages.MAX_FRAME_BYTES + 8))
def test_any_bytes(library: ctypes.CDLL, frame: bytes) -> None:
    """Broken: garbage makes the two sides disagree, or crashes one of them."""
    agree(library, frame)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=64))
def test_any_text(library: ctypes.CDLL, text: bytes) -> None:
    """Broken: the sides disagree about what is valid UTF-8."""
    rejected = messages.encode(messages.Rejected(1, True, ""))[:-1]
    agree(library, rejected + b"\xd9" + bytes([len(text)]) + text)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x90",
        b"\x91\x08",
        b"\x91\x08\x00",
        b"\x91\xcc\x08",
        b"\x91\xd0\x08",
        b"\x91\xd3" + b"\xff" * 8,
        b"\x91\xcf" + b"\xff" * 8,
        b"\x92\x08" + b"\x91" * 1000 + b"\x00",
        b"\x92\x08" + b"\x81" * 500 + b"\x00" * 501,
        b"\x92\x08\x81\x90\x90",
        b"\x92\x08\x81\xc0\xc0",
        b"\x92\x08\xdd\xff\xff\xff\xff",
        b"\x92\x08\xdf\xff\xff\xff\xff",
        b"\x92\x08\xc6\xff\xff\xff\xff",
        b"\x92\x08\xc9\x00\x00\x00\x05\xff12345",
        b"\x92\x08\xd6\xff\x00\x00\x00\x00",
        b"\x92\x08\xd7\xff" + b"\xff" * 8,
        b"\x92\x08\xc7\x0c\xff" + b"\xff" * 12,
        b"\x92\x08\xd4\xff\x00",
        b"\x92\x08\xc1",
        b"\xdd\x00\x00\x00\x01\x08",
        b"\x9f" + b"\x08" + b"\xc0" * 14,
    ],
)
def test_edges(library: ctypes.CDLL, frame: bytes) -> None:
    """Broken: nesting, timestamps, huge counts or unhashable keys make a difference."""
    agree(library, frame)


def test_loose_encodings_keep_their_value(library: ctypes.CDLL) -> None:
    """Broken: a peer with another msgpack library, or with more fields, is misunderstood."""
    rng = random.Random(5)
    for _ in range(500):
        message = codec.random_message(rng)
        frame = codec.loose_frame(rng, message)
        if len(frame) > messages.MAX_FRAME_BYTES:
            continue
        direction = next(d for d, table in codec.TABLES.items() if message.TYPE in table)
        assert messages.decode(frame, codec.TABLES[direction]) == message
        assert codec.c_decode(library, direction, frame) == (codec.OK, messages.encode(message))


def test_under_sanitizers(tmp_path: Path) -> None:
    """Broken: the C codec reads or writes outside a buffer, or relies on undefined behaviour."""
    program = codec.compile_program(tmp_path)
    rng = random.Random(11)
    frames = [codec.random_frame(rng) for _ in range(6_000)]
    frames += [rng.randbytes(rng.randint(0, 1100)) for _ in range(300)]
    corpus = tmp_path / "frames"
    corpus.write_bytes(b"".join(len(f).to_bytes(2, "big") + f for f in frames))
    done = subprocess.run([str(program), str(corpus)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [
        "".join(str(codec.python_decode(direction, frame)[0]) for direction in codec.TABLES) for frame in frames
    ]
    assert done.stdout.split() == expected


def test_the_hook_keeps_to_the_ranges(tmp_path: Path) -> None:
    """Broken: a program that asks for more memory than can be loses its connection instead of being refused."""
    (tmp_path / "most.c").write_text(
        '#include "coord/protocol/wire.gen.h"\n#include <stdio.h>\n'
        "int main(void) { uint8_t f[64]; nvs_reserve_memory m = {3, 7, UINT64_MAX, 0};"
        " return fwrite(f, 1, nvs_encode_reserve_memory(&m, f, sizeof f), stdout) == 0; }"
    )
    flags = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", str(codec.SOURCE))
    program = tmp_path / "most"
    subprocess.run(["gcc", *flags, str(tmp_path / "most.c"), "-o", str(program)], check=True)
    frame = subprocess.run([str(program)], capture_output=True, check=True).stdout
    assert messages.decode(frame, messages.TO_COORDINATOR) == messages.ReserveMemory(3, 7, messages.MOST_BYTES)
