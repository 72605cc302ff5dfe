"""A model of the scheduler's allocation from one slice: consumable capacity with request policies, first fit.

It agrees with allocations that the scheduler's own allocator made: allocations.json says which.

Non-goals: selectors, requests for all devices.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def quantity(text: str) -> Fraction:
    """Of the few forms that the tests use."""
    return Fraction(text[:-2]) * UNITS[text[-2:]] if text.endswith("i") else Fraction(text)


class Allocator:
    """What is left of a slice's devices."""

    def __init__(self, spec: Any) -> None:
        self.devices = spec["devices"]
        self.pool = spec["pool"]["name"]
        self._held: list[Any] = []
        """Results of all claims."""
        self._shares = itertools.count(1)

    def allocate(self, devices: Any) -> list[Any] | None:
        """Results of a claim with this `spec.devices`; None: it waits."""
        for chosen in itertools.product(*map(_alternatives, devices["requests"])):
            wanted = [(name, exact) for name, exact in chosen for _ in range(exact["count"])]
            results = self._place(wanted, devices.get("constraints", []), [])
            if results is not None:
                self._held += results
                return results
        return None

    def free(self, results: list[Any]) -> None:
        """A claim ends."""
        shares = {result["shareID"] for result in results}
        self._held = [result for result in self._held if result["shareID"] not in shares]

    def _place(self, wanted: list[tuple[str, Any]], constraints: list[Any], so_far: list[Any]) -> list[Any] | None:
        if not wanted:
            return so_far
        (name, exact), *rest = wanted
        for device in self.devices:
            if any((each["request"], each["device"]) == (name, device["name"]) for each in so_far):
                continue  # a request has each device once
            consumed = self._consumed(device, exact, so_far)
            if consumed is None or not _allowed(device["name"], name, constraints, so_far):
                continue
            result = {
                "request": name,
                "driver": "gpu.nvshare.com",
                "pool": self.pool,
                "device": device["name"],
                "shareID": f"00000000-0000-4000-8000-{next(self._shares):012}",
                "consumedCapacity": consumed,
            }
            if (found := self._place(rest, constraints, [*so_far, result])) is not None:
                return found
        return None

    def _consumed(self, device: Any, exact: Any, so_far: list[Any]) -> dict[str, str] | None:
        tolerated = {each["key"] for each in exact.get("tolerations", [])}
        if not tolerated.issuperset(taint["key"] for taint in device.get("taints", [])):
            return None
        asked = exact.get("capacity", {}).get("requests", {})
        found = {}
        for name, capacity in device["capacity"].items():
            policy = capacity["requestPolicy"]
            least, most, step = (quantity(policy["validRange"][key]) for key in ("min", "max", "step"))
            value = max(quantity(asked.get(name, policy["default"])), least)
            value = least + -(-(value - least) // step) * step
            used = sum(
                quantity(each["consumedCapacity"][name])
                for each in (*self._held, *so_far)
                if each["device"] == device["name"]
            )
            if value > most or used + value > quantity(capacity["value"]):
                return None
            found[name] = str(int(value))
        return found


def _alternatives(request: Any) -> list[tuple[str, Any]]:
    if "exactly" in request:
        return [(request["name"], request["exactly"])]
    return [(f"{request['name']}/{each['name']}", each) for each in request["firstAvailable"]]


def _allowed(device: str, request: str, constraints: list[Any], so_far: list[Any]) -> bool:
    """By the attribute `uuid`, the only one that constraints of the tests name."""
    for constraint in constraints:
        if request.partition("/")[0] in constraint["requests"]:
            others = {each["device"] for each in so_far if each["request"].partition("/")[0] in constraint["requests"]}
            if others - {device} if "matchAttribute" in constraint else device in others:
                return False
    return True
