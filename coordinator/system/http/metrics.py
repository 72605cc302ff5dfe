"""Serves Prometheus metrics over HTTP, with a bearer token and TLS where they are given, and two paths for probes.

Invariants: `/livez` and `/readyz` need no token, because a kubelet has none.  Token and certificate are read again
when they are needed, because mounted secrets are renewed.  A slow peer blocks only its own thread.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from nvshare.coordinator.system.http.certificate import Certificate, CertificateError

log: Final = logging.getLogger("nvshare")

_PEER_S: Final = 10.0


class AccessError(ValueError):
    """Address, token or certificate cannot be used; the text names it."""


@dataclass(frozen=True, slots=True)
class Access:
    """Readers of the metrics.  Without either: everybody who reaches the port, in the clear."""

    token_file: Path | str | None = None
    tls_dir: Path | str | None = None
    """Directory with `tls.crt` and `tls.key`."""


class MetricsServer:
    """One port.  Without a collector it is a process that lives and is not ready.

    Raises OSError for a port in use, and AccessError.
    """

    def __init__(
        self,
        address: str,
        port: int,
        collector: Collector | None,
        access: Access = Access(),
        is_alive: Callable[[], object] = lambda: True,
    ) -> None:
        self._access = access
        self._is_alive = is_alive
        self._metrics: Any = None
        if collector is not None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(collector)
            self._metrics = make_wsgi_app(registry)
        certificate = check(address, access)
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._server = _Server(family, str(where[0]), port, certificate)
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
        if not self._may_read(environ.get("HTTP_AUTHORIZATION", "")):
            return _text(start_response, "401 Unauthorized", "a bearer token is needed", ("WWW-Authenticate", "Bearer"))
        answer: Iterable[bytes] = self._metrics(environ, start_response)
        return answer

    def _probe(self, start_response: Any) -> Iterable[bytes]:
        try:
            self._is_alive()
        except Exception:
            return _text(start_response, "503 Service Unavailable", "no answer")
        return _text(start_response, "200 OK", "ok")

    def _may_read(self, authorization: str) -> bool:
        if self._access.token_file is None:
            return True
        try:
            token = _token(Path(self._access.token_file))
        except AccessError:
            return False
        kind, _, given = authorization.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, family: int, address: str, port: int, certificate: Certificate | None) -> None:
        self.address_family = family
        self._certificate = certificate
        super().__init__((address, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """The handshake belongs to the connection's own thread."""
        connection, peer = super().get_request()
        connection.settimeout(_PEER_S)
        if self._certificate is not None:
            context = self._certificate.context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that breaks off is no error of ours."""
        log.debug("metrics: a connection failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing: a scrape is no event."""


def check(address: str, access: Access) -> Certificate | None:
    """Raises AccessError for an address, a token or a certificate that cannot be used."""
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        raise AccessError(f"metrics_address: {address}: {error.strerror}") from None
    if access.token_file is not None:
        _token(Path(access.token_file))
    if access.tls_dir is None:
        return None
    certificate = Certificate(Path(access.tls_dir))
    try:
        certificate.context()
    except CertificateError as error:
        raise AccessError(str(error)) from None
    return certificate


def _token(file: Path) -> bytes:
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise AccessError(f"{file}: {error.strerror}") from None
    if not token:
        raise AccessError(f"{file}: empty: any request would pass")
    return token


def _text(start_response: Any, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{text}\n".encode()]
