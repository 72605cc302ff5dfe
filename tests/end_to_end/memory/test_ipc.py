"""Programs that share memory by legacy IPC in mode `swap`, and take turns on a card that is too small for both.

Non-goals: what one call answers (tests/hook/ipc/test_ipc.py).
"""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvshare.simulated_gpu.trace import overlaps
from tests.conftest import Built
from tests.end_to_end.conftest import Node, finish
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.hook.compiled import compile_c
from tests.hook.interception.test_interception_cudart import own_cudart

PROGRAMS = Path(__file__).resolve().parent / "programs"
SOURCE = PROGRAMS / "ipc_program.c"
TOLD = [sys.executable, str(Path(__file__).resolve().parents[2] / "hook" / "memory" / "programs" / "memory_program.py")]
HAS_CUPY = importlib.util.find_spec("cupy") is not None


def tell(process: subprocess.Popen[str], words: str) -> None:
    """A command for the program TOLD."""
    assert process.stdin is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> Any:
    """The program's answer."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 200)[0]
    line = process.stdout.readline()
    assert line, f"the program ended: {process.communicate()}"
    return json.loads(line)


def ask(process: subprocess.Popen[str], words: str) -> Any:
    """A command and its answer."""
    tell(process, words)
    return answer(process)


def begin(process: subprocess.Popen[str]) -> None:
    """Until it uses the GPU."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert ask(process, "start") == 0


@pytest.fixture(scope="session")
def ipc_program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """programs/ipc_program.c, linked with the simulated driver."""
    return compile_c(tmp_path_factory.mktemp("ipc") / "ipc_program", SOURCE, built.sim_dir / "libcuda.so.1")


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
def test_two_programs_share_while_they_evict_each_other(node: Node, ipc_program: Path) -> None:
    """Broken: what is shared is lost, stale or moved away below the other one when they take turns."""
    node.start_coordinator("--quantum=20ms")
    out, errors = node.run([str(ipc_program), "pair", "10", "120", "40"], "--memory=swap").communicate()
    assert out.count('"mismatches": 0') == 2, out + errors + node.log()
    gpu = node.control("status")["gpus"][0]
    assert gpu["evicted_bytes"] > 0, gpu
    assert overlaps([busy for busy in node.trace() if busy.kind == "kernel"]) == []


@pytest.mark.parametrize("mode", ["device", "managed", "swap"])
def test_importers_of_every_mode(node: Node, mode: str) -> None:
    """Broken: only a program in mode `swap` can open what one in mode `swap` exports."""
    size = 70 << 20
    node.start_coordinator("--quantum=20ms")
    exporter, importer = node.run(TOLD, "--memory=swap"), node.run(TOLD, f"--memory={mode}")
    for process in (exporter, importer):
        begin(process)
    pointer = ask(exporter, f"alloc {size}")[1]
    assert ask(exporter, f"write {pointer} {size} 1") == 0
    result, mapped = ask(importer, f"ipc_open {ask(exporter, f'ipc_get {pointer}')[1]} 1")
    assert result == 0
    assert ask(importer, "alloc 1000000")[0] == 0
    assert ask(importer, f"same {mapped} {size} 1") is True
    assert ask(importer, f"write {mapped} {size} 2") == 0
    assert ask(exporter, f"same {pointer} {size} 2") is True
    assert ask(importer, f"attribute 10 {mapped}") == [0, 0, 0, 0], "it is not the importer's to export"
    assert ask(importer, f"attribute 12 {mapped}") == [0, size, 0, size]
    assert ask(importer, f"ipc_close {mapped}") == 0
    assert ask(exporter, f"free {pointer}") == 0


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sharing_memory_under_sanitizers(node: Node, ipc_program: Path, kind: str) -> None:
    """Broken: a race or a use after free between the program, the mover and the thread that answers importers."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")
    program = node.run([str(ipc_program), "pair", "3", "120", "40"], "--memory=swap", variables=variables)
    (out,) = finish_sanitized(program)
    assert out.count('"mismatches": 0') == 2, out


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_threads_that_share_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race between threads that open and close the same memory while its exporter allocates and frees."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=20ms")
    exporter, importer = (node.run(TOLD, "--memory=swap", variables=variables) for _ in range(2))
    for process in (exporter, importer):
        begin(process)
    pointer = ask(exporter, f"alloc {6 << 20}")[1]
    handle = ask(exporter, f"ipc_get {pointer}")[1]
    tell(importer, f"ipc_storm {handle} 4 25")
    assert ask(exporter, "storm 3 50") == 0
    assert answer(importer) == 0
    assert ask(exporter, f"free {pointer}") == 0
    finish_sanitized(exporter, importer)


@pytest.mark.parametrize("mode", ["device", "swap"])
def test_the_same_is_refused_as_by_the_driver(node: Node, ipc_program: Path, mode: str) -> None:
    """Broken: a program that relies on an error of the driver's gets another one in mode `swap`."""
    node.start_coordinator()
    out, errors = node.run([str(ipc_program), "errors"], f"--memory={mode}").communicate()
    said = dict(line.split() for line in out.splitlines())
    assert said == {
        "same_handle": "1",
        "capable": "1",
        "own": "201",
        "get_null": "1",
        "get_nothing": "1",
        "close_nothing": "1",
        "open": "0",
        "open_again": "0",
        "close_closed": "1",
        "open_flags": "1",
        "open_freed": "400",
        "open_garbage": "1",
    }, errors


@pytest.mark.parametrize(
    "which", ["cudart", pytest.param("cupy", marks=pytest.mark.skipif(not HAS_CUPY, reason="no CuPy"))]
)
def test_the_runtime_shares(node: Node, which: str) -> None:
    """Broken: a program on the real libcudart, or on CuPy, cannot hand memory to a process that it started."""
    node.start_coordinator("--quantum=20ms")
    library = which if which == "cupy" else str(own_cudart())
    told = finish(node.run([sys.executable, str(PROGRAMS / "ipc_runtime.py"), library, "3000"], "--memory=swap"))
    assert told == {"rounds": 10, "wrong": 0, "child": 0}


def test_managed_memory_is_refused_by_name(node: Node) -> None:
    """Broken: in mode `managed` sharing fails in silence, or seems to work."""
    node.start_coordinator()
    program = node.run(
        [sys.executable, str(PROGRAMS / "ipc_runtime.py"), str(own_cudart()), "3000"], "--memory=managed"
    )
    _, errors = program.communicate()
    assert program.returncode != 0
    assert "cudaIpcGetMemHandle" in errors
    assert "--memory swap or --memory device" in errors
