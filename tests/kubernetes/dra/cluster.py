"""A double of a cluster for the driver: an API server with slices and claims, and a kubelet's calls.

The API server keeps objects by path, gives each write a resourceVersion, refuses a stale one, and completes or drops
fields as the real one does.

Invariants: nothing of the product but the definitions of messages and how a call is made.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from nvshare.coordinator.kubernetes.dra import messages as m
from nvshare.coordinator.kubernetes.unix_grpc import call
from tests.kubernetes.cluster.api_server import Handler, TlsServer

SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
SLICE: Final = f"{SLICES}/node-1-gpu.nvshare.com"
CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
ADDED: Final = "2026-11-28T00:00:00Z"


class _Objects(dict[str, Any]):
    """By path; whoever watches is told of each change."""

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self._changed = changed

    def __setitem__(self, path: str, value: Any) -> None:
        with self._changed:
            super().__setitem__(path, value)
            self._changed.notify_all()

    def __delitem__(self, path: str) -> None:
        with self._changed:
            super().__delitem__(path)
            self._changed.notify_all()


class Api(TlsServer):
    """An API server of one node, `node-1`."""

    def __init__(self, folder: Path) -> None:
        self.minor = "36"
        self.gates = {"DRAConsumableCapacity", "DRADeviceTaints"}
        self.may_watch = True
        self.away = False
        self._ends = 0
        self.lock = threading.Condition()
        self.objects = _Objects(self.lock)
        self.objects["/api/v1/nodes/node-1"] = {"metadata": {"name": "node-1", "uid": "uid-node"}}
        self.writes: list[Any] = []
        """Slices as they were stored."""
        self.asked: list[str] = []
        """Requests for slices, such as `GET` and `watch`."""
        super().__init__(folder, _handler(self))

    def end_watches(self) -> None:
        """As after timeoutSeconds."""
        with self.lock:
            self._ends += 1
            self.lock.notify_all()

    def close(self) -> None:
        """Ends it."""
        self.end_watches()
        super().close()

    def watch(self, path: str) -> Iterator[Any]:
        """Events of an object, at first as it is."""
        with self.lock:
            ends, known = self._ends, None
            while True:
                found = self.objects.get(path)
                if found is not None and found is not known:
                    yield {"type": "ADDED" if known is None else "MODIFIED", "object": found}
                elif found is None and known is not None:
                    yield {"type": "DELETED", "object": known}
                known = found
                while self._ends == ends and self.objects.get(path) is known:
                    self.lock.wait()
                if self._ends != ends:
                    return

    def add(self, claim: Any) -> None:
        """A claim that the scheduler has allocated."""
        self.objects[f"{CLAIMS}/{claim['metadata']['name']}"] = claim

    def answer(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        if self.away:
            return 503, {"message": "the server is shutting down"}
        if "watch=1" in query:
            return 403, {"message": "resourceslices is forbidden"}
        if path == "/version":
            return 200, {"major": "1", "minor": self.minor}
        found = self.objects.get(path)
        if path.startswith(SLICES):
            self.asked.append(method)
        if method == "GET":
            return (200, found) if found else (404, {"message": f"{path} not found"})
        name = f"{SLICES}/{body['metadata']['name']}"
        found = self.objects.get(name)
        if method == "POST" and found:
            return 409, {"message": "already exists"}
        if method == "PUT" and (not found or path != name):
            return 404, {"message": "not found"}
        if found and body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        stored = self._completed(body)
        if query != "dryRun=All":
            stored["metadata"]["resourceVersion"] = str(len(self.writes) + 1)
            self.objects[name] = stored
            self.writes.append(stored)
        return (201 if method == "POST" else 200), stored

    def _completed(self, body: Any) -> Any:
        stored = copy.deepcopy(body)
        for device in stored["spec"]["devices"]:
            if "DRAConsumableCapacity" not in self.gates:
                device.pop("allowMultipleAllocations", None)
            if "DRADeviceTaints" not in self.gates:
                device.pop("taints", None)
            for taint in device.get("taints", []):
                taint.setdefault("timeAdded", ADDED)
        return stored


def _handler(api: Api) -> type[Handler]:
    class Objects(Handler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            query = parse_qs(parts.query)
            if "watch" in query and api.may_watch and not api.away:
                api.asked.append("watch")
                name = query["fieldSelector"][0].removeprefix("metadata.name=")
                self.stream(json.dumps(event).encode() + b"\n" for event in api.watch(f"{SLICES}/{name}"))
                return
            with api.lock:
                status, answer = api.answer(self.command, parts.path, parts.query, body)
                content = json.dumps(answer).encode()
            self.say(status, content)

        do_POST = do_PUT = do_GET  # noqa: N815 - so named in the base class

    return Objects


class Kubelet:
    """Its calls to the driver below its directory."""

    def __init__(self, folder: Path) -> None:
        self.registry = folder / "plugins_registry" / "gpu.nvshare.com-reg.sock"

    def info(self) -> Any:
        """What the driver says of itself."""
        return call(self.registry, "/pluginregistration.Registration/GetInfo", m.InfoRequest(), m.PluginInfo, 20)

    def accept(self) -> Path:
        """Registers the driver; returns its socket."""
        endpoint = Path(self.info().endpoint)
        status = m.RegistrationStatus(plugin_registered=True)
        path = "/pluginregistration.Registration/NotifyRegistrationStatus"
        call(self.registry, path, status, m.RegistrationStatusResponse, 20)
        return endpoint

    def call(self, method: str, *claims: Any, version: str = "v1") -> Any:
        """NodePrepareResources or NodeUnprepareResources of claims; answers by UID."""
        asked = [m.Claim(**{key: claim["metadata"][key] for key in ("namespace", "uid", "name")}) for claim in claims]
        path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/{method}"
        endpoint = Path(self.info().endpoint)
        return call(endpoint, path, m.ClaimsRequest(claims=asked), getattr(m, method + "Response"), 20).claims
