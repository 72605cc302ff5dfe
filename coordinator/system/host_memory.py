"""Memory of this machine or of the coordinator's container, and the part of it that the GPUs' programs may have.

An unreadable file counts as no limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHARE: Final = 0.75
"""Share of the memory for pinned buffers of all clients; the rest is for programs and the system.  By default, clients
have the same share of an integrated GPU's, which is the machine's."""
LEAST_BYTES: Final = 1 << 30
_ROOT: Final = Path("/")


def default_budget_bytes(root: Path = _ROOT) -> int:
    """`SHARE` of the memory, at least `LEAST_BYTES`."""
    return max(LEAST_BYTES, int(SHARE * memory_bytes(root)))


def machine_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """Total and available memory of the machine; its control groups do not count.  0: unknown."""
    return _meminfo_bytes(root, "MemTotal") or 0, _meminfo_bytes(root, "MemAvailable") or 0


def memory_bytes(root: Path = _ROOT, process: str = "self") -> int:
    """The memory that this process may use; 0: unknown."""
    known = [size for size in (_meminfo_bytes(root, "MemTotal"), *_container_bytes(root, process)) if size]
    return min(known, default=0)


def _meminfo_bytes(root: Path, field: str) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == field and rest.split()[:1]:
            number = rest.split()[0]
            return int(number) << 10 if number.isdecimal() else None
    return None


def _container_bytes(root: Path, process: str) -> list[int | None]:
    """Limits of a process's control groups and of all their parents, for cgroups version 1 and 2."""
    found: list[int | None] = []
    for line in _text(root / f"proc/{process}/cgroup").splitlines():
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
