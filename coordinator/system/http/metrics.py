"""Serves Prometheus metrics over HTTP, with TLS where a certificate is given, and two paths for probes.

Invariants: a renewed certificate is used from the next connection on; one that cannot be read leaves the previous one
in use.  A slow peer blocks only its own thread.
Non-goals: tokens, which a proxy checks.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

log: Final = logging.getLogger("nvshare")

_PEER_S: Final = 10.0


class AccessError(ValueError):
    """Address or certificate cannot be used; the text names it."""


class MetricsServer:
    """One port.  Without a collector it is a process that lives and is not ready.

    `tls_dir` has `tls.crt` and `tls.key`.
    Raises OSError for a port in use, and AccessError.
    """

    def __init__(
        self,
        address: str,
        port: int,
        collector: Collector | None,
        tls_dir: Path | None = None,
        is_alive: Callable[[], object] = lambda: True,
    ) -> None:
        self._is_alive = is_alive
        self._metrics: Any = None
        if collector is not None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(collector)
            self._metrics = make_wsgi_app(registry)
        check(address, tls_dir)
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._server = _Server(family, str(where[0]), port, tls_dir)
        self._server.set_app(self._answer)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving, after a scrape in progress, which is bounded."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/livez":
            return self._probe(start_response)
        if self._metrics is None:
            return _text(start_response, "503 Service Unavailable", "waiting for the driver")
        if path == "/readyz":
            return self._probe(start_response)
        answer: Iterable[bytes] = self._metrics(environ, start_response)
        return answer

    def _probe(self, start_response: Any) -> Iterable[bytes]:
        try:
            self._is_alive()
        except Exception:
            return _text(start_response, "503 Service Unavailable", "no answer")
        return _text(start_response, "200 OK", "ok")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, family: int, address: str, port: int, tls_dir: Path | None) -> None:
        self.address_family = family
        self._tls_dir = tls_dir
        self._tls = None if tls_dir is None else _tls(tls_dir)
        super().__init__((address, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """The handshake belongs to the connection's own thread."""
        connection, peer = super().get_request()
        connection.settimeout(_PEER_S)
        if self._tls_dir is not None and self._tls is not None:
            with contextlib.suppress(AccessError):
                self._tls = _tls(self._tls_dir)
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that breaks off is no error of ours."""
        log.debug("metrics: a connection failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing: a scrape is no event."""


def check(address: str, tls_dir: Path | None) -> None:
    """Raises AccessError for an address or a certificate that cannot be used."""
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        raise AccessError(f"metrics_address: {address}: {error.strerror}") from None
    if tls_dir is not None:
        _tls(tls_dir)


def _tls(directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    except OSError as error:
        raise AccessError(f"{directory}: no usable tls.crt and tls.key: {error}") from None
    return context


def _text(start_response: Any, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]
