"""Runs a command as a container runtime would: with these mounts, in a mount namespace of its own.

usage: enter_container.py MOUNTS.json COMMAND...

MOUNTS.json is a list of [host path, container path], of directories and files; each is bound read-only.  What is
missing in the root file system appears in this namespace only.  Needs root; processes.py says what happens without it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

NEW_MOUNTS = 0x20000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raises OSError."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """mount(2)."""
    data = None if kind is None else kind.encode()
    checked(libc.mount(source.encode(), target.encode(), data, ctypes.c_ulong(flags), None), f"mount {target}")


def make_place(target: Path, is_file: bool) -> None:
    """What to mount at; where it is missing, its first parent that exists is shown with it added."""
    if target.exists():
        return
    above = next(parent for parent in target.parents if parent.is_dir())
    stage = Path(tempfile.gettempdir()) / f"stage-{os.getpid()}"
    stage.mkdir(exist_ok=True)
    mount("stage", str(stage), "tmpfs", 0)
    for entry in above.iterdir():
        if entry.is_symlink():
            (stage / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir():
            (stage / entry.name).mkdir()
            mount(str(entry), str(stage / entry.name), None, BIND | RECURSIVE)
        elif entry.is_file():
            (stage / entry.name).touch()
            mount(str(entry), str(stage / entry.name), None, BIND)
    place = stage / target.relative_to(above)
    (place.parent if is_file else place).mkdir(parents=True, exist_ok=True)
    if is_file:
        place.touch()
    mount(str(stage), str(above), None, BIND | RECURSIVE)


def main() -> None:
    """Does not return."""
    checked(libc.unshare(NEW_MOUNTS), "unshare")
    mount("none", "/", None, RECURSIVE | PRIVATE)
    for host_path, container_path in json.loads(Path(sys.argv[1]).read_text()):
        # The runtime makes a missing host directory, as containerd does for the kubelet's mounts.
        if not Path(host_path).exists():
            Path(host_path).mkdir(parents=True)
        make_place(Path(container_path), Path(host_path).is_file())
        mount(host_path, container_path, None, BIND)
        mount("none", container_path, None, BIND | REMOUNT | READ_ONLY)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
