"""Memory mode `swap` under sanitizers: two programs that do not fit together, and allocate from several threads."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import ROOT
from tests.end_to_end.conftest import Node
from tests.end_to_end.test_sanitized import COMPLAINTS, sanitized

pytestmark = pytest.mark.sanitizer

COMMANDS = ["start", f"alloc {150 << 20}", "storm 4 100", f"alloc {3 << 20}", "storm 4 100", "synchronize"]


@pytest.mark.parametrize("node", ["1x256MiB"], indirect=True)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_moving_memory_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race or a use after free between the program's threads, the mover and the host pool's helpers."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=10ms")
    busy = [
        sys.executable,
        "-m",
        "nvshare.bench.workloads.busy",
        "--seconds=2",
        f"--copy-kib={160 * 1024}",
        "--burst=2",
    ]
    both = [node.run(busy, "--memory=swap", variables=variables) for _ in range(2)]
    program = [sys.executable, str(ROOT / "tests" / "hook" / "memory" / "programs" / "memory_program.py")]
    threads = node.run(program, "--memory=swap", variables=variables)
    _, errors = threads.communicate("\n".join(COMMANDS) + "\n")
    assert not any(complaint in errors for complaint in COMPLAINTS), errors[-8000:]
    for process in both:
        out, errors = process.communicate()
        assert not any(complaint in errors for complaint in COMPLAINTS), errors[-8000:]
        assert process.returncode == 0, out + errors
    assert node.control("status")["gpus"][0]["evicted_bytes"] > 0
