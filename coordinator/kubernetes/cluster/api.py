"""The API server: its address and credentials in a pod, one request, and a stream that another thread may end.

Invariants: the server's certificate is verified; what it answers is bounded.

Non-goals: retries.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_S: Final = 10.0
STREAM_S: Final = 60.0
"""Without a byte of a stream, besides the time that the server waits for events."""
MAX_OBJECT_BYTES: Final = 8 << 20
"""etcd stores at most 1.5 MiB for one object."""
WATCH_S: Final = 300
"""The API server ends a watch after one to two times this; random, so that nodes do not reconnect together."""


class NotInClusterError(Exception):
    """This process does not run in a cluster; the text names what is missing."""


class ApiError(Exception):
    """The API server refused.  `code` is the HTTP status, `retry_after_s` the delay that it asks for."""

    def __init__(self, code: int, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Address and credentials of the API server.  Each request reads the token file again: tokens are renewed."""

    host: str
    port: int
    token_file: Path
    ca_file: Path

    @classmethod
    def from_cluster(cls, environ: Mapping[str, str] | None = None) -> ApiAccess:
        """From a pod's environment and service account.  NVSHARE_SERVICE_ACCOUNT_DIR: overrides the directory.

        Raises NotInClusterError.
        """
        env = os.environ if environ is None else environ
        account = Path(env.get("NVSHARE_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT)
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal():
            raise NotInClusterError("KUBERNETES_SERVICE_HOST is not set: the API server is known within a cluster only")
        access = cls(host, int(port), account / "token", account / "ca.crt")
        for file in (access.token_file, access.ca_file):
            if not file.is_file():
                raise NotInClusterError(f"{file} is missing: the pod needs automountServiceAccountToken: true")
        return access

    def connect(self) -> http.client.HTTPSConnection:
        """A connection that verifies the server's certificate.  Raises OSError."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        return http.client.HTTPSConnection(self.host, self.port, timeout=CONNECT_S, context=context)

    def headers(self) -> dict[str, str]:
        """Of a request.  Raises OSError."""
        token = self.token_file.read_text(encoding="ascii").strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json", "User-Agent": "nvshare"}

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request, and the object that the server answers.  Raises ApiError, OSError, HTTPException, ValueError."""
        connection = self.connect()
        try:
            headers = {**self.headers(), "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            check(response)
            return json.loads(response.read(MAX_OBJECT_BYTES))
        finally:
            connection.close()


class Stream:
    """One long answer; `end` may come from any thread or signal handler, at any time."""

    def __init__(self, api: ApiAccess) -> None:
        self._api = api
        self._socket: socket.socket | None = None
        self._ended = False

    def watch(self, path: str, query: Mapping[str, str]) -> Iterator[Mapping[str, Any] | None]:
        """None once the server has accepted the watch, then its events until the server or `end` ends it.

        Raises ApiError, also for an event that says so, OSError, HTTPException, and ValueError and KeyError for what is
        no event.
        """
        seconds = WATCH_S + random.randrange(WATCH_S + 1)
        path = f"{path}?{urlencode({'watch': '1', 'timeoutSeconds': str(seconds), **query})}"
        connection = self._api.connect()
        try:
            headers = self._api.headers()
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(seconds + STREAM_S)
            if self._ended:
                _cut(self._socket)
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            check(response)
            yield None
            while line := response.readline(MAX_OBJECT_BYTES):
                if not line.endswith(b"\n"):
                    raise ValueError(f"an event that is cut off, or has more than {MAX_OBJECT_BYTES} bytes")
                yield _event(json.loads(line))
        except (OSError, http.client.HTTPException):
            if not self._ended:
                raise
        finally:
            connection.close()

    def end(self) -> None:
        """Ends the answer, also one that has not begun."""
        self._ended = True
        if self._socket is not None:
            _cut(self._socket)


def _event(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if event["type"] == "ERROR":
        failure = event["object"]
        raise ApiError(int(failure.get("code", 0)), str(failure.get("message", "the watch failed")))
    return event


def _cut(connection: socket.socket) -> None:
    """Wakes the reading thread.  Not SSLSocket.shutdown, which removes TLS from the socket that the thread reads."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def check(response: http.client.HTTPResponse) -> None:
    """Raises ApiError unless the server has done what it was asked for."""
    if response.status in (http.client.OK, http.client.CREATED):
        return
    text = response.read(65_536).decode("utf-8", "replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason
    if response.status == http.client.FORBIDDEN:
        message += " (the service account lacks a rule of the chart's ClusterRole: rbac.create)"
    after = response.getheader("Retry-After", "")
    raise ApiError(response.status, f"{response.status}: {message[:500]}", float(after) if after.isdecimal() else 0.0)
