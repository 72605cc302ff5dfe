"""Keeps the plugin registered across restarts of the kubelet, which forgets plugins and empties their directory.

A restarted kubelet creates a new socket.  The registrar then serves the resource on a new socket and registers it
again; failed registrations are retried with a growing pause.

Invariants: inotify reports changes; the registrar also checks every 30 seconds, every 5 seconds without inotify.  No
behaviour of the kubelet ends the plugin.

Non-goals: the served resource.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.plugin import Identity, PluginServer, identity
from nvshare.coordinator.kubernetes.slots import inotify
from nvshare.coordinator.kubernetes.unix_grpc import call, sentence

log: Final = logging.getLogger("nvshare.plugin")

KUBELET_SOCKET: Final = "kubelet.sock"
FIRST_RETRY_NS: Final = 500_000_000
LAST_RETRY_NS: Final = 30_000_000_000
LOOK_AGAIN_NS: Final = 5_000_000_000
BACKSTOP_NS: Final = 30_000_000_000
"""Finds a recreated directory, which inotify does not watch."""
REGISTER_S: Final = 5.0
_MASK: Final = inotify.CREATE | inotify.MOVED_TO | inotify.DELETE | inotify.MOVED_FROM


class Registrar:
    """Serves and registers a resource until `wake`.  Single-threaded."""

    def __init__(self, plugin_dir: Path, server: PluginServer, wake: int, counted: Callable[[str, str], None]) -> None:
        """`wake`: a descriptor that becomes readable to end `run`.  `counted`: (resource, outcome)."""
        self._directory = plugin_dir
        self._server = server
        self._wake = wake
        self._counted = counted
        self._kubelet: Identity | None = None
        self._registered: Identity | None = None
        """The kubelet with which it is registered."""
        self._retry_ns = FIRST_RETRY_NS
        self._retry_at_ns: int | None = None
        self._notices: inotify.Inotify | None = None
        self.connected = False

    def run(self) -> None:
        """Serves until `wake`."""
        self._watch()
        try:
            while True:
                self._turn(time.monotonic_ns())
                if self._wait(time.monotonic_ns()):
                    return
        finally:
            self._server.stop()
            if self._notices is not None:
                self._notices.close()

    def _watch(self) -> None:
        try:
            self._notices = inotify.Inotify()
            self._notices.add(self._directory, _MASK)
        except OSError as error:
            log.warning("inotify: %s; checking for the kubelet every %d s", error.strerror, LOOK_AGAIN_NS // 10**9)
            if self._notices is not None:
                self._notices.close()
            self._notices = None

    def _wait(self, now_ns: int) -> bool:
        """Waits until something may have changed.  True: `wake` is readable."""
        look_ns = now_ns + (LOOK_AGAIN_NS if self._notices is None else BACKSTOP_NS)
        timeout = max(0, min(look_ns, self._retry_at_ns or look_ns) - now_ns) / 1e9
        waited_for = [self._wake] + ([self._notices.descriptor] if self._notices is not None else [])
        ready, _, _ = select.select(waited_for, (), (), timeout)
        if self._notices is not None and self._notices.descriptor in ready:
            self._notices.read()
        return self._wake in ready

    def _turn(self, now_ns: int) -> None:
        if self._notices is not None:
            with contextlib.suppress(OSError):  # no effect unless the directory was recreated
                self._notices.add(self._directory, _MASK)
        kubelet = identity(self._directory / KUBELET_SOCKET)
        if kubelet != self._kubelet:
            if self._kubelet is not None or kubelet is None:
                log.info("the kubelet has %s", "stopped" if kubelet is None else "restarted")
            self._kubelet = kubelet
            self._retry_ns, self._retry_at_ns = FIRST_RETRY_NS, None
        # Not serving: not started yet, or the kubelet has emptied its directory.
        self.connected = kubelet is not None and self._server.serving and self._registered == kubelet
        if self.connected:
            self._retry_ns, self._retry_at_ns = FIRST_RETRY_NS, None
        elif kubelet is not None and (self._retry_at_ns is None or now_ns >= self._retry_at_ns):
            self._serve_and_register(now_ns)

    def _serve_and_register(self, now_ns: int) -> None:
        server, name = self._server, self._server.resource.name
        known = None
        try:
            if not server.serving:  # a serving one stays: the kubelet may use it already
                server.stop()
                server.start()
            known = self._register()
        except (OSError, grpc.RpcError) as error:
            self._counted(name, "failed")
            log.warning("registering %s: %s; retrying", name, sentence(error))
        else:
            self._counted(name, "registered")
            log.info("registered %s: %d devices", name, len(server.resource.devices()))
        if known is None:
            self._retry_at_ns = now_ns + self._retry_ns
            self._retry_ns = min(LAST_RETRY_NS, self._retry_ns * 2)
        else:
            self._registered, self._retry_at_ns = known, None
        self.connected = known is not None and known == self._kubelet

    def _register(self) -> Identity | None:
        """The kubelet that accepted the registration; None: the kubelet changed meanwhile.  Raises RpcError.

        A starting kubelet empties its directory before it creates its socket.  So the socket that we saw may be the
        old kubelet's while the new kubelet answers the call.
        """
        socket = self._directory / KUBELET_SOCKET
        before = identity(socket)
        request = m.RegisterRequest(
            version=m.VERSION,
            endpoint=self._server.path.name,
            resource_name=self._server.resource.name,
            options=self._server.options(),
        )
        call(socket, m.REGISTER, request, m.Empty, REGISTER_S)
        return before if before == identity(socket) else None
