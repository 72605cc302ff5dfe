"""Three programs share a simulated GPU, and a browser shows them.

`python -m tests.web.picture` writes the handbook's picture.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.browser import Browser, browser, find
from tests.conftest import ROOT
from tests.end_to_end.conftest import Node, new_node
from tests.waiting import eventually

PICTURE = ROOT / "docs" / "pictures" / "web.png"
TOKEN = "a-token-for-the-tests"
PROGRAMS = (
    ("train.py", "--class=batch", "--gpu-memory-limit=200MiB", "--copy-kib=102400"),
    ("notebook.ipynb", "--class=interactive", "", "--copy-kib=81920"),
    ("sweep.py", "--class=best-effort", "", "--copy-kib=61440"),
)
"""Name, options of nvshare-run, size of the program's copies: together more than the GPU has."""


@contextlib.contextmanager
def three_programs() -> Iterator[tuple[Node, str]]:
    """The node, and the page's address."""
    with new_node("1x256MiB") as node:
        token = node.directory / "token"
        token.touch(0o600)
        token.write_text(TOKEN)
        node.start_coordinator("--quantum=400ms", "--web-port=0", f"--web-token-file={token}")
        for name, job_class, limit, copies in PROGRAMS:
            options = ["--memory=swap", f"--name={name}", job_class, *filter(None, [limit])]
            busy = [sys.executable, "-m", "nvshare.bench.workloads.busy", "--seconds=300", copies, "--burst=2"]
            node.run(busy, *options)
        found = re.search(r"page on (http://\S+)", node.log())
        assert found is not None
        yield node, found[1]


def await_programs(page: Browser, turns: int = 1) -> None:
    """Until the page shows the three programs, and each has had so many turns."""
    names = "[...document.querySelectorAll('tbody .name')].map((cell) => cell.textContent).sort()"
    wanted = sorted(name for name, *_ in PROGRAMS)
    eventually(lambda: page.evaluate(names) == wanted, f"rows of {wanted}")
    count = (
        "Math.min(...[...document.querySelectorAll('tbody tr')].map((row) => "
        "[...spans.values()].filter((span) => span[2] == row.dataset.client && span[3] === 'hold').length))"
    )
    eventually(lambda: page.evaluate(count) >= turns, f"{turns} turns of each program", 120.0)


def main() -> None:
    """Writes the picture."""
    executable = find()
    if executable is None:
        sys.exit("no browser here: apt-get install chromium-headless-shell")
    with three_programs() as (_, address), browser(executable) as page:
        page.size(1000, 600)
        page.open(address)
        await_programs(page, turns=18)
        page.evaluate("byId('window').value = '30'")
        page.evaluate("byId('node').textContent = ''; drawAll()")
        page.screenshot(PICTURE)
    subprocess.run(["ls", "-l", str(PICTURE)], check=True)


if __name__ == "__main__":
    main()
