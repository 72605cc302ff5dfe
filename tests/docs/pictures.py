"""Pictures in the documentation: `python -m tests.docs.pictures` makes them anew, a browser's where there is one.

Three programs share a simulated GPU; each command of `PICTURES` runs beside them, and rich draws what it prints.
A picture names no font of another host.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from nvshare.coordinator.system.temporary_coordinator import temporary_coordinator
from tests import browser
from tests.jupyter import picture as notebook
from tests.waiting import eventually
from tests.web import picture as web

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: Final[tuple[tuple[str, str], ...]] = (
    ("status.svg", "nvshare-ctl status"),
    ("clients.svg", "nvshare-ctl clients"),
    ("explain.svg", "nvshare-ctl explain"),
    ("top.svg", "nvshare-ctl top --once"),
)
"""File, and the command whose output it shows."""
COLUMNS: Final = 100

PROGRAMS: Final[Mapping[str, str]] = {
    "train.py": "--kernel-us=300 --burst=16",
    "serve.py": "--kernel-us=150 --burst=12 --copy-kib=4096 --gap-every=4 --gap-ms=20",
    "notebook": "--kernel-us=200 --burst=8 --ahead=1 --gap-every=3 --gap-ms=60",
}
"""Name of a program, and its work."""
_WITHOUT_FONT: Final = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono"
)


def _console_script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@contextlib.contextmanager
def programs() -> Iterator[dict[str, str]]:
    """Three programs on a simulated GPU, the first one measured alone; yields the environment of a user beside them."""
    with tempfile.TemporaryDirectory(prefix="nvshare-") as path, contextlib.ExitStack() as stack:
        folder = Path(path)
        stack.enter_context(temporary_coordinator(folder, ["--simulate=1x16GiB"], log=folder / "log"))
        environ = {**os.environ, "NVSHARE_RUNTIME_DIR": path, "NVSHARE_MEMORY": "device"}
        for name, work in PROGRAMS.items():
            command = [_console_script("nvshare-run"), "--simulate", "--name", name, "--"]
            command += [sys.executable, "-m", "nvshare.bench.workloads.busy", "--seconds=120", *work.split()]
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            _await_line("of the time alone" if name == "train.py" else f"{name} (", environ)
        yield environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}


def _await_line(part: str, environ: Mapping[str, str]) -> None:
    eventually(lambda: part in _output("nvshare-ctl explain", environ), f"{part} in the explanation")


def _output(command: str, environ: Mapping[str, str]) -> str:
    name, *arguments = shlex.split(command)
    done = subprocess.run(
        [_console_script(name), *arguments], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def draw(command: str, output: str) -> str:
    """An SVG of a terminal in which the command has run."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    console.print(Text.from_ansi(output.rstrip()))
    return console.export_svg(title=f"$ {command}", code_format=_WITHOUT_FONT, unique_id="terminal")


def make(folder: Path) -> None:
    """Writes all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with programs() as environ:
        for file, command in PICTURES:
            (folder / file).write_text(draw(command, _output(command, environ)), encoding="utf-8")


def main() -> None:
    """Writes the pictures of the pages."""
    make(FOLDER)
    if browser.find() is None:
        sys.exit("pictures of the terminal are made; those of a browser need: apt-get install chromium-headless-shell")
    web.main()
    notebook.main()


if __name__ == "__main__":
    main()
