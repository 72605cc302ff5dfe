"""A gRPC server for one resource: the device plugin API v1beta1 over a Unix socket.

Invariants: each ListAndWatch message is the full list, and a change sends one at once.  A refusal names the request's
field.

Non-goals: when to serve and register (registration.py), a container's mounts (allocation.py), the devices
(resources.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.node.allocation import Answer, NotReadyError
from nvshare.coordinator.kubernetes.slots.device_ids import RequestError
from nvshare.coordinator.kubernetes.unix_grpc import sentence, serialize, serve, unary

log: Final = logging.getLogger("nvshare.plugin")

_STREAMS_AND_CALLS: Final = 16
_STOP_S: Final = 2.0


class Resource(Protocol):
    """A resource: its name, its devices, and how they are allocated."""

    name: str

    def devices(self) -> Sequence[tuple[str, bool]]:
        """(id, healthy) of every device."""

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """Devices to prefer."""

    def allocate(self, field: str, device_ids: Sequence[str]) -> Answer:
        """Allocates for one container.  Raises RequestError and NotReadyError, which name `field`."""

    @property
    def starts(self) -> bool:
        """Whether `start` must be called."""

    def start(self, device_ids: Sequence[str]) -> None:
        """A container with these devices is about to start.  Raises OSError and RpcError."""


Identity = tuple[int, int]
Count = Callable[[str, str], None]
"""(resource, outcome) of an Allocate."""


class PluginServer:
    """Serves one resource on one socket; restartable."""

    def __init__(self, resource: Resource, path: Path, count: Count) -> None:
        self.resource = resource
        self.path = path
        self._count = count
        self._changed = threading.Condition()
        self._version = 0
        self._server: Any = None
        self._serving = 0
        """Number of the present start; streams of earlier starts end."""
        self._socket: Identity | None = None

    def start(self) -> None:
        """Starts serving.  Raises OSError if the socket cannot be created."""
        self._server = serve(self.path, {m.PLUGIN_SERVICE: self._handlers()}, _STREAMS_AND_CALLS)
        self._socket = identity(self.path)

    def stop(self) -> None:
        """Ends streams, finishes running calls and removes the socket."""
        server, self._server = self._server, None
        if server is None:
            return
        with self._changed:
            self._serving += 1
            self._changed.notify_all()
        server.stop(_STOP_S).wait()
        self.path.unlink(missing_ok=True)

    @property
    def serving(self) -> bool:
        """Whether the kubelet can reach it."""
        return self._server is not None and self._socket is not None and identity(self.path) == self._socket

    def changed(self) -> None:
        """Sends the list again, because it has changed.  Thread-safe."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    # --- the five calls -----------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        serving = self._serving  # captured at the start: a stream may begin during `stop`
        watch = grpc.unary_stream_rpc_method_handler(
            lambda request, context: self._list_and_watch(serving, context),
            request_deserializer=m.Empty.FromString,
            response_serializer=serialize,
        )
        return {
            "GetDevicePluginOptions": unary(lambda request, context: self.options(), m.Empty),
            "ListAndWatch": watch,
            "GetPreferredAllocation": unary(self._preferred, m.PreferredAllocationRequest),
            "Allocate": unary(self._allocate, m.AllocateRequest),
            "PreStartContainer": unary(self._start, m.PreStartContainerRequest),
        }

    def options(self) -> Any:
        """The plugin's options, also part of the registration."""
        return m.DevicePluginOptions(pre_start_required=self.resource.starts, get_preferred_allocation_available=True)

    def full_list(self) -> Any:
        """The message of ListAndWatch."""
        return m.ListAndWatchResponse(
            devices=[
                m.Device(ID=name, health=m.HEALTHY if healthy else m.UNHEALTHY)
                for name, healthy in self.resource.devices()
            ]
        )

    def _list_and_watch(self, serving: int, context: Any) -> Iterator[Any]:
        ended = threading.Event()

        def end() -> None:
            ended.set()
            with self._changed:
                self._changed.notify_all()

        if not context.add_callback(end):
            return
        sent = -1
        while True:
            with self._changed:
                while self._version == sent and serving == self._serving and not ended.is_set():
                    self._changed.wait()
                sent = self._version
            if serving != self._serving or ended.is_set():
                return
            yield self.full_list()

    def _preferred(self, request: Any, context: Any) -> Any:
        answers = []
        for index, each in enumerate(request.container_requests):
            if each.allocation_size < 0:
                text = f"container_requests[{index}].allocation_size: is {each.allocation_size}"
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            advice = self.resource.preferred(
                each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
            )
            answers.append(m.ContainerPreferredAllocationResponse(deviceIDs=advice))
        return m.PreferredAllocationResponse(container_responses=answers)

    def _allocate(self, request: Any, context: Any) -> Any:
        answers: list[Any] = []
        try:
            for index, each in enumerate(request.container_requests):
                field = f"{self.resource.name}: container_requests[{index}].devices_ids"
                answers.append(_message(self.resource.allocate(field, each.devices_ids)))
        except RequestError as error:
            self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "refused", str(error))
        except NotReadyError as error:
            self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "not_ready", str(error))
        except OSError as error:
            text = f"{self.resource.name}: {error.filename}: {error.strerror}"
            self._refuse(context, grpc.StatusCode.INTERNAL, "failed", text)
        self._count(self.resource.name, "allocated")
        return m.AllocateResponse(container_responses=answers)

    def _start(self, request: Any, context: Any) -> Any:
        try:
            self.resource.start(request.devices_ids)
        except (OSError, grpc.RpcError) as error:
            text = f"{self.resource.name}: the driver's memory limit cannot be set: {sentence(error)}"
            log.warning("PreStartContainer: %s", text)
            context.abort(grpc.StatusCode.UNAVAILABLE, text)
        return m.PreStartContainerResponse()

    def _refuse(self, context: Any, code: Any, outcome: str, text: str) -> None:
        log.warning("Allocate: %s", text)
        self._count(self.resource.name, outcome)
        context.abort(code, text)


def identity(path: Path) -> Identity | None:
    """Differs for each new file, also if the file system reuses the inode."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _message(answer: Answer) -> Any:
    return m.ContainerAllocateResponse(
        envs=answer.environment,
        mounts=[
            m.Mount(container_path=mount.container_path, host_path=str(mount.host_path), read_only=True)
            for mount in answer.mounts
        ],
        annotations=dict(answer.annotations),
        cdi_devices=[m.CDIDevice(name=name) for name in answer.cdi_devices],
    )
