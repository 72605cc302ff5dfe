"""Finds Python environments without nvshare, in which `NVSHARE_ENABLE=1` has no effect.

Only a file in site-packages makes the variable work, so the check looks for that file and starts no interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nvshare.client_hook.obstacles import executed_file

AUTOLOAD = "nvshare_autoload.pth"
_PYTHON = re.compile(r"python[0-9.]*t?")


def environment_without_nvshare(program: str) -> str | None:
    """The environment of this Python or Python script, if nvshare is not installed there.  None: it is, or unknown."""
    try:
        path = executed_file(program)
    except OSError:
        return None
    if not _PYTHON.fullmatch(Path(path).name):
        return None
    prefix = Path(path).absolute().parent.parent
    sites = list(_sites(prefix, Path.home()))
    return None if not sites or any((site / AUTOLOAD).is_file() for site in sites) else str(prefix)


def _sites(prefix: Path, home: Path) -> Iterator[Path]:
    """The directories whose .pth files this Python reads."""
    try:
        configuration = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        configuration = ""
    yield from prefix.glob("lib*/python3*/site-packages")
    if configuration and not re.search(r"(?mi)^include-system-site-packages *= *true", configuration):
        return
    base = re.search(r"(?m)^home *= *(.+)$", configuration)
    for root in {prefix, Path(base[1].strip()).parent} if base else {prefix, _real(prefix)}:
        for pattern in (
            "lib*/python3*/site-packages",
            "lib*/python3*/dist-packages",
            "local/lib/python3*/dist-packages",
        ):
            yield from root.glob(pattern)
    yield from home.glob(".local/lib/python3*/site-packages")


def _real(prefix: Path) -> Path:
    """The prefix of the Python behind `prefix`/bin/python."""
    return (prefix / "bin" / "python3").resolve().parent.parent
