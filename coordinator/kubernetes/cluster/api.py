"""The API server: its address and credentials in a pod, and one request.

Invariants: the server's certificate is verified; what it answers is bounded.

Non-goals: watches (pods.py), retries.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_S: Final = 10.0
MAX_OBJECT_BYTES: Final = 8 << 20
"""etcd stores at most 1.5 MiB for one object."""


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
