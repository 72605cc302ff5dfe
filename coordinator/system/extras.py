"""The packages of an extra, and the command that installs them beside this program."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys


def install_command(extra: str) -> str:
    """Names the packages themselves: it works wherever nvshare came from, a checkout that is gone included."""
    try:
        declared = importlib.metadata.requires("nvshare") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    marked = re.compile(rf"(.+?)\s*;\s*extra == ['\"]{extra}['\"]")
    packages = [found[1] for each in declared if (found := marked.fullmatch(each))] or [f".[{extra}]"]
    pip = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *packages])
