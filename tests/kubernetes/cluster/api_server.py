"""A double of the API server: pods of a node over TLS, watched, events, and whatever can go wrong with that.

Invariants: it answers with what a test has put into it, notes each request, and blocks no test for ever.

Non-goals: assertions about the watch.
"""

from __future__ import annotations

import json
import queue
import ssl
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import trustme

from nvshare.coordinator.kubernetes.cluster.api import ApiAccess

Json = dict[str, Any]
_END: Final = object()
TOKEN: Final = "token-of-the-plugin"


@dataclass(frozen=True, slots=True)
class Reply:
    """Says this once, instead of what would be said."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    path: str
    query: dict[str, str]
    authorization: str


@dataclass(slots=True)
class State:
    """State of the server."""

    items: list[Json] = field(default_factory=list)
    replies: deque[Reply] = field(default_factory=deque)
    events: queue.Queue[Any] = field(default_factory=queue.Queue)
    asked: list[Asked] = field(default_factory=list)
    created: dict[str, Json] = field(default_factory=dict)
    """Events, by path and name."""
    refused: int = 0
    """Events that were there."""


class Handler(BaseHTTPRequestHandler):
    """Answers with JSON, whole or line by line."""

    protocol_version = "HTTP/1.1"

    def say(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, lines: Iterable[bytes]) -> None:
        """A watch that ends with the lines."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so named in the base class
        """Nothing."""


class _Quiet(ThreadingHTTPServer):
    """Clients that go away are part of the tests."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing."""


class TlsServer:
    """Serves until `close`; `folder` is like a service account's."""

    def __init__(self, folder: Path, handler: type[Handler]) -> None:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        (folder / "token").write_text(TOKEN + "\n", encoding="ascii")
        self._server = _Quiet(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.access = ApiAccess("127.0.0.1", self._server.server_address[1], folder / "token", folder / "ca.crt")

    def environment(self) -> dict[str, str]:
        """Of a process in the cluster."""
        account = self.access.token_file.parent
        return {
            "KUBERNETES_SERVICE_HOST": self.access.host,
            "KUBERNETES_SERVICE_PORT": str(self.access.port),
            "NVSHARE_SERVICE_ACCOUNT_DIR": str(account),
        }

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ApiServer(TlsServer):
    """The server of pods."""

    def __init__(self, folder: Path) -> None:
        self.state = State()
        super().__init__(folder, _handler(self.state))

    def event(self, kind: str, item: Json) -> None:
        """Sends an event to whoever watches."""
        self.raw(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def raw(self, line: bytes) -> None:
        """Sends these bytes to whoever watches."""
        self.state.events.put(line)

    def end_watch(self) -> None:
        """As after timeoutSeconds."""
        self.state.events.put(_END)

    def close(self) -> None:
        """Ends it."""
        self.end_watch()
        super().close()


def _handler(state: State) -> type[Handler]:
    class Pods(Handler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            asked = Asked(parts.path, query, self.headers.get("Authorization", ""))
            state.asked.append(asked)
            if state.replies:
                self.repeat(state.replies.popleft())
            else:
                known = state.items if query["resourceVersion"] == "0" else ()
                first = [json.dumps({"type": "ADDED", "object": item}).encode() + b"\n" for item in known]
                self.stream(chain(first, iter(state.events.get, _END)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = f"{self.path}/{body['metadata']['name']}"
            if state.replies:
                self.repeat(state.replies.popleft())
                return
            known = state.created.setdefault(name, body) is not body
            self.say(409 if known else 201, json.dumps(body).encode())
            state.refused += known

        def repeat(self, reply: Reply) -> None:
            self.say(reply.status, reply.body, reply.headers)

    return Pods
