"""What KAI and NvFractions have promised a container, by its variables and annotations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvshare.coordinator.kubernetes.cluster.annotations import Rules
from nvshare.coordinator.kubernetes.nri.marks import MarkError, Promise, read

GPU = "GPU-5fa1c2f5-8a5e-4c1b-9f35-1d2c3b4a5968"
KAI = {"NVIDIA_VISIBLE_DEVICES": GPU, "GPU_PORTION": "0.3"}
FRACTIONS = "nvidia.com/container.main."


def promise(environment: dict[str, str], annotations: dict[str, str] | None = None) -> Promise | None:
    return read(environment, annotations or {}, "team", "main", Rules())


@pytest.mark.parametrize(
    "environment",
    [{}, {"NVIDIA_VISIBLE_DEVICES": GPU}, {"GPU_PORTION": ""}, {"CUDA_DEVICE_MEMORY_LIMIT": "1g"}],
)
def test_other_containers_are_left_alone(environment: dict[str, str]) -> None:
    """Broken: a container with a whole GPU, or none, gets a slot."""
    assert promise(environment) is None
    assert promise(environment, {"nvidia.com/container.other.gpu-memory.limit": "1Gi"}) is None


@pytest.mark.parametrize(
    ("more", "gpus", "limit"),
    [
        ({}, (GPU,), 0),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "4096m"}, (GPU,), 4 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2G"}, (GPU,), 2 << 30),
        ({"NVIDIA_VISIBLE_DEVICES": f"k8s.device-plugin.nvidia.com/gpu={GPU}"}, (GPU,), 0),
        ({"NVIDIA_VISIBLE_DEVICES": f"nvidia.com/gpu={GPU}, MIG-1a"}, (GPU, "MIG-1a"), 0),
        ({"NVIDIA_VISIBLE_DEVICES": f"{GPU},{GPU}"}, (GPU,), 0),
    ],
)
def test_kais_variables(more: dict[str, str], gpus: tuple[str, ...], limit: int) -> None:
    """Broken: a part of the wrong card, or another limit than KAI counts with."""
    assert promise(KAI | more) == Promise(gpus, limit, {"share_request": "0.3"})


@pytest.mark.parametrize(
    ("annotations", "limit", "words"),
    [
        ({"gpu-memory.request": "4Gi"}, 4 << 30, {}),
        ({"gpu-memory.request": "1Gi", "gpu-memory.limit": "2048Mi"}, 2 << 30, {}),
        ({"gpu-memory.limit": "5G", "gpu-compute.portion": "0.5"}, 5 * 10**9, {"share_request": "0.5"}),
        ({"gpu-memory.limit": "1Gi", "gpu-compute.mode": "time-slicing"}, 1 << 30, {}),
    ],
)
def test_nvfractions_annotations(annotations: dict[str, str], limit: int, words: dict[str, str]) -> None:
    """Broken: a container that NvFractions placed has no limit, or no slot."""
    named = {FRACTIONS + name: text for name, text in annotations.items()}
    assert promise({"NVIDIA_VISIBLE_DEVICES": GPU}, named) == Promise((GPU,), limit, words)
    elsewhere = promise({"NVIDIA_VISIBLE_DEVICES": "void"}, named | {f"{FRACTIONS}gpus.devices": " GPU-a,GPU-b "})
    assert elsewhere == Promise(("GPU-a", "GPU-b"), limit, words)


def test_the_smaller_limit_holds() -> None:
    """Broken: a container may take what only one of two said."""
    found = promise(KAI | {"CUDA_DEVICE_MEMORY_LIMIT": "1g"}, {f"{FRACTIONS}gpu-memory.limit": "2Gi"})
    assert found is not None
    assert found.limit_bytes == 1 << 30


def test_annotations_add_to_the_promise() -> None:
    """Broken: a pod's class or limit has no effect, or an annotation raises what the scheduler has promised."""
    ours = {"class": "interactive", "memory-limit.main": "8Gi", "share-limit": "50%", "share-request": "40%"}
    found = promise(KAI, {f"nvshare.com/{name}": text for name, text in ours.items()} | {"other": "x"})
    assert found is not None
    words = {"class": "interactive", "priority": "100", "memory_limit": str(8 << 30), "share_limit": "50%"}
    assert found.words == words | {"share_request": "0.3"}


def test_a_mistake_that_promises_nothing_has_no_effect() -> None:
    """Broken: a misspelt class keeps a container from starting, or is told to nobody."""
    found = promise(KAI, {"nvshare.com/class": "fast"})
    assert found is not None
    assert found.words == {"share_request": "0.3"}
    assert [finding.annotation for finding in found.ignored] == ["nvshare.com/class"]


@pytest.mark.parametrize(
    ("environment", "annotations", "why"),
    [
        ({"GPU_PORTION": "1.5"}, {}, "GPU_PORTION: '1.5' is not a part of a GPU: write a number above 0, at most 1"),
        ({"GPU_PORTION": "0"}, {}, "GPU_PORTION: '0'"),
        ({"GPU_PORTION": "nan"}, {}, "GPU_PORTION: 'nan'"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "much"}, {}, "CUDA_DEVICE_MEMORY_LIMIT: 'much' is not a size of GPU memory"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "0m"}, {}, "is not a size"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "4Gi"}, {}, "is not a size"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "-1m"}, {}, "is not a size"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "9" * 18 + "g"}, {}, "is not a size"),
        ({}, {f"{FRACTIONS}gpu-memory.limit": "1.5Gi"}, "gpu-memory.limit: '1.5Gi' is not a size"),
        ({}, {"nvshare.com/memory-limit": "8G"}, 'memory-limit]: "8G" is not allowed'),
        ({}, {"nvshare.com/share-limit": "0"}, 'share-limit]: "0" is not allowed'),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, {}, "NVIDIA_VISIBLE_DEVICES: 'all' does not name GPUs by UUID"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, {}, "does not name GPUs by UUID"),
        ({"NVIDIA_VISIBLE_DEVICES": f"{GPU},0"}, {}, "does not name GPUs by UUID"),
    ],
)
def test_a_promise_that_cannot_be_held_is_one_sentence(
    environment: dict[str, str], annotations: dict[str, str], why: str
) -> None:
    """Broken: a wrong limit is no limit, or its user does not learn what to write."""
    with pytest.raises(MarkError) as raised:
        promise(KAI | environment, annotations)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.text(), st.text(), st.text(), st.dictionaries(st.text(), st.text(), max_size=3))
def test_any_text_is_a_promise_or_a_sentence(gpus: str, portion: str, limit: str, more: dict[str, str]) -> None:
    """Broken: what a user may write raises something else, and the plugin's answer is a failure of its own."""
    environment = {"NVIDIA_VISIBLE_DEVICES": gpus, "GPU_PORTION": portion, "CUDA_DEVICE_MEMORY_LIMIT": limit}
    with contextlib.suppress(MarkError):
        promise(environment, {f"{FRACTIONS}gpu-memory.limit": limit, **more})
