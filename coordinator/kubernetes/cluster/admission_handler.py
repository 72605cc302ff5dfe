"""HTTP of the webhook: one connection, its requests and their bounds.

The handler reads a body only after it has checked its size and type and reserved memory for it.

Non-goals: the meaning of reviews (admission_review.py), deadlines and threads (admission_server.py).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from nvshare.coordinator.kubernetes.cluster.admission_review import (
    Answer,
    MalformedReviewError,
    Settings,
    mutate,
    validate,
)

if TYPE_CHECKING:
    from nvshare.coordinator.kubernetes.cluster.admission_server import BoundedServer

log = logging.getLogger("nvshare-admission")

MAX_BODY_BYTES: Final = 6 << 20
"""An object has at most 1.5 MiB in etcd and an update carries two; the rest is room for JSON escapes."""
MAX_VALUES: Final = 500_000
"""Commas and brackets in a body.  Each may become a Python object of about 60 bytes."""

_ENDPOINTS: Final[dict[str, Callable[[object, Settings], Answer]]] = {"/mutate": mutate, "/validate": validate}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one segment for a response
    error_message_format = "%(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def handle_one_request(self) -> None:
        """Waits up to the idle time for the next request; then the request's deadline applies."""
        self.server.set_deadline(self.connection, self.server.limits.idle_s, idle=True)
        if not self.rfile.peek(1):  # type: ignore[attr-defined]  # a BufferedReader, as rbufsize says
            self.close_connection = True
            return
        self.server.set_deadline(self.connection, self.server.limits.request_s)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Serves probes and metrics."""
        if self.path == "/healthz":
            status = HTTPStatus.SERVICE_UNAVAILABLE if self.server.leaving else HTTPStatus.OK
            self._reply(status, b"leaving\n" if self.server.leaving else b"ok\n", "text/plain")
        elif self.path == "/metrics" and not self.server.serves_reviews:
            self._reply(HTTPStatus.OK, generate_latest(self.server.metrics.registry), CONTENT_TYPE_LATEST)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        """Answers a review."""
        begun = time.monotonic()
        endpoint = self.path.partition("?")[0]  # the API server adds ?timeout=2s
        if endpoint not in _ENDPOINTS or not self.server.serves_reviews:
            self._refuse(HTTPStatus.NOT_FOUND, f"reviews are served at {' and '.join(_ENDPOINTS)}")
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
        """Size of the body, with memory reserved for it; or status and text of the refusal.  Reads nothing."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or self.headers.get("Transfer-Encoding"):
            return 0, HTTPStatus.LENGTH_REQUIRED, "Content-Length: must be a decimal number"
        if len(length) > 12 or int(length) > MAX_BODY_BYTES:
            return 0, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: at most {MAX_BODY_BYTES} bytes"
        if self.headers.get_content_type() != "application/json":
            return 0, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: only application/json"
        if not self.server.reserve(int(length)):
            return 0, HTTPStatus.SERVICE_UNAVAILABLE, "too many large requests at once"
        return int(length), HTTPStatus.OK, ""

    def _review(self, endpoint: str, size: int) -> tuple[str, HTTPStatus, str]:
        """Reads the body; outcome, status and text of the response."""
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
            log.exception("internal error, please report it; the API server admits the pod")
            return "failed", HTTPStatus.INTERNAL_SERVER_ERROR, "internal error"
        return answer.outcome, HTTPStatus.OK, json.dumps(answer.body)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Closes the connection too, since it may still hold an unread body."""
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
        """The Server header, without a version."""
        return "nvshare-admission"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Logs requests at debug level."""
        log.debug(format, *args)
