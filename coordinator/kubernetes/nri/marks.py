"""What a scheduler has promised a container, read from the container's variables and its pod's annotations.  Pure.

- KAI's binder writes `NVIDIA_VISIBLE_DEVICES` (UUIDs, also as CDI names), `GPU_PORTION`, and `CUDA_DEVICE_MEMORY_LIMIT`
  in its mode HamiCore.  The kubelet resolves them before the container exists.
- NvFractions annotates `nvidia.com/container.NAME.` with `gpus.devices`, `gpu-memory.request` and `.limit`,
  `gpu-compute.portion`.
- Annotations of nvshare add the class, limits and the rest of a profile.

Invariants: the promised portion is the container's request, which no annotation changes.  What would promise more than
was meant (portion, limit, GPU) raises MarkError; other mistakes have no effect.

Non-goals: slots, messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nvshare.coordinator.kubernetes.cluster.annotations import MEMORY_LIMIT, Finding, Rules, read_pod
from nvshare.coordinator.model.profile import PROFILE

_PORTION: Final = "GPU_PORTION"
_GPUS: Final = "NVIDIA_VISIBLE_DEVICES"
_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"
_SIZE: Final = re.compile(r"([1-9][0-9]{0,17})([A-Za-z]{0,2})")
_OF_HAMI: Final = {"": 1, "k": 1 << 10, "K": 1 << 10, "m": 1 << 20, "M": 1 << 20, "g": 1 << 30, "G": 1 << 30}
_OF_KUBERNETES: Final = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip
_MOST_BYTES: Final = 1 << 60
_HARD: Final = (MEMORY_LIMIT, PROFILE["share_limit"].annotation)
"""Annotations whose mistakes keep a container from starting."""


class MarkError(ValueError):
    """A promise that cannot be held; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Promise:
    """GPUs by UUID, a memory limit on each (0: none), and the words of a profile."""

    gpus: tuple[str, ...]
    limit_bytes: int
    words: dict[str, str]
    ignored: tuple[Finding, ...] = ()
    """Annotations with mistakes that have no effect."""


def read(
    environment: Mapping[str, str], annotations: Mapping[str, str], namespace: str, container: str, rules: Rules
) -> Promise | None:
    """What this container was promised; None if it was promised no part of a GPU.  Raises MarkError."""
    prefix = f"nvidia.com/container.{container}."
    fractions = {key.removeprefix(prefix): text for key, text in annotations.items() if key.startswith(prefix)}
    memory = next((name for name in ("gpu-memory.limit", "gpu-memory.request") if name in fractions), None)
    if not environment.get(_PORTION) and memory is None:
        return None
    words, rejected = read_pod({"metadata": {"namespace": namespace, "annotations": annotations}}, container, rules)
    for finding in rejected:
        if finding.annotation.startswith(_HARD):
            raise MarkError(finding.text)
    words.pop("share_request", None)
    if text := environment.get(_PORTION) or fractions.get("gpu-compute.portion"):
        words["share_request"] = str(_portion(text))
    limits = [_bytes(_LIMIT, text, _OF_HAMI, "4096m or 4g")] if (text := environment.get(_LIMIT)) else []
    limits += [_bytes(prefix + memory, fractions[memory], _OF_KUBERNETES, "4Gi or 4096Mi")] if memory else []
    listed = fractions.get("gpus.devices", "").strip() or environment.get(_GPUS, "")
    return Promise(_uuids(listed), min(limits, default=0), words, tuple(rejected))


def _portion(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise MarkError(f"{_PORTION}: {text!r:.80} is not a part of a GPU: write a number above 0, at most 1")
    return value


def _bytes(where: str, text: str, units: Mapping[str, int], forms: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * units.get(match[2], 0) if match else 0
    if not 0 < size <= _MOST_BYTES:
        raise MarkError(f"{where}: {text!r:.80} is not a size of GPU memory: write a size such as {forms}")
    return size


def _uuids(listed: str) -> tuple[str, ...]:
    """Also of CDI names: `k8s.device-plugin.nvidia.com/gpu=GPU-...`."""
    found = tuple(dict.fromkeys(each.strip().rpartition("=")[2] for each in listed.split(",")))
    if not all(re.fullmatch(r"(GPU|MIG)-[A-Za-z0-9/-]{1,120}", each) for each in found):
        raise MarkError(
            f"{_GPUS}: {listed!r:.80} does not name GPUs by UUID, so the card to share is unknown: let the device "
            "plugin use deviceIDStrategy uuid"
        )
    return found
