"""The webhook's HTTPS server, and a plain one beside it for probes and metrics.

Purpose: HTTP/1.1 over TLS with the standard library's server: the load is two requests for each pod that asks for a
GPU, and the API server fails open, so what counts is few dependencies and hard bounds, not requests per second.

Invariants:
- Everything is bounded: connections, their idle time, the time of a handshake and of a request, a body's size.  Who
  exceeds a bound loses the connection; nobody else waits for it.
- A new certificate is taken when its files change, without dropping a connection; one that cannot be loaded changes
  nothing and is counted.
- `close` answers what has been received, then ends within a bound.

May not go here: what reviews mean (kubernetes/cluster/admission_review.py), the command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from nvshare.coordinator.kubernetes.cluster.admission_review import (
    Answer,
    MalformedReviewError,
    Settings,
    mutate,
    validate,
)

log = logging.getLogger("nvshare-admission")

MAX_BODY_BYTES: Final = 6 << 20
"""An object is at most 1.5 MiB in etcd, an update carries two of them; the rest is room for JSON's escapes."""
MAX_BODIES_BYTES: Final = 24 << 20
"""Of all bodies that are being read."""
MAX_VALUES: Final = 500_000
"""Commas and brackets in a body: each may become an object of some 60 bytes."""

_ENDPOINTS: Final[dict[str, Callable[[object, Settings], Answer]]] = {"/mutate": mutate, "/validate": validate}


class CertificateError(Exception):
    """The certificate cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server."""

    connections: int = 128
    handshake_s: float = 3.0
    """From the connection to the end of TLS's handshake."""
    request_s: float = 5.0
    """From a request's first byte to its answer; the API server gives up earlier."""
    idle_s: float = 90.0
    closing_s: float = 4.0


class Metrics:
    """What is counted, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "nvshare_admission_reviews",
            "Reviews answered",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "nvshare_admission_seconds",
            "From a review's first byte to its answer",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
            registry=self.registry,
        )
        self.dropped = Counter(
            "nvshare_admission_dropped_connections",
            "Connections that broke a bound or their TLS",
            ["reason"],
            registry=self.registry,
        )
        self.failed_reloads = Counter(
            "nvshare_admission_failed_certificate_reloads",
            "Certificates that could not be loaded",
            registry=self.registry,
        )


class Certificate:
    """`tls.crt` and `tls.key` of a directory, as a kubernetes.io/tls secret is mounted; loaded again when they change.

    They are read at each connection: next to nothing beside a handshake, and nothing needs to watch them.
    """

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory = directory
        self._metrics = metrics
        self._seen: object = None
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """That of the newest usable certificate.  Raises CertificateError when there has never been one."""
        with self._lock:
            try:
                content: object = [(self._directory / name).read_bytes() for name in ("tls.crt", "tls.key")]
            except OSError as error:
                content = str(error)
            if content != self._seen or self._context is None:
                self._seen = content  # also of one that fails: it is tried once, and again when it changes
                self._load(content)
            assert self._context is not None
            return self._context

    def _load(self, content: object) -> None:
        try:
            _check_read(content)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._directory / "tls.crt", self._directory / "tls.key")
        except (OSError, CertificateError) as error:  # ssl.SSLError is an OSError
            text = f"{self._directory}: no usable tls.crt and tls.key: {error}"
            if self._context is None:
                raise CertificateError(text) from None
            self._metrics.failed_reloads.inc()
            log.error("%s; the one before stays in use", text)  # noqa: TRY400 - the text says it all
        else:
            self._context = context
            log.info("certificate loaded from %s", self._directory)


def _check_read(content: object) -> None:
    if isinstance(content, str):
        raise CertificateError(content)


class BoundedServer(ThreadingMixIn, HTTPServer):
    """A thread for each connection; a bounded number of them; each has a deadline.

    With a certificate it serves reviews over TLS, without one metrics in the clear; `/healthz` both ways.
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
        """Set when the server is about to end: `/healthz` says so, and no connection is kept."""
        self._certificate = certificate
        self._lock = threading.Condition()
        self._deadlines: dict[socket.socket, float] = {}
        self._idle: set[socket.socket] = set()
        self._busy: set[socket.socket] = set()
        self._closing = self._closed = False
        self._bodies_bytes = 0
        self.parsing = threading.Lock()
        """One review at a time: the interpreter has one anyway, and memory is bounded so."""
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
        """The one that was chosen, when it was asked for 0."""
        return int(self.socket.getsockname()[1])

    @property
    def open_connections(self) -> list[socket.socket]:
        with self._lock:
            return list(self._deadlines)

    @property
    def busy_connections(self) -> int:
        """Those whose request has begun."""
        with self._lock:
            return len(self._busy)

    @property
    def reserved_bytes(self) -> int:
        """By bodies that are being read."""
        with self._lock:
            return self._bodies_bytes

    def start(self) -> None:
        """Serves from now on, in threads of its own."""
        for thread in self._own_threads:
            thread.start()

    def leave(self) -> None:
        """From now on `/healthz` fails and each connection ends with its answer; still everything is served."""
        self.leaving = True

    def close(self) -> None:
        """Ends idle connections at once, gives the others their time, returns when all are gone or cut off."""
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

    # --- connections: each is here with a deadline as long as its thread runs -----------------------------------------

    def set_deadline(self, connection: socket.socket, seconds: float, *, idle: bool = False) -> None:
        """The connection is cut off then; an idle one at once, but for what it has received, when the server ends."""
        with self._lock:
            self._deadlines[connection] = time.monotonic() + seconds
            now, before = (self._idle, self._busy) if idle else (self._busy, self._idle)
            now.add(connection)
            before.discard(connection)
            if idle and self._closing:
                _cut(connection, socket.SHUT_RD)
            self._lock.notify_all()

    def reserve(self, size: int) -> bool:
        """Room for a body of so many bytes; a negative size gives it back."""
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
        """In place of `serve_forever`, which wakes twice a second to see whether it should end."""
        while not self._closing:
            try:
                request, client_address = self.get_request()
            except OSError as error:
                with self._lock:
                    if not self._closing:
                        log.warning("cannot accept connections: %s", error)
                        self._lock.wait(0.1)  # out of descriptors: others must end first
                continue
            try:
                self.process_request(request, client_address)
            except RuntimeError as error:  # no thread can be started
                log.warning("a connection is dropped: %s", error)
                self._forget(request)
                self.shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the accepting thread: only what cannot block."""
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
        """On the connection's own thread."""
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
            log.exception("our own mistake, please report it; a connection is dropped")
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
        """TLS takes the descriptor over into an object of its own."""
        with self._lock:
            self._deadlines[wrapped] = self._deadlines.pop(plain)

    def server_bind(self) -> None:
        """Without the look-up of our own name, which may hang; and for both IP versions where there are two."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "nvshare-admission", self.port


def _cut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wakes the thread that reads or writes it.  Not SSLSocket.shutdown, which takes TLS away under that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one segment for an answer
    error_message_format = "%(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def handle_one_request(self) -> None:
        """Waits for the next request within the idle time; then it has a deadline."""
        self.server.set_deadline(self.connection, self.server.limits.idle_s, idle=True)
        if not self.rfile.peek(1):  # type: ignore[attr-defined]  # a BufferedReader, as rbufsize says
            self.close_connection = True
            return
        self.server.set_deadline(self.connection, self.server.limits.request_s)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Probes and metrics."""
        if self.path == "/healthz":
            status = HTTPStatus.SERVICE_UNAVAILABLE if self.server.leaving else HTTPStatus.OK
            self._reply(status, b"leaving\n" if self.server.leaving else b"ok\n", "text/plain")
        elif self.path == "/metrics" and not self.server.serves_reviews:
            self._reply(HTTPStatus.OK, generate_latest(self.server.metrics.registry), CONTENT_TYPE_LATEST)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        """Reviews."""
        begun = time.monotonic()
        endpoint = self.path.partition("?")[0]  # the API server adds ?timeout=2s
        if endpoint not in _ENDPOINTS or not self.server.serves_reviews:
            self._refuse(HTTPStatus.NOT_FOUND, f"reviews go to {' or '.join(_ENDPOINTS)}")
            return
        size, status, text = self._announced()
        if status is HTTPStatus.OK:
            try:
                outcome, status, text = self._review(endpoint, size)
            finally:
                self.server.reserve(-size)
        else:
            outcome = "malformed"
        self.server.metrics.reviews.labels(endpoint, outcome).inc()
        self.server.metrics.seconds.observe(time.monotonic() - begun)
        if status is HTTPStatus.OK:
            self._reply(status, text.encode(), "application/json")
        else:
            self._refuse(status, text)

    def _announced(self) -> tuple[int, HTTPStatus, str]:
        """Size of the body, for which there is room now; or what is wrong, before a byte of it is read."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or self.headers.get("Transfer-Encoding"):
            return 0, HTTPStatus.LENGTH_REQUIRED, "Content-Length: needed, as a number"
        if len(length) > 12 or int(length) > MAX_BODY_BYTES:
            return 0, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: at most {MAX_BODY_BYTES} bytes"
        if self.headers.get_content_type() != "application/json":
            return 0, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: only application/json"
        if not self.server.reserve(int(length)):
            return 0, HTTPStatus.SERVICE_UNAVAILABLE, "too much at once"
        return int(length), HTTPStatus.OK, ""

    def _review(self, endpoint: str, size: int) -> tuple[str, HTTPStatus, str]:
        """Outcome, status and text."""
        body = self.rfile.read(size)
        if len(body) < size:
            return "malformed", HTTPStatus.BAD_REQUEST, "body: shorter than Content-Length"
        if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
            return "malformed", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: at most {MAX_VALUES} values"
        try:
            with self.server.parsing:
                answer = _ENDPOINTS[endpoint](json.loads(body), self.server.settings)
        except MalformedReviewError as error:
            return "malformed", HTTPStatus.BAD_REQUEST, str(error)
        except (ValueError, RecursionError):
            return "malformed", HTTPStatus.BAD_REQUEST, "body: not JSON"
        except Exception:
            log.exception("our own mistake, please report it; the API server lets the pod through")
            return "failed", HTTPStatus.INTERNAL_SERVER_ERROR, "our own mistake"
        return answer.outcome, HTTPStatus.OK, json.dumps(answer.body)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Ends the connection too: what else it holds may be the rest of a body that was not read."""
        self.close_connection = True
        self._reply(status, f"{text}\n".encode(), "text/plain")

    def _reply(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection or self.server.leaving:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def version_string(self) -> str:
        """The Server header: nothing that tells versions."""
        return "nvshare-admission"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """One line a request is for debugging only."""
        log.debug(format, *args)
