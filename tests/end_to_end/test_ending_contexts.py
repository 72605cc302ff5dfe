"""Contexts, streams and pools that end in one thread beside calls of others (programs/ending_contexts.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Built
from tests.end_to_end.conftest import Node
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized
from tests.hook.compiled import compile_c

CASES = ("contexts", "frees", "primaries", "greens", "streams", "pools", "freed_elsewhere")
SHARE = dict.fromkeys(("primaries", "greens"), "50")
"""Percent of the rounds of slow cases under a sanitizer, which sees a race where two threads meet without order."""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Path:
    """Linked with the simulated driver."""
    source = Path(__file__).resolve().parent / "programs" / "ending_contexts.c"
    return compile_c(tmp_path_factory.mktemp("contexts") / "ending_contexts", source, built.sim_dir / "libcuda.so.1")


@pytest.mark.parametrize("memory", ["device", "managed", "swap"])
def test_contexts_end_beside_others(node: Node, program: Path, memory: str) -> None:
    """Broken: the end of a context takes memory that another thread has made in a new context with the same handle."""
    node.start_coordinator()
    for case in CASES:
        assert finish_sanitized(node.run([str(program), case], f"--memory={memory}")) == ["good\n"], case


@pytest.mark.sanitizer
@pytest.mark.parametrize(("kind", "memory"), [("address,undefined", "swap"), ("thread", "managed"), ("thread", "swap")])
def test_contexts_end_under_sanitizers(node: Node, program: Path, kind: str, memory: str) -> None:
    """Broken: the hook uses an event or a record of a context that another thread ends meanwhile."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=10ms")
    commands = [[str(program), case, SHARE.get(case, "30")] for case in CASES]
    programs = [node.run(command, f"--memory={memory}", variables=variables) for command in commands]
    assert finish_sanitized(*programs) == ["good\n"] * len(CASES)
