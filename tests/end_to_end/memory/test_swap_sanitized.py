"""Memory mode `swap` under sanitizers: two programs that do not fit together, and allocate from several threads."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import Node, until_evicted
from tests.end_to_end.memory.test_swap import BUSY
from tests.end_to_end.test_sanitized import finish_sanitized, sanitized

pytestmark = pytest.mark.sanitizer

COMMANDS = [f"alloc {75 << 20}", "storm 4 100", f"alloc {3 << 20}", "storm 4 100", "synchronize"]


@pytest.mark.parametrize("node", ["1x128MiB"], indirect=True)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_moving_memory_under_sanitizers(node: Node, kind: str) -> None:
    """Broken: a race or a use after free between the program's threads, the mover and the host pool's helpers."""
    variables = sanitized(kind)
    node.start_coordinator("--quantum=10ms")
    busy = [*BUSY, "--seconds=1", f"--copy-kib={80 * 1024}", "--burst=2"]

    def three() -> None:
        both = [node.run(busy, "--memory=swap", variables=variables) for _ in range(2)]
        threads = node.told("--memory=swap", **variables)
        for command in COMMANDS:
            threads.tell(command)
        finish_sanitized(threads.process, *both)

    until_evicted(node, three)
