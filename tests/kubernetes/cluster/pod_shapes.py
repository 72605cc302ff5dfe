"""Pods for the tests of annotations and the watch: made by hand and made up.

Non-goals: assertions.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.cluster.annotations import (
    GPU_RESOURCE,
    PREFIX,
    ClassDefaults,
    Rules,
)

Json = dict[str, Any]

RULES = Rules(
    priority_classes={
        "production": ClassDefaults(priority=10, weight=4),
        "batch": ClassDefaults(job_class="opportunistic"),
        "heavy": ClassDefaults(weight=7),
    }
)
PRIORITY_CLASS_VALUES = {
    "production": {"priority": 10, "weight": 4},
    "batch": {"class": "opportunistic"},
    "heavy": {"weight": 7},
}
"""The same as the chart's values have it."""


def container(name: str = "main", *, gpu: bool = True, env: list[Json] | None = None) -> Json:
    """A container as the API server shows it."""
    made: Json = {
        "name": name,
        "image": "registry.example/train:1",
        "resources": {"limits": {"cpu": "2"}},
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePath": "/dev/termination-log",
    }
    if gpu:
        made["resources"]["limits"][GPU_RESOURCE] = "1"
    if env is not None:
        made["env"] = env
    return made


def pod(
    *containers: Json, annotations: dict[str, str] | None = None, init: list[Json] | None = None, **spec: Any
) -> Json:
    """A pod of these containers."""
    metadata: Json = {"name": "train-0", "namespace": "ml", "uid": "6c1c5a3e-0000-4000-8000-000000000001"}
    if annotations is not None:
        metadata["annotations"] = annotations
    made: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [container()], "restartPolicy": "Never", **spec},
        "status": {},
    }
    if init is not None:
        made["spec"]["initContainers"] = init
    return made


# --- made up -------------------------------------------------------------------------------------------------------

_SIZES = st.sampled_from(
    [
        "8Gi", "512Mi", "1.5GiB", "8GB", "1073741824", "0", "8G", "8 Gi", "-1Gi", "0.5Gi", "999999Ti", "1000000Ti", "",
        "8gi",
    ]
)  # fmt: skip
_VALUES = {
    "priority": st.one_of(
        st.integers(-1500, 1500).map(str), st.sampled_from(["", "high", "+1", "01", "-0", "1.5", "9999999999"])
    ),
    "weight": st.one_of(st.integers(-1, 1100).map(str), st.sampled_from(["", "01", "1e3"])),
    "class": st.sampled_from(["interactive", "batch", "best-effort", "production", "opportunistic", "Production", ""]),
    "share-request": st.sampled_from(["0", "0.3", "30%", "1", "1.5", "", "x"]),
    "share-limit": st.sampled_from(["0", "0.3", "20%", "1", "101%", "", "x"]),
    "gang": st.sampled_from(["pair", "a-1", "-a", "a-", "A", "", "x" * 63, "x" * 64]),
    "memory-limit": _SIZES,
    "memory-limit.main": _SIZES,
    "memory-limit.nobody": _SIZES,
    "priorty": st.just("1"),
}


@st.composite
def annotation_maps(draw: st.DrawFn) -> dict[str, str]:
    """Annotations, good and bad ones, beside one of somebody else."""
    keys = draw(st.lists(st.sampled_from(sorted(_VALUES)), unique=True))
    return {"other.example/key": "value"} | {PREFIX + key: draw(_VALUES[key]) for key in keys}
