"""`python -m tests.jupyter.picture` writes the tutorial's picture: two notebooks share a GPU, and one waits."""

from __future__ import annotations

import subprocess
import sys

from tests.browser import find
from tests.conftest import ROOT
from tests.jupyter import lab

PICTURE = ROOT / "docs" / "pictures" / "notebook.png"


def main() -> None:
    """Writes the picture."""
    executable = find()
    if executable is None:
        sys.exit("no browser here: apt-get install chromium-headless-shell")
    with lab.opened(executable) as made:
        lab.share(made)
        made.page.screenshot(PICTURE)
    subprocess.run(["ls", "-l", str(PICTURE)], check=True)


if __name__ == "__main__":
    main()
