"""Protobuf messages of the kubelet's two gRPC interfaces: device plugins (v1beta1) and pod resources (v1).

Tests compare them with recorded bytes.

Non-goals: sockets, the meaning of messages.
"""

from __future__ import annotations

from typing import Any, Final

from nvshare.coordinator.kubernetes.protobuf import Fields, build

VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"
REGISTER: Final = "/v1beta1.Registration/Register"
PLUGIN_SERVICE: Final = "v1beta1.DevicePlugin"
LIST_POD_RESOURCES: Final = "/v1.PodResourcesLister/List"

_PLUGIN: Final[dict[str, Fields]] = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
        "options": (4, "DevicePluginOptions"),
    },
    "Device": {"ID": (1, "string"), "health": (2, "string")},
    "ListAndWatchResponse": {"devices": (1, "*Device")},
    "ContainerPreferredAllocationRequest": {
        "available_deviceIDs": (1, "*string"),
        "must_include_deviceIDs": (2, "*string"),
        "allocation_size": (3, "int32"),
    },
    "PreferredAllocationRequest": {"container_requests": (1, "*ContainerPreferredAllocationRequest")},
    "ContainerPreferredAllocationResponse": {"deviceIDs": (1, "*string")},
    "PreferredAllocationResponse": {"container_responses": (1, "*ContainerPreferredAllocationResponse")},
    "ContainerAllocateRequest": {"devices_ids": (1, "*string")},
    "AllocateRequest": {"container_requests": (1, "*ContainerAllocateRequest")},
    "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "read_only": (3, "bool")},
    "CDIDevice": {"name": (1, "string")},
    "ContainerAllocateResponse": {
        "envs": (1, "map"),
        "mounts": (2, "*Mount"),
        "annotations": (4, "map"),
        "cdi_devices": (5, "*CDIDevice"),
    },
    "AllocateResponse": {"container_responses": (1, "*ContainerAllocateResponse")},
    "PreStartContainerRequest": {"devices_ids": (1, "*string")},
    "PreStartContainerResponse": {},
}
_POD_RESOURCES: Final[dict[str, Fields]] = {
    "ListPodResourcesRequest": {},
    "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "*string")},
    "ContainerResources": {"name": (1, "string"), "devices": (2, "*ContainerDevices")},
    "PodResources": {"name": (1, "string"), "namespace": (2, "string"), "containers": (3, "*ContainerResources")},
    "ListPodResourcesResponse": {"pod_resources": (1, "*PodResources")},
}

_plugin: Final = build(VERSION, _PLUGIN)
_pods: Final = build("v1", _POD_RESOURCES)

Empty: Any = _plugin["Empty"]
DevicePluginOptions: Any = _plugin["DevicePluginOptions"]
RegisterRequest: Any = _plugin["RegisterRequest"]
Device: Any = _plugin["Device"]
ListAndWatchResponse: Any = _plugin["ListAndWatchResponse"]
PreferredAllocationRequest: Any = _plugin["PreferredAllocationRequest"]
ContainerPreferredAllocationResponse: Any = _plugin["ContainerPreferredAllocationResponse"]
PreferredAllocationResponse: Any = _plugin["PreferredAllocationResponse"]
AllocateRequest: Any = _plugin["AllocateRequest"]
Mount: Any = _plugin["Mount"]
CDIDevice: Any = _plugin["CDIDevice"]
ContainerAllocateResponse: Any = _plugin["ContainerAllocateResponse"]
AllocateResponse: Any = _plugin["AllocateResponse"]
PreStartContainerRequest: Any = _plugin["PreStartContainerRequest"]
PreStartContainerResponse: Any = _plugin["PreStartContainerResponse"]
ListPodResourcesRequest: Any = _pods["ListPodResourcesRequest"]
ListPodResourcesResponse: Any = _pods["ListPodResourcesResponse"]
