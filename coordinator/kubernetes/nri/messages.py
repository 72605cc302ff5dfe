"""Protobuf messages of NRI (nri.pkg.api.v1alpha1) and of ttrpc, which carries them.

Non-goals: sockets, the meaning of messages.
"""

from __future__ import annotations

from typing import Any, Final

from nvshare.coordinator.kubernetes.protobuf import Fields, build

RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
CREATE_CONTAINER, STOP_CONTAINER, REMOVE_CONTAINER = 4, 10, 11  # Event
STOPPED: Final = 4  # ContainerState
UNKNOWN, UNIMPLEMENTED = 2, 12  # gRPC's status codes

_TTRPC: Final[dict[str, Fields]] = {
    "Request": {"service": (1, "string"), "method": (2, "string"), "payload": (3, "bytes")},
    "Status": {"code": (1, "int32"), "message": (2, "string")},
    "Response": {"status": (1, "Status"), "payload": (2, "bytes")},
}
_NRI: Final[dict[str, Fields]] = {
    "Empty": {},
    "RegisterPluginRequest": {"plugin_name": (1, "string"), "plugin_idx": (2, "string")},
    "ConfigureRequest": {"runtime_name": (2, "string"), "runtime_version": (3, "string")},
    "ConfigureResponse": {"events": (2, "int32")},
    "PodSandbox": {
        "id": (1, "string"),
        "name": (2, "string"),
        "uid": (3, "string"),
        "namespace": (4, "string"),
        "annotations": (6, "map"),
    },
    "Mount": {
        "destination": (1, "string"),
        "type": (2, "string"),
        "source": (3, "string"),
        "options": (4, "*string"),
    },
    "Container": {
        "id": (1, "string"),
        "pod_sandbox_id": (2, "string"),
        "name": (3, "string"),
        "state": (4, "int32"),
        "env": (8, "*string"),
        "mounts": (9, "*Mount"),
    },
    "SynchronizeRequest": {"pods": (1, "*PodSandbox"), "containers": (2, "*Container"), "more": (3, "bool")},
    "SynchronizeResponse": {"more": (2, "bool")},
    "KeyValue": {"key": (1, "string"), "value": (2, "string")},
    "ContainerAdjustment": {"mounts": (3, "*Mount"), "env": (4, "*KeyValue")},
    "CreateContainerRequest": {"pod": (1, "PodSandbox"), "container": (2, "Container")},
    "CreateContainerResponse": {"adjust": (1, "ContainerAdjustment")},
    "StopContainerRequest": {"container": (2, "Container")},
    "StateChangeEvent": {"event": (1, "int32"), "container": (3, "Container")},
}

_ttrpc: Final = build("ttrpc", _TTRPC)
_nri: Final = build("nri.pkg.api.v1alpha1", _NRI)

Request: Any = _ttrpc["Request"]
Response: Any = _ttrpc["Response"]
Empty: Any = _nri["Empty"]
RegisterPluginRequest: Any = _nri["RegisterPluginRequest"]
ConfigureRequest: Any = _nri["ConfigureRequest"]
ConfigureResponse: Any = _nri["ConfigureResponse"]
Container: Any = _nri["Container"]
PodSandbox: Any = _nri["PodSandbox"]
SynchronizeRequest: Any = _nri["SynchronizeRequest"]
SynchronizeResponse: Any = _nri["SynchronizeResponse"]
CreateContainerRequest: Any = _nri["CreateContainerRequest"]
CreateContainerResponse: Any = _nri["CreateContainerResponse"]
StopContainerRequest: Any = _nri["StopContainerRequest"]
StateChangeEvent: Any = _nri["StateChangeEvent"]
