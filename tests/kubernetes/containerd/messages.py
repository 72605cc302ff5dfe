"""The messages of the kubelet's calls to a container runtime (CRI v1), with the fields that tests use."""

from __future__ import annotations

from typing import Any, Final

from nvshare.coordinator.kubernetes.protobuf import build

_classes: Final = build(
    "runtime.v1",
    {
        "PodSandboxMetadata": {
            "name": (1, "string"), "uid": (2, "string"), "namespace": (3, "string"), "attempt": (4, "uint32"),
        },
        "NamespaceOption": {"network": (1, "int32"), "pid": (2, "int32"), "ipc": (3, "int32")},
        "LinuxSandboxSecurityContext": {"namespace_options": (1, "NamespaceOption")},
        "LinuxPodSandboxConfig": {
            "cgroup_parent": (1, "string"), "security_context": (2, "LinuxSandboxSecurityContext"),
        },
        "PodSandboxConfig": {
            "metadata": (1, "PodSandboxMetadata"), "log_directory": (3, "string"), "labels": (6, "map"),
            "annotations": (7, "map"), "linux": (8, "LinuxPodSandboxConfig"),
        },
        "RunPodSandboxRequest": {"config": (1, "PodSandboxConfig")},
        "RunPodSandboxResponse": {"pod_sandbox_id": (1, "string")},
        "StopPodSandboxRequest": {"pod_sandbox_id": (1, "string")},
        "StopPodSandboxResponse": {},
        "RemovePodSandboxRequest": {"pod_sandbox_id": (1, "string")},
        "RemovePodSandboxResponse": {},
        "ContainerMetadata": {"name": (1, "string"), "attempt": (2, "uint32")},
        "ImageSpec": {"image": (1, "string")},
        "KeyValue": {"key": (1, "string"), "value": (2, "bytes")},
        "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "readonly": (3, "bool")},
        "CDIDevice": {"name": (1, "string")},
        "LinuxContainerConfig": {},
        "ContainerConfig": {
            "metadata": (1, "ContainerMetadata"), "image": (2, "ImageSpec"), "command": (3, "*string"),
            "envs": (6, "*KeyValue"), "mounts": (7, "*Mount"), "labels": (9, "map"), "annotations": (10, "map"),
            "log_path": (11, "string"), "linux": (15, "LinuxContainerConfig"), "CDI_devices": (17, "*CDIDevice"),
        },
        "CreateContainerRequest": {
            "pod_sandbox_id": (1, "string"), "config": (2, "ContainerConfig"),
            "sandbox_config": (3, "PodSandboxConfig"),
        },
        "CreateContainerResponse": {"container_id": (1, "string")},
        "StartContainerRequest": {"container_id": (1, "string")},
        "StartContainerResponse": {},
        "StopContainerRequest": {"container_id": (1, "string"), "timeout": (2, "int64")},
        "StopContainerResponse": {},
        "RemoveContainerRequest": {"container_id": (1, "string")},
        "RemoveContainerResponse": {},
        "ContainerStatusRequest": {"container_id": (1, "string")},
        "ContainerStatus": {"id": (1, "string"), "state": (3, "int32"), "exit_code": (7, "int32")},
        "ContainerStatusResponse": {"status": (1, "ContainerStatus")},
        "VersionRequest": {"version": (1, "string")},
        "VersionResponse": {"runtime_name": (2, "string"), "runtime_version": (3, "string")},
    },
)  # fmt: skip


def request(method: str, **fields: Any) -> Any:
    """A method's request."""
    return _classes[f"{method}Request"](**fields)


def response(method: str) -> Any:
    """A method's response class."""
    return _classes[f"{method}Response"]
