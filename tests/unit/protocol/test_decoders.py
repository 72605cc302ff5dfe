"""The C decoder against the Python decoder: the same verdict and the same values for any bytes at all."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
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
@example(bytes(messages.MAX_FRAME_BYTES + 1))
def test_any_bytes(library: ctypes.CDLL, frame: bytes) -> None:
    """Broken: garbage makes the two sides disagree, or crashes one of them."""
    agree(library, frame)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=64))
def test_any_text(library: ctypes.CDLL, text: bytes) -> None:
    """Broken: the sides disagree about what is valid UTF-8."""
    rejected = messages.encode(messages.Rejected(1, True, ""))[:-1]
    agree(library, rejected + b"\xd9" + bytes([len(text)]) + text)


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


def test_the_hook_keeps_to_the_ranges(tmp_path: Path) -> None:
    """Broken: a program that asks for more memory than can be loses its connection instead of being refused."""
    (tmp_path / "most.c").write_text(
        '#include "coord/protocol/wire.gen.h"\n#include <stdio.h>\n'
        "int main(void) { uint8_t f[64]; nvs_state m = {.gpu = 3, .asks = 7, .total_bytes = UINT64_MAX};"
        " return fwrite(f, 1, nvs_encode_state(&m, f, sizeof f), stdout) == 0; }"
    )
    flags = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", str(codec.SOURCE))
    program = tmp_path / "most"
    subprocess.run(["gcc", *flags, str(tmp_path / "most.c"), "-o", str(program)], check=True)
    frame = subprocess.run([str(program)], capture_output=True, check=True).stdout
    state = messages.decode(frame, messages.TO_COORDINATOR)
    assert isinstance(state, messages.State)
    assert (state.gpu, state.asks, state.total_bytes) == (3, 7, messages.MOST_BYTES)
