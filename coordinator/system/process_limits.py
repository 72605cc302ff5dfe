"""Raises this process's limit of open files to the needs of all clients."""

from __future__ import annotations

import contextlib
import logging
import resource
from typing import Final

log: Final = logging.getLogger("nvshare")

_SPARE_DESCRIPTORS: Final = 128
_OTHER_DESCRIPTORS: Final = 256
"""Callers of control.sock, readers of events.sock, and files."""


def possible_connections(max_clients: int) -> int:
    """Raises the limit for this number of clients and returns the possible connections; warns if there are fewer."""
    wanted = max_clients + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _OTHER_DESCRIPTORS  # a socket and a pidfd each
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            wanted = max(16, (soft - _OTHER_DESCRIPTORS) // 2)
            log.warning("limit of %d open files: at most %d clients; raise `ulimit -n`", soft, wanted)
    return wanted
