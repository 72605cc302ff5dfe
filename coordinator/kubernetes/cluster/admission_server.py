"""The webhook's HTTPS server, and a plain server beside it for probes and metrics.

HTTP/1.1 with the standard library's server: the load is two requests for each pod that requests a GPU, and the API
server fails open.  Few dependencies and hard bounds matter more than requests per second.

Invariants:
- Connections, idle time, handshake time, request time and body size are bounded.  A connection that exceeds a bound
  is closed; no other connection waits for it.
- A new certificate takes effect when its files change, without closing a connection.
- `close` answers every request that has been received, then returns within a bound.

Non-goals: HTTP (admission_handler.py), the command line.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from http.server import HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.admission_handler import Handler
from nvshare.coordinator.kubernetes.cluster.admission_metrics import Metrics
from nvshare.coordinator.kubernetes.cluster.admission_review import Settings
from nvshare.coordinator.system.http.certificate import Certificate

log = logging.getLogger("nvshare-admission")

MAX_BODIES_BYTES: Final = 24 << 20
"""Total size of the bodies that are being read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server."""

    connections: int = 128
    handshake_s: float = 3.0
    """From accepting a connection to the end of its TLS handshake."""
    request_s: float = 5.0
    """From a request's first byte to its response; the API server gives up earlier."""
    idle_s: float = 90.0
    closing_s: float = 4.0


class BoundedServer(ThreadingMixIn, HTTPServer):
    """One thread for each connection; the number of connections is bounded, and each has a deadline.

    With a certificate it serves reviews over TLS, without one metrics in the clear; `/healthz` in both cases.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        settings: Settings,
        metrics: Metrics,
        *,
        certificate: Certificate | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.settings = settings
        self.metrics = metrics
        self.limits = limits or Limits()
        self.leaving = False
        """The server is about to end: `/healthz` fails, and each response closes its connection."""
        self._certificate = certificate
        self._lock = threading.Condition()
        self._deadlines: dict[socket.socket, float] = {}
        self._idle: set[socket.socket] = set()
        self._busy: set[socket.socket] = set()
        self._closing = self._closed = False
        self._bodies_bytes = 0
        self.parsing = threading.Lock()
        """Held while parsing a review, so that only one parsed body is in memory."""
        if certificate is not None:
            certificate.context()
        super().__init__(address, Handler)
        self._own_threads = [
            threading.Thread(target=self._reap, name="deadlines", daemon=True),
            threading.Thread(target=self._accept, name="accept", daemon=True),
        ]

    @property
    def serves_reviews(self) -> bool:
        return self._certificate is not None

    @property
    def port(self) -> int:
        """The bound port, also when the address asked for port 0."""
        return int(self.socket.getsockname()[1])

    @property
    def open_connections(self) -> list[socket.socket]:
        with self._lock:
            return list(self._deadlines)

    @property
    def busy_connections(self) -> int:
        """Number of connections with a request in progress."""
        with self._lock:
            return len(self._busy)

    @property
    def reserved_bytes(self) -> int:
        """Memory reserved for bodies that are being read."""
        with self._lock:
            return self._bodies_bytes

    def start(self) -> None:
        """Starts serving in threads of its own."""
        for thread in self._own_threads:
            thread.start()

    def leave(self) -> None:
        """Announces the end: `/healthz` fails, each response closes its connection, reviews are still answered."""
        self.leaving = True

    def close(self) -> None:
        """Closes idle connections at once and the others after their request or a bound; then returns."""
        self.leaving = True
        with self._lock:
            self._closing = True
        _cut(self.socket)  # wakes the accepting thread
        self.server_close()
        with self._lock:
            for connection in self._idle:
                _cut(connection, socket.SHUT_RD)
            self._lock.wait_for(lambda: not self._deadlines, self.limits.closing_s)
            for connection in self._deadlines:
                _cut(connection)
            self._closed = True
            self._lock.notify_all()

    # --- connections: each has a deadline for as long as its thread runs ----------------------------------------------

    def set_deadline(self, connection: socket.socket, seconds: float, *, idle: bool = False) -> None:
        """Shuts the connection down after `seconds`; an idle one already when the server closes, after its input."""
        with self._lock:
            self._deadlines[connection] = time.monotonic() + seconds
            now, before = (self._idle, self._busy) if idle else (self._busy, self._idle)
            now.add(connection)
            before.discard(connection)
            if idle and self._closing:
                _cut(connection, socket.SHUT_RD)
            self._lock.notify_all()

    def reserve(self, size: int) -> bool:
        """Reserves memory for a body if it fits; a negative size releases it."""
        with self._lock:
            fits = self._bodies_bytes + size <= MAX_BODIES_BYTES
            self._bodies_bytes += size if fits else 0
            return fits

    def _reap(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                for connection, deadline in list(self._deadlines.items()):
                    if deadline <= now:
                        self._deadlines[connection] = float("inf")
                        self.metrics.dropped.labels("idle" if connection in self._idle else "slow").inc()
                        _cut(connection)
                soonest = min(self._deadlines.values(), default=float("inf"))
                self._lock.wait(None if soonest == float("inf") else max(0.0, soonest - now))

    def _accept(self) -> None:
        """Accepts connections; unlike `serve_forever`, which wakes twice a second, it blocks until `close`."""
        while not self._closing:
            try:
                request, client_address = self.get_request()
            except OSError as error:
                with self._lock:
                    if not self._closing:
                        log.warning("cannot accept connections: %s", error)
                        self._lock.wait(0.1)  # out of descriptors: other connections must end first
                continue
            try:
                self.process_request(request, client_address)
            except RuntimeError as error:  # no thread can be started
                log.warning("a connection is closed: %s", error)
                self._forget(request)
                self.shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Runs on the accepting thread and must not block."""
        with self._lock:
            full = len(self._deadlines) >= self.limits.connections
            if not full:
                self._deadlines[request] = time.monotonic() + self.limits.handshake_s
                self._lock.notify_all()
        if full:
            self.metrics.dropped.labels("too_many").inc()
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs on the connection's thread: handshake, then requests."""
        connection = request
        try:
            if self._certificate is not None:
                context = self._certificate.context()
                connection = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                self._replace(request, connection)
                connection.do_handshake()
            self.finish_request(connection, client_address)
        except ssl.SSLError as error:
            self.metrics.dropped.labels("tls").inc()
            log.debug("connection from %s: %s", client_address[0], error)
        except OSError as error:
            log.debug("connection from %s: %s", client_address[0], error)
        except Exception:
            log.exception("internal error, please report it; a connection is closed")
        finally:
            self._forget(connection)
            self.shutdown_request(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._deadlines.pop(connection, None)
            self._idle.discard(connection)
            self._busy.discard(connection)
            self._lock.notify_all()

    def _replace(self, plain: socket.socket, wrapped: socket.socket) -> None:
        """Moves the deadline to the TLS socket, which takes over the descriptor."""
        with self._lock:
            self._deadlines[wrapped] = self._deadlines.pop(plain)

    def server_bind(self) -> None:
        """Binds without the base class's reverse DNS lookup, which may hang; a `::` socket accepts IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "nvshare-admission", self.port


def _cut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wakes the thread that uses it.  Not SSLSocket.shutdown, which removes TLS while that thread reads."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)
