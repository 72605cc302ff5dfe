"""Fuzzing: the corpus under sanitizers with any compiler, and a short hunt where there is libFuzzer."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from nvshare.coordinator.protocol.framing import Connection, ZmtpError
from tests.fuzz.targets import TARGETS, build_fuzzer, build_replay, read_corpus, unpack
from tests.harness import SEEDS
from tests.unit.protocol import codec

RUNS = {"decoder": 50_000 * SEEDS, "transport": 5_000 * SEEDS, "resolver": 12_000 * SEEDS}


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus(target: str, tmp_path: Path) -> None:
    """Broken if an input that was once of interest crashes, reads beyond its end or is misunderstood."""
    files = unpack(target, tmp_path / "corpus")
    assert len(files) > 40
    program = build_replay(target, tmp_path)
    done = subprocess.run([str(program), *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.sanitizer
@pytest.mark.parametrize("target", TARGETS)
def test_a_short_hunt(target: str, tmp_path: Path) -> None:
    """Broken if a new input close to the corpus does what no input may."""
    program = build_fuzzer(target, tmp_path)
    if program is None:
        pytest.skip("no clang with libFuzzer here")
    corpus = tmp_path / "corpus"
    unpack(target, corpus)
    command = [str(program), f"-runs={RUNS[target]}", "-seed=1", f"-artifact_prefix={tmp_path}/", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_python_decides_as_c_does(tmp_path: Path) -> None:
    """Broken if coverage of the C decoder finds a frame that the coordinator reads otherwise."""
    library: ctypes.CDLL = codec.compile_library(tmp_path)
    for frame in read_corpus("decoder"):
        for direction in codec.TABLES:
            assert codec.c_decode(library, direction, frame) == codec.python_decode(direction, frame), frame.hex()


def test_the_coordinator_reads_any_stream() -> None:
    """Broken if bytes that a hook's end refuses, or takes, are more than a ZmtpError to the coordinator's end."""
    for stream in read_corpus("transport"):
        connection = Connection(b"DEALER", frozenset({b"ROUTER"}), 4096)
        try:
            for piece in (stream[1:][at : at + 1 + stream[0]] for at in range(0, len(stream), 1 + stream[0])):
                connection.feed(piece)
        except ZmtpError:
            continue
