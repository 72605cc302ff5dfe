"""Protobuf messages of the kubelet's two gRPC interfaces: device plugins (v1beta1) and pod resources (v1).

A table of field numbers and types defines them at run time, so the build needs no protobuf compiler.  Tests compare
them with recorded bytes.

Invariants: only used fields are declared; protobuf skips the others.  The descriptors live in a pool of their own and
collide with no other package's.

Non-goals: sockets, the meaning of messages.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"
REGISTER: Final = "/v1beta1.Registration/Register"
PLUGIN_SERVICE: Final = "v1beta1.DevicePlugin"
LIST_POD_RESOURCES: Final = "/v1.PodResourcesLister/List"

CHANNEL_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),  # servers reject the default, a Unix socket's path
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)

# message -> field -> (number, type).  "*": repeated; "map": string to string; capitalised types are messages.
_Fields = dict[str, tuple[int, str]]
_PLUGIN: Final[dict[str, _Fields]] = {
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
_POD_RESOURCES: Final[dict[str, _Fields]] = {
    "ListPodResourcesRequest": {},
    "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "*string")},
    "ContainerResources": {"name": (1, "string"), "devices": (2, "*ContainerDevices")},
    "PodResources": {"name": (1, "string"), "namespace": (2, "string"), "containers": (3, "*ContainerResources")},
    "ListPodResourcesResponse": {"pod_resources": (1, "*PodResources")},
}

_F: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {"bool": _F.TYPE_BOOL, "string": _F.TYPE_STRING, "int32": _F.TYPE_INT32}


def _add_field(message: Any, package: str, name: str, number: int, kind: str) -> None:
    repeated = kind.startswith("*") or kind == "map"
    kind = kind.removeprefix("*")
    field = message.field.add(name=name, number=number, label=_F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL)
    if kind == "map":
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for index, part in enumerate(("key", "value"), start=1):
            entry.field.add(name=part, number=index, label=_F.LABEL_OPTIONAL, type=_F.TYPE_STRING)
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{package}.{message.name}.{entry_name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{package}.{kind}"


def _make(package: str, table: dict[str, _Fields]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"nvshare_{package}.proto", package=package, syntax="proto3")
    for message_name, fields in table.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            _add_field(message, package, name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in table)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


_plugin: Final = _make(VERSION, _PLUGIN)
_pods: Final = _make("v1", _POD_RESOURCES)

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
