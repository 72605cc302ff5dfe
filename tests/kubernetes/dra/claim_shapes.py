"""Claims as the scheduler of Kubernetes 1.36 leaves them."""

from __future__ import annotations

from typing import Any

DRIVER = "gpu.nvshare.com"


def result(device: str, memory: str = "4Gi", compute: str = "30", request: str = "gpu", share: str = "a1") -> Any:
    """One allocated device."""
    return {
        "request": request,
        "driver": DRIVER,
        "pool": "node-1",
        "device": device,
        "shareID": share,
        "consumedCapacity": {"memory": memory, "compute": compute},
    }


def wanted(*capacities: dict[str, str], count: int = 1) -> Any:
    """`spec.devices` of a claim with one request for each of these capacities: gpu-0, gpu-1, ..."""
    exact = {"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": count}
    return {
        "requests": [
            {"name": f"gpu-{number}", "exactly": {**exact, "capacity": {"requests": requests}}}
            for number, requests in enumerate(capacities)
        ]
    }


def parameters(requests: tuple[str, ...] = (), **given: Any) -> Any:
    """Opaque parameters of a claim."""
    value = {"apiVersion": "nvshare.com/v1alpha1", "kind": "Share", **given}
    return {"source": "FromClaim", "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": value}}


def claim(
    *results: Any,
    uid: str = "uid-1",
    name: str = "work",
    config: tuple[Any, ...] = (),
    pods: tuple[str, ...] = (),
    owner: str = "",
) -> Any:
    """An allocated claim, reserved for pods; `owner`: of a template, for this pod."""
    devices = {"results": list(results), "config": list(config)}
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": uid,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": f"uid-{owner}"}]
            * bool(owner),
        },
        "status": {
            "allocation": {"devices": devices},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
        },
    }
