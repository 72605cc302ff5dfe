"""What the coordinator tells systemd, or another supervisor that sets NOTIFY_SOCKET: readiness, status, signs of life.

The protocol is that of sd_notify(3): one datagram of `NAME=VALUE` lines.  Without the variable nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Supervisor:
    """The supervisor of this process.  A message that it does not take is dropped: nothing here waits or fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        of_a_container = os.getpid() == 1 or "KUBERNETES_SERVICE_HOST" in environment
        self.restarts = bool(self._address) or (of_a_container and os.getsid(0) == os.getpid())
        """Whether something starts this process again after its end: systemd and its like, or a container's runtime."""
        due, whom = environment.get("WATCHDOG_USEC", "")[:20], environment.get("WATCHDOG_PID", "")
        watched = bool(self._address) and due.isdecimal() and whom in ("", str(os.getpid()))
        self.ping_period_ns = max(1, int(due) * 1_000 // 3) if watched and int(due) else None
        """Time between two signs of life, a third of what the supervisor allows; None: it expects none."""

    def tell(self, *lines: str) -> None:
        """Sends lines such as `READY=1` together."""
        if not self._address.startswith(("/", "@")):
            return
        name = self._address.replace("@", "\0", 1) if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), name)
