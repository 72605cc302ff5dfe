"""A kubelet's device manager, as far as a device plugin can see it: over real gRPC sockets.

It registers plugins, holds their lists, asks them for advice and allocations, remembers what each container got, says
so by PodResources, forgets everything but that at a restart, and gives a container that is started again the old
answer.

Invariants: like the kubelet it believes a plugin's last list, dials the endpoint that was registered, never asks twice
for a container that it has an answer for, and empties the plugins' directory when it starts.

Non-goals: anything of the product but the messages' definitions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from nvshare.coordinator.kubernetes.node import messages as m
from nvshare.coordinator.kubernetes.unix_grpc import CHANNEL_OPTIONS
from tests.waiting import eventually


class AdmissionError(Exception):
    """The pod's UnexpectedAdmissionError."""


@dataclass
class Grant:
    """Devices of a pod's one container by resource, as in the kubelet's checkpoint."""

    pod: str
    devices: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    """(host path, container path), read-only all"""
    cdi_devices: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


class Endpoint:
    """One registered plugin: its list as the kubelet has it."""

    def __init__(self, socket: Path, resource: str, options: Any) -> None:
        self.resource = resource
        self.lists: list[dict[str, bool]] = []
        self.advises = bool(options.get_preferred_allocation_available)
        self.starts = bool(options.pre_start_required)
        self.ended = threading.Event()
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=CHANNEL_OPTIONS)
        asked = self.call("GetDevicePluginOptions", m.Empty(), m.DevicePluginOptions)
        assert asked == options, "the plugin says something else than it registered with"
        watch: Any = self._channel.unary_stream(
            f"/{m.PLUGIN_SERVICE}/ListAndWatch",
            request_serializer=_bytes,
            response_deserializer=m.ListAndWatchResponse.FromString,
        )
        self._stream = watch(m.Empty())
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for answer in self._stream:
                self.lists.append({device.ID: device.health == m.HEALTHY for device in answer.devices})
        except grpc.RpcError:
            pass
        finally:
            self.ended.set()

    def call(self, name: str, request: Any, response: Any) -> Any:
        """One unary call."""
        unary: Any = self._channel.unary_unary(
            f"/{m.PLUGIN_SERVICE}/{name}", request_serializer=_bytes, response_deserializer=response.FromString
        )
        return unary(request, timeout=20)

    def close(self) -> None:
        self._stream.cancel()
        self._channel.close()


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class Kubelet:
    """Lives in `directory`: device-plugins/ and pod-resources/."""

    def __init__(self, directory: Path) -> None:
        self.plugins = directory / "device-plugins"
        self.pod_resources = directory / "pod-resources" / "kubelet.sock"
        for place in (self.plugins, self.pod_resources.parent):
            place.mkdir(parents=True)
        self.endpoints: dict[str, Endpoint] = {}
        self.registrations: list[str] = []
        self.grants: dict[str, Grant] = {}
        self.refuse = 0
        """Number of registrations that are answered with an error first."""
        self._servers: list[Any] = []

    def start(self) -> None:
        """Comes up with an empty directory."""
        for file in self.plugins.iterdir():
            file.unlink()
        registration = self.plugins / "kubelet.sock"
        self._serve(registration, "v1beta1.Registration", "Register", self._register, m.RegisterRequest)
        self._serve(self.pod_resources, "v1.PodResourcesLister", "List", self._list, m.ListPodResourcesRequest)

    def stop(self) -> None:
        """Goes; running containers stay."""
        for endpoint in self.endpoints.values():
            endpoint.close()
        self.endpoints.clear()
        for server in self._servers:
            server.stop(0).wait()
        self._servers.clear()
        for socket in (self.plugins / "kubelet.sock", self.pod_resources):
            socket.unlink(missing_ok=True)

    def _serve(self, socket: Path, service: str, method: str, behaviour: Any, request: Any) -> None:
        server = grpc.server(ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(
            behaviour, request_deserializer=request.FromString, response_serializer=_bytes
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        assert server.add_insecure_port(f"unix://{socket}")
        server.start()
        self._servers.append(server)

    def _register(self, request: Any, context: Any) -> Any:
        self.registrations.append(request.resource_name)
        if self.refuse:
            self.refuse -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the kubelet is not ready")
        if request.version != m.VERSION or "/" in request.endpoint:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"version {request.version}, endpoint {request.endpoint}")
        earlier = self.endpoints.pop(request.resource_name, None)
        if earlier is not None:
            earlier.close()
        socket = self.plugins / request.endpoint
        self.endpoints[request.resource_name] = Endpoint(socket, request.resource_name, request.options)
        return m.Empty()

    def _list(self, request: Any, context: Any) -> Any:
        answer = m.ListPodResourcesResponse()
        for grant in list(self.grants.values()):
            pod = answer.pod_resources.add(name=grant.pod, namespace="default")
            container = pod.containers.add(name="main")
            for resource, devices in grant.devices.items():
                container.devices.add(resource_name=resource, device_ids=devices)
        return answer

    # --- what tests do ------------------------------------------------------------------------------------------------

    def devices(self, resource: str) -> dict[str, bool]:
        """The last list; empty before the first, nothing healthy once the plugin has ended the stream."""
        endpoint = self.endpoints.get(resource)
        if endpoint is None or not endpoint.lists:
            return {}
        return {device: healthy and not endpoint.ended.is_set() for device, healthy in endpoint.lists[-1].items()}

    def await_devices(self, resource: str, healthy: int) -> dict[str, bool]:
        """Until so many are healthy."""
        eventually(lambda: sum(self.devices(resource).values()) == healthy, f"{healthy} healthy {resource}")
        return self.devices(resource)

    def free(self, resource: str) -> list[str]:
        """Healthy devices that no container has."""
        taken = {device for grant in self.grants.values() for device in grant.devices.get(resource, ())}
        return [device for device, healthy in self.devices(resource).items() if healthy and device not in taken]

    def admit(self, pod: str, wants: Mapping[str, int], *, ids: Mapping[str, list[str]] | None = None) -> Grant:
        """One container's devices, as the kubelet gets them; raises AdmissionError.  A known container is not asked for
        again."""  # fmt: skip
        if pod in self.grants:
            return self.grants[pod]
        grant = Grant(pod)
        for resource, count in wants.items():
            chosen = (ids or {}).get(resource) or self._choose(resource, count)
            answer = self._allocate(resource, chosen)
            grant.devices[resource] = chosen
            grant.environment |= dict(answer.envs)
            grant.annotations |= dict(answer.annotations)
            grant.cdi_devices += [device.name for device in answer.cdi_devices]
            for mount in answer.mounts:
                assert mount.read_only
                grant.mounts.append((mount.host_path, mount.container_path))
        self.grants[pod] = grant
        return grant

    def start_container(self, grant: Grant) -> None:
        """What precedes the creation of a container; raises AdmissionError (the kubelet tries again)."""
        for resource, devices in grant.devices.items():
            if self.endpoints[resource].starts:
                request = m.PreStartContainerRequest(devices_ids=devices)
                try:
                    self.endpoints[resource].call("PreStartContainer", request, m.PreStartContainerResponse)
                except grpc.RpcError as error:
                    raise AdmissionError(error.details()) from None  # type: ignore[attr-defined, unused-ignore]

    def _choose(self, resource: str, count: int) -> list[str]:
        free = self.free(resource)
        if len(free) < count:
            raise AdmissionError(f"{resource}: {count} wanted, {len(free)} free")
        endpoint = self.endpoints[resource]
        if not endpoint.advises:
            return free[:count]
        request = m.PreferredAllocationRequest()
        request.container_requests.add(available_deviceIDs=free, allocation_size=count)
        answer = endpoint.call("GetPreferredAllocation", request, m.PreferredAllocationResponse)
        advice = [device for device in answer.container_responses[0].deviceIDs if device in free]
        return (advice + [device for device in free if device not in advice])[:count]

    def _allocate(self, resource: str, devices: list[str]) -> Any:
        request = m.AllocateRequest()
        request.container_requests.add(devices_ids=devices)
        try:
            answer = self.endpoints[resource].call("Allocate", request, m.AllocateResponse)
        except grpc.RpcError as error:
            raise AdmissionError(error.details()) from None  # type: ignore[attr-defined, unused-ignore]
        assert len(answer.container_responses) == 1
        return answer.container_responses[0]

    def remove(self, grant: Grant) -> None:
        """The pod is gone: its devices are free."""
        del self.grants[grant.pod]
