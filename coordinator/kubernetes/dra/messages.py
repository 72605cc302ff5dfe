"""Protobuf messages of the kubelet's interfaces for DRA drivers (v1 and v1beta1) and for plugin registration.

Non-goals: sockets, the meaning of messages.
"""

from __future__ import annotations

from typing import Any, Final

from nvshare.coordinator.kubernetes.protobuf import Fields, build

REGISTRATION_SERVICE: Final = "pluginregistration.Registration"
DRA_SERVICES: Final = {version: f"k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin" for version in ("v1", "v1beta1")}

_DRA: Final[dict[str, Fields]] = {
    "Claim": {"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
    "Device": {
        "request_names": (1, "*string"),
        "pool_name": (2, "string"),
        "device_name": (3, "string"),
        "cdi_device_ids": (4, "*string"),
        "share_id": (5, "string"),
    },
    "Prepared": {"devices": (1, "*Device"), "error": (2, "string")},
    "Unprepared": {"error": (1, "string")},
    "ClaimsRequest": {"claims": (1, "*Claim")},
    "NodePrepareResourcesResponse": {"claims": (1, "map Prepared")},
    "NodeUnprepareResourcesResponse": {"claims": (1, "map Unprepared")},
}
_REGISTRATION: Final[dict[str, Fields]] = {
    "InfoRequest": {},
    "PluginInfo": {
        "type": (1, "string"),
        "name": (2, "string"),
        "endpoint": (3, "string"),
        "supported_versions": (4, "*string"),
    },
    "RegistrationStatus": {"plugin_registered": (1, "bool"), "error": (2, "string")},
    "RegistrationStatusResponse": {},
}

_dra: Final = build("nvshare.dra", _DRA)
_registration: Final = build("pluginregistration", _REGISTRATION)

Claim: Any = _dra["Claim"]
ClaimsRequest: Any = _dra["ClaimsRequest"]
NodePrepareResourcesResponse: Any = _dra["NodePrepareResourcesResponse"]
NodeUnprepareResourcesResponse: Any = _dra["NodeUnprepareResourcesResponse"]
InfoRequest: Any = _registration["InfoRequest"]
PluginInfo: Any = _registration["PluginInfo"]
RegistrationStatus: Any = _registration["RegistrationStatus"]
RegistrationStatusResponse: Any = _registration["RegistrationStatusResponse"]
