"""How much memory this machine, or the container that the coordinator runs in, has: the basis of the host budget.

Invariant: a file that cannot be read or understood counts as no limit; at least `LEAST_BYTES` comes out.

May not go here: who gets how much (memory/host_budget.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHARE: Final = 0.75
"""Of the memory, for pinned buffers of all clients: the rest is for the programs themselves and the system."""
LEAST_BYTES: Final = 1 << 30
_ROOT: Final = Path("/")


def default_budget_bytes(root: Path = _ROOT) -> int:
    """Three quarters of what there is."""
    return max(LEAST_BYTES, int(SHARE * _memory_bytes(root)))


def _memory_bytes(root: Path) -> int:
    known = [size for size in (_machine_bytes(root), *_container_bytes(root)) if size]
    return min(known, default=0)


def _machine_bytes(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal" and rest.split()[:1]:
            number = rest.split()[0]
            return int(number) << 10 if number.isdecimal() else None
    return None


def _container_bytes(root: Path) -> list[int | None]:
    """Limits of the control groups that this process is in, and of all around it: version 2, then 1."""
    found: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = base / path.strip("/")
        for folder in [inner, *inner.parents]:
            text = _text(folder / name).strip()
            found.append(int(text) if text.isdecimal() else None)
            if folder == base:
                break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
