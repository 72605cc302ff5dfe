"""`python -m tests.first_steps`: a new user's way from a clone to two notebooks on one GPU; seconds to each success.

It clones this checkout, types the first block of the README and all blocks of the notebook tutorial into one shell, and
uses two notebooks on the installed kernel.  A machine without a GPU simulates one.  Non-goals: a clean pip cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.shell_blocks import ROOT, blocks
from tests.end_to_end.conftest import stop_embedded
from tests.jupyter.conftest import USE, Notebook, started_kernel

PAGES = (ROOT / "README.md", ROOT / "docs" / "tutorials" / "notebooks.md")
END = "the shell is ready: "


def steps() -> list[str]:
    """Commands that the pages tell a reader to type."""
    readme, tutorial = (blocks(page) for page in PAGES)
    return ["\n".join(block.lines) for block in (readme[0], *tutorial)]


def reader(folder: Path) -> dict[str, str]:
    """The environment of a user who has nothing of nvshare, not even this Python's environment."""
    own = str(Path(sys.executable).parent)
    kept = {key: value for key, value in os.environ.items() if not re.match("NVSHARE_|PYTHON|VIRTUAL_ENV|JUPYTER", key)}
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    kept |= {
        "PATH": os.pathsep.join(each for each in kept["PATH"].split(os.pathsep) if each != own),
        "NVSHARE_RUNTIME_DIR": str(runtime),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    return kept if Path("/dev/nvidiactl").exists() else kept | {"NVSHARE_SIMULATE": "1x4GiB"}


class Shell:
    """One shell, as in a terminal: an environment once activated stays so."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def type(self, command: str) -> str:
        """Output of the command; ends this program if it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f'{{ {command}\n}} </dev/null\necho "\n{END}$?"\n')
        self._process.stdin.flush()
        printed: list[str] = []
        for line in self._process.stdout:
            if line.startswith(END):
                if line != f"{END}0\n":
                    break
                return "".join(printed)
            printed.append(line)
        sys.exit(f"{command}\n{''.join(printed)}")

    def close(self) -> None:
        self._process.communicate()


class Watch:
    """Prints the seconds since the first command."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def success(self, what: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {what}", flush=True)


def use(notebook: Notebook) -> str:
    """Uses the GPU in a notebook; what `%gpu` shows."""
    for cell in (USE, "%load_ext nvshare"):
        notebook.run(cell)
    shown = notebook.run("%gpu")
    if notebook.error or "memory 64MiB" not in shown:
        sys.exit(f"the notebook does not use the GPU: {notebook.error}\n{shown}")
    return shown.strip()


def main() -> None:
    """Goes the whole way once."""
    with tempfile.TemporaryDirectory(prefix="nvs-", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        environment = reader(folder)
        checkout = folder / "nvshare"
        shell, watch = Shell(folder, environment), Watch()
        for command in (f"git clone --quiet {ROOT} nvshare && cd nvshare", *steps()):
            shell.type(command)
            watch.success(command.replace(str(ROOT), "ADDRESS"))
        kernels = checkout / ".venv" / "share" / "jupyter" / "kernels"
        with started_kernel(kernels, environment) as first, started_kernel(kernels, environment) as second:
            watch.success("two notebooks are open")
            for notebook in (first, second):
                watch.success(use(notebook))
            shown = shell.type("nvshare-ctl clients")
            watch.success(f"nvshare-ctl clients\n{shown.rstrip()}")
        stop_embedded(Path(environment["NVSHARE_RUNTIME_DIR"]))
        shell.close()


if __name__ == "__main__":
    main()
