"""What the scheduler has promised a claim, read from the claim's status.  Pure.

Each request of a claim becomes a share: its devices, the memory and compute that it consumes of each, and the words of
a profile from opaque parameters (`nvshare.com/v1alpha1`, kind `Share`).  A class's parameters come before a claim's.

Invariants: whatever cannot be held or is not known raises ClaimError, which names the field.

Non-goals: slots, files, gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from nvshare.coordinator.model.profile import PROFILE

DRIVER: Final = "gpu.nvshare.com"
_API_VERSION: Final = "nvshare.com/v1alpha1"
_KIND: Final = "Share"
_WORDS: Final = {
    "class": "class",
    "weight": "weight",
    "gang": "gang",
    "memoryMode": "memory",
    "parkAfter": "park_after",
}
"""Parameter -> word of a profile."""
_QUANTITY: Final = re.compile(r"([0-9]{1,19}(?:[.][0-9]{1,9})?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|e[0-9]{1,2})?")
_UNITS: Final = {
    **{unit: 1000 ** (index + 1) for index, unit in enumerate(("k", "M", "G", "T", "P"))},
    **{unit: 1024 ** (index + 1) for index, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
}
_MOST_BYTES: Final = 1 << 60


class ClaimError(ValueError):
    """A claim that cannot be prepared; the text is one sentence for the pod's events."""


@dataclass(frozen=True, slots=True)
class Device:
    """One result of the scheduler."""

    pool: str
    name: str
    share_id: str


@dataclass(frozen=True, slots=True)
class Share:
    """One request: what it consumes of each of its devices."""

    request: str
    devices: tuple[Device, ...]
    memory_bytes: int
    words: dict[str, str] = field(default_factory=dict)


def shares(claim: Mapping[str, Any]) -> list[Share]:
    """The requests that this driver serves, in the scheduler's order.  Raises ClaimError."""
    try:
        allocation = claim["status"]["allocation"]["devices"]
        results = [result for result in allocation["results"] if result["driver"] == DRIVER]
        found: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            found.setdefault(result["request"], []).append(result)
        configs = allocation.get("config") or []
        return [_share(request, of_request, configs) for request, of_request in found.items()]
    except (KeyError, TypeError, AttributeError):
        raise ClaimError("the claim has no allocation that this driver can read") from None


def pod(claim: Mapping[str, Any]) -> str:
    """The pod that owns the claim, which a template has made for it; "": pods may share the claim."""
    owners = {each.get("uid") for each in claim["metadata"].get("ownerReferences") or []}
    for each in (claim.get("status") or {}).get("reservedFor") or []:
        if each.get("resource") == "pods" and each.get("uid") in owners:
            return str(each["name"])
    return ""


def _share(request: str, results: list[Mapping[str, Any]], configs: list[Mapping[str, Any]]) -> Share:
    consumed = {(_amount(each, "memory"), _amount(each, "compute")) for each in results}
    if len(consumed) != 1:
        raise ClaimError(f"request {request}: different parts of its devices: name the memory in capacity.requests")
    memory, compute = consumed.pop()
    if not 0 < memory <= _MOST_BYTES or not 0 <= compute <= 100:
        raise ClaimError(f"request {request}: consumedCapacity: memory is {memory} bytes and compute {compute}")
    words: dict[str, str] = {}
    for config in configs:
        named = config.get("requests") or []
        opaque = config.get("opaque") or {}
        if opaque.get("driver") == DRIVER and (not named or {request, request.partition("/")[0]} & set(named)):
            words |= _parameters(opaque["parameters"])
    if compute:
        words["share_request"] = str(compute / 100)
    devices = tuple(Device(each["pool"], each["device"], each.get("shareID") or "") for each in results)
    return Share(request, devices, memory, words)


def _amount(result: Mapping[str, Any], name: str) -> int:
    text = (result.get("consumedCapacity") or {}).get(name)
    if text is None:
        raise ClaimError(
            f"device {result['device']}: the claim consumes no {name}: "
            "the API server needs the feature gate DRAConsumableCapacity"
        )
    match = _QUANTITY.fullmatch(str(text))
    if not match:
        raise ClaimError(f"consumedCapacity.{name}: {str(text)!r:.80} is not a quantity")
    unit = match[2] or ""
    factor = 10 ** int(unit[1:]) if unit.startswith("e") else _UNITS.get(unit, 1)
    return int(Decimal(match[1]) * factor)


def _parameters(given: Mapping[str, Any]) -> dict[str, str]:
    if (given.get("apiVersion"), given.get("kind")) != (_API_VERSION, _KIND):
        raise ClaimError(f"parameters: write apiVersion: {_API_VERSION} and kind: {_KIND}")
    found = {}
    for key, value in given.items():
        if key in ("apiVersion", "kind"):
            continue
        if key not in _WORDS:
            raise ClaimError(f"parameters.{key!s:.80}: there is no such parameter; known are {', '.join(_WORDS)}")
        if not isinstance(value, str) and (isinstance(value, bool) or not isinstance(value, int)):
            raise ClaimError(f"parameters.{key}: write a text or a whole number")
        row = PROFILE[_WORDS[key]]
        try:
            row.read(str(value))
        except ValueError as error:
            raise ClaimError(f"parameters.{key}: {error}") from None
        found[row.word] = str(value)
    return found
