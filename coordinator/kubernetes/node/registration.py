"""Keeps the plugin registered: across restarts of the kubelet, which forgets everything and empties its directory.

A kubelet that has started has made its socket anew.  Then every resource is served on a new socket and registered
again; a registration that fails is tried again, later and later.

Invariants: changes are heard by inotify, and looked for every half minute all the same (every five seconds where there
is none); nothing that the kubelet does ends the plugin.

May not go here: what is served.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.plugin import PluginServer
from nvshare.coordinator.kubernetes.slots import inotify

log: Final = logging.getLogger("nvshare.plugin")

KUBELET_SOCKET: Final = "kubelet.sock"
FIRST_RETRY_NS: Final = 500_000_000
LAST_RETRY_NS: Final = 30_000_000_000
LOOK_AGAIN_NS: Final = 5_000_000_000
BACKSTOP_NS: Final = 30_000_000_000
"""A directory that was made anew is another one to inotify."""
REGISTER_S: Final = 5.0
_MASK: Final = inotify.CREATE | inotify.MOVED_TO | inotify.DELETE | inotify.MOVED_FROM

Identity = tuple[int, int]


class Registrar:
    """Serves and registers resources until it is stopped.  Its own thread only, but for `stop`."""

    def __init__(
        self, plugin_dir: Path, servers: Sequence[PluginServer], wake: int, counted: Callable[[str, str], None]
    ) -> None:
        """`wake`: a descriptor that is readable once `run` shall end.  `counted`: (resource, outcome)."""
        self._directory = plugin_dir
        self._servers = servers
        self._wake = wake
        self._counted = counted
        self._kubelet: Identity | None = None
        self._registered: dict[str, Identity] = {}
        """Resource -> the kubelet that it is registered with."""
        self._retry_ns = FIRST_RETRY_NS
        self._retry_at_ns: int | None = None
        self._notices: inotify.Inotify | None = None
        self.connected = False

    def run(self) -> None:
        """Until `wake`."""
        self._watch()
        try:
            while True:
                self._turn(time.monotonic_ns())
                if self._wait(time.monotonic_ns()):
                    return
        finally:
            for server in self._servers:
                server.stop()
            if self._notices is not None:
                self._notices.close()

    def _watch(self) -> None:
        try:
            self._notices = inotify.Inotify()
            self._notices.add(self._directory, _MASK)
        except OSError as error:
            log.warning("inotify: %s; the kubelet is looked for every %d s", error.strerror, LOOK_AGAIN_NS // 10**9)
            if self._notices is not None:
                self._notices.close()
            self._notices = None

    def _wait(self, now_ns: int) -> bool:
        """Until something may have changed.  True: it is time to end."""
        look_ns = now_ns + (LOOK_AGAIN_NS if self._notices is None else BACKSTOP_NS)
        timeout = max(0, min(look_ns, self._retry_at_ns or look_ns) - now_ns) / 1e9
        waited_for = [self._wake] + ([self._notices.descriptor] if self._notices is not None else [])
        ready, _, _ = select.select(waited_for, (), (), timeout)
        if self._notices is not None and self._notices.descriptor in ready:
            self._notices.read()
        return self._wake in ready

    def _turn(self, now_ns: int) -> None:
        if self._notices is not None:
            with contextlib.suppress(OSError):  # of no effect unless the directory was made anew
                self._notices.add(self._directory, _MASK)
        kubelet = _identity(self._directory / KUBELET_SOCKET)
        if kubelet != self._kubelet:
            if self._kubelet is not None or kubelet is None:
                log.info("the kubelet has %s", "gone" if kubelet is None else "started anew")
            self._kubelet = kubelet
            self._retry_ns, self._retry_at_ns = FIRST_RETRY_NS, None
        # Not serving: it never was, or the kubelet has emptied its directory.
        missing = [
            server
            for server in self._servers
            if not server.serving or self._registered.get(server.resource.name) != kubelet
        ]
        self.connected = kubelet is not None and not missing
        if self.connected:
            self._retry_ns, self._retry_at_ns = FIRST_RETRY_NS, None
        elif kubelet is not None and (self._retry_at_ns is None or now_ns >= self._retry_at_ns):
            self._register_all(missing, now_ns)

    def _register_all(self, missing: Sequence[PluginServer], now_ns: int) -> None:
        self._retry_at_ns = None
        for server in missing:
            name = server.resource.name
            try:
                if not server.serving:  # to end one that the kubelet may have dialled already would fail its pods
                    server.stop()
                    server.start()
                known = self._register(server)
            except (OSError, grpc.RpcError) as error:
                self._counted(name, "failed")
                log.warning("registering %s: %s; trying again", name, _sentence(error))
                known = None
            else:
                self._counted(name, "registered")
                log.info("registered %s: %d devices", name, len(server.resource.devices()))
            if known is not None:
                self._registered[name] = known
            elif self._retry_at_ns is None:
                self._retry_at_ns = now_ns + self._retry_ns
                self._retry_ns = min(LAST_RETRY_NS, self._retry_ns * 2)
        self.connected = all(self._registered.get(each.resource.name) == self._kubelet for each in self._servers)

    def _register(self, server: PluginServer) -> Identity | None:
        """The kubelet that knows it now; None: they changed meanwhile, and it was one of them.  Raises RpcError.

        A kubelet that starts empties its directory first and makes its own socket then, so what we notice first is
        still the old kubelet's, and who answers may be the new one already.
        """
        before = _identity(self._directory / KUBELET_SOCKET)
        with grpc.insecure_channel(f"unix://{self._directory / KUBELET_SOCKET}", options=m.CHANNEL_OPTIONS) as channel:
            call: Any = channel.unary_unary(
                m.REGISTER, request_serializer=_serialize, response_deserializer=m.Empty.FromString
            )
            call(
                m.RegisterRequest(
                    version=m.VERSION,
                    endpoint=server.path.name,
                    resource_name=server.resource.name,
                    options=server.options(),
                ),
                timeout=REGISTER_S,
            )
        return before if before == _identity(self._directory / KUBELET_SOCKET) else None


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _identity(path: Path) -> Identity | None:
    """Changes whenever the file is made anew, also if the inode's number is used again."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _sentence(error: Any) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
