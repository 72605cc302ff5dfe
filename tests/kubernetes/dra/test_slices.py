"""What a node publishes, by Kubernetes' own schema."""

from __future__ import annotations

import kubernetes_validate

from nvshare.coordinator.kubernetes.dra import slices
from nvshare.coordinator.kubernetes.node.health import State
from nvshare.coordinator.system.devices import Device

CARD = Device(0, "GPU-11111111-2222-3333-4444-555555555555", "NVIDIA H100", (80 << 30) + 1000)
PART = Device(1, "MIG-66666666-2222-3333-4444-555555555555", "NVIDIA H100 MIG 1g.10gb", 10 << 30, is_mig=True)


def test_a_slice_is_valid_and_taints_what_is_not_healthy() -> None:
    """The API server would refuse the slice, or claims would be placed on a broken GPU."""
    spec = slices.spec("node-1", State((CARD, PART), ((PART.uuid, "lost"),)), 3)
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "node-1-gpu.nvshare.com"},
        "spec": spec,
    }
    kubernetes_validate.validate(document, "1.36", strict=True)
    card, part = spec["devices"]
    assert card["capacity"]["memory"]["value"] == str(80 << 30)
    assert ("taints" in card, part["taints"][0]["key"]) == (False, "gpu.nvshare.com/unhealthy")
    assert slices.uuids(State((CARD,))) == {card["name"]: CARD.uuid}
