"""A real etcd and a real kube-apiserver of one's own, and a small client for them.

The programs are those of the folder KUBEBUILDER_ASSETS, the name under which operators' tests know it.  Everything has
ports, certificates and data of its own, on the loopback interface, and is gone after the test.

Invariants: what is sent is refused if the API server does not know a field of it; each answer keeps the server's
warnings, which is where people see ours; every wait has a bound.

Non-goals: anything that stands in for a part of Kubernetes.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import ssl
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.waiting import eventually

Json = dict[str, Any]
ASSETS: Final = "KUBEBUILDER_ASSETS"
SERVICE_ADDRESSES: Final = "10.96.0.0/16"
_PLURALS: Final = {
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "PriorityClass": "priorityclasses",
    "RuntimeClass": "runtimeclasses",
}
_CLUSTER_WIDE: Final = {
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "MutatingAdmissionPolicy",
    "MutatingAdmissionPolicyBinding", "MutatingWebhookConfiguration", "Namespace", "Node", "PriorityClass",
    "RuntimeClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ValidatingWebhookConfiguration",
}  # fmt: skip


def program(variable: str, name: str) -> Path | None:
    """A program in the folder that an environment variable names; None: not there."""
    folder = os.environ.get(variable)
    found = Path(folder) / name if folder else None
    return found if found is not None and os.access(found, os.X_OK) else None


def free_port() -> int:
    """One that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the API server."""

    status: int
    body: Json
    warnings: tuple[str, ...]

    @property
    def message(self) -> str:
        """Message of a refusal."""
        return str(self.body.get("message", ""))


class RefusedError(Exception):
    """The API server refused what a test took for right."""


@dataclass(slots=True)
class Client:
    """One user of the API server."""

    port: int
    ca_file: Path
    token: str

    def request(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json", **query: str
    ) -> Reply:
        """One request; the answer whatever it is."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", "Content-Type": kind}
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
            # Warning: 299 - "text"
            warnings = [each.partition('"')[2].rpartition('"')[0] for each in response.headers.get_all("Warning") or ()]
        finally:
            connection.close()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = {"message": text.decode("utf-8", "replace")}
        return Reply(response.status, parsed, tuple(each.replace('\\"', '"') for each in warnings))

    def checked(self, method: str, path: str, body: object = None, **more: str) -> Reply:
        """The same for what must succeed.  Raises RefusedError."""
        reply = self.request(method, path, body, **more)
        if reply.status >= 300:
            raise RefusedError(f"{method} {path}: {reply.status}: {reply.message}")
        return reply

    def get(self, path: str) -> Json:
        """Raises RefusedError."""
        return self.checked("GET", path).body

    def create(self, document: Json, namespace: str = "default") -> Reply:
        """As `kubectl create` does it; unknown fields are refused."""
        return self.request("POST", collection(document, namespace), document, fieldValidation="Strict")

    def apply(self, document: Json, namespace: str = "default") -> Reply:
        """As `kubectl apply --server-side` does it."""
        path = f"{collection(document, namespace)}/{document['metadata']['name']}"
        query = {"fieldManager": "tests", "fieldValidation": "Strict", "force": "true"}
        return self.request("PATCH", path, document, kind="application/apply-patch+yaml", **query)

    def patch(self, path: str, change: Json) -> Reply:
        """As `kubectl annotate` does it."""
        return self.request("PATCH", path, change, kind="application/merge-patch+json", fieldValidation="Strict")

    def delete(self, path: str, grace_s: int | None = None) -> Reply:
        """It may be gone before or after the answer."""
        query = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        return self.request("DELETE", path, **query)

    def token_for(self, namespace: str, account: str) -> str:
        """As the kubelet gets it for a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return str(self.checked("POST", path, body).body["status"]["token"])


def collection(document: Json, namespace: str) -> str:
    """Path of the documents of this kind."""
    api, kind = document["apiVersion"], document["kind"]
    plural = _PLURALS.get(kind) or (kind.lower() + "s")
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    if kind in _CLUSTER_WIDE:
        return f"{root}/{plural}"
    return f"{root}/namespaces/{document['metadata'].get('namespace', namespace)}/{plural}"


@dataclass
class ControlPlane:
    """etcd and API server, running."""

    directory: Path
    port: int
    admin: Client
    storage: str
    """etcd's address."""
    version: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.crt"

    def user(self, token: str) -> Client:
        """Somebody else."""
        return Client(self.port, self.ca_file, token)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """A program that is ended with the rest; its output is NAME.log."""
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                list(command), env=environment, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, name: str) -> None:
        """Ends one of them."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start_server(self, name: str = "kube-apiserver", port: int | None = None, *options: str) -> Client:
        """An API server on this storage, also beside another one; returns when it is ready."""
        server = program(ASSETS, "kube-apiserver")
        assert server is not None
        client = Client(port or self.port, self.ca_file, self.admin.token)
        self.start(name, [*_api_server(server, self.directory, self.storage, client.port), *options])
        eventually(lambda: self._ready(client), f"{name} is ready", 120)
        return client

    def _ready(self, client: Client) -> bool:
        if any(process.poll() is not None for process in self.processes.values()):
            raise AssertionError(f"it has ended\n{self.log('etcd')}\n{self.log('kube-apiserver')}")
        try:
            return client.request("GET", "/readyz").status == http.client.OK
        except OSError:
            return False

    def log(self, name: str) -> str:
        """The end of what a program has said."""
        return (self.directory / f"{name}.log").read_text(errors="replace")[-6000:]

    def namespace(self, name: str, **labels: str) -> None:
        """With the account that pods run as; in a cluster a controller makes it."""
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
        for each in (document, account):
            reply = self.admin.apply(each)
            assert reply.status < 300, reply.message

    def close(self) -> None:
        """Ends everything, the last first."""
        for name in reversed(list(self.processes)):
            self.stop(name)


def _certificates(directory: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.crt"))
    served = authority.issue_cert("127.0.0.1", "localhost", "kubernetes.default.svc", "10.96.0.1")
    served.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (directory / "accounts.key").write_bytes(text)


@contextmanager
def control_plane(directory: Path, *options: str) -> Iterator[ControlPlane]:
    """Serves while the block runs.  `options`: more for the API server."""
    etcd = program(ASSETS, "etcd")
    assert etcd is not None
    _certificates(directory)
    token = secrets.token_hex(16)
    (directory / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n', encoding="ascii")
    port, storage = free_port(), f"http://127.0.0.1:{free_port()}"
    plane = ControlPlane(directory, port, Client(port, directory / "ca.crt", token), storage)
    try:
        plane.start("etcd", _etcd(etcd, directory, storage))
        plane.start_server("kube-apiserver", None, *options)
        plane.version = str(plane.admin.get("/version")["gitVersion"])
        plane.namespace("default")
        yield plane
    finally:
        plane.close()


def _etcd(etcd: Path, directory: Path, storage: str) -> list[str]:
    peers = f"http://127.0.0.1:{free_port()}"
    return [
        str(etcd), f"--data-dir={directory / 'etcd'}", f"--listen-client-urls={storage}",
        f"--advertise-client-urls={storage}", f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}", "--unsafe-no-fsync",
    ]  # fmt: skip


def _api_server(server: Path, directory: Path, storage: str, port: int) -> list[str]:
    return [
        str(server), f"--etcd-servers={storage}", "--bind-address=127.0.0.1", f"--secure-port={port}",
        f"--tls-cert-file={directory / 'server.pem'}", f"--tls-private-key-file={directory / 'server.pem'}",
        f"--cert-dir={directory}", f"--token-auth-file={directory / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={directory / 'accounts.key'}",
        f"--service-account-signing-key-file={directory / 'accounts.key'}",
        f"--service-cluster-ip-range={SERVICE_ADDRESSES}", "--allow-privileged=true",
        "--endpoint-reconciler-type=none",
    ]  # fmt: skip
