"""The kubelet's calls over gRPC: registration, and Prepare and Unprepare of v1 and v1beta1.

The kubelet finds the driver by its socket in `plugins_registry`, and again after its own restart.

Non-goals: claims and slots (driver.py), the API server: `claim` reads one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.kubernetes.dra import messages as m
from nvshare.coordinator.kubernetes.dra.claims import DRIVER
from nvshare.coordinator.kubernetes.dra.driver import Driver
from nvshare.coordinator.kubernetes.unix_grpc import serve, unary

log: Final = logging.getLogger("nvshare.dra")

ReadClaim = Callable[[str, str], Mapping[str, Any]]
"""(namespace, name) -> the claim as the API server has it."""
_CALLS: Final = 4
_STOP_S: Final = 2.0


class Service:
    """Two sockets below the kubelet's directory."""

    def __init__(self, driver: Driver, claim: ReadClaim, kubelet_dir: Path) -> None:
        self._driver = driver
        self._claim = claim
        self.endpoint = kubelet_dir / "plugins" / DRIVER / "dra.sock"
        self.registration = kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
        self.registered = False
        self._servers: list[Any] = []

    def start(self) -> None:
        """Serves claims, then announces it.  Raises OSError."""
        calls = {
            "NodePrepareResources": unary(self._prepare, m.ClaimsRequest),
            "NodeUnprepareResources": unary(self._unprepare, m.ClaimsRequest),
        }
        self._serve(self.endpoint, dict.fromkeys(m.DRA_SERVICES.values(), calls))
        registration = {
            "GetInfo": unary(self._info, m.InfoRequest),
            "NotifyRegistrationStatus": unary(self._status, m.RegistrationStatus),
        }
        self._serve(self.registration, {m.REGISTRATION_SERVICE: registration})

    def stop(self) -> None:
        """Withdraws the registration, finishes running calls and removes the sockets."""
        for server in reversed(self._servers):
            server.stop(_STOP_S).wait()
        self._servers.clear()
        for path in (self.registration, self.endpoint):
            path.unlink(missing_ok=True)

    def _serve(self, path: Path, services: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._servers.append(serve(path, services, _CALLS))

    def _info(self, request: Any, context: Any) -> Any:
        versions = [f"{version}.DRAPlugin" for version in m.DRA_SERVICES]
        return m.PluginInfo(type="DRAPlugin", name=DRIVER, endpoint=str(self.endpoint), supported_versions=versions)

    def _status(self, request: Any, context: Any) -> Any:
        self.registered = request.plugin_registered
        if not request.plugin_registered:
            log.warning("the kubelet refuses the registration: %s", request.error)
        return m.RegistrationStatusResponse()

    def _prepare(self, request: Any, context: Any) -> Any:
        answer = m.NodePrepareResourcesResponse()
        for each in request.claims:
            one = answer.claims[each.uid]
            try:
                prepared = self._driver.prepare(each.uid, self._claim(each.namespace, each.name))
            except Exception as error:  # the kubelet shows it in the pod's events and tries again
                one.error = f"nvshare: {error}"
                log.warning("claim %s/%s: %s", each.namespace, each.name, error)
                continue
            for device in prepared:
                one.devices.add(
                    request_names=[device.request],
                    pool_name=device.device.pool,
                    device_name=device.device.name,
                    cdi_device_ids=device.cdi_devices,
                    share_id=device.device.share_id,
                )
        return answer

    def _unprepare(self, request: Any, context: Any) -> Any:
        answer = m.NodeUnprepareResourcesResponse()
        for each in request.claims:
            one = answer.claims[each.uid]
            try:
                self._driver.unprepare(each.uid)
            except Exception as error:
                one.error = f"nvshare: {error}"
                log.warning("claim %s/%s: %s", each.namespace, each.name, error)
        return answer
