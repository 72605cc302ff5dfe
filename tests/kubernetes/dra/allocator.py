"""A model of the scheduler's allocation from one slice: consumable capacity with request policies, first fit.

By the API's documentation of `requestPolicy` and `consumedCapacity`: a capacity that is not asked for is the default,
others are rounded up to a step, and what claims consume of a device is at most its capacity.

Non-goals: selectors, taints but that they exclude a device.
"""

from __future__ import annotations

from typing import Any


def quantity(text: str) -> int:
    """Of the few forms that the tests use."""
    return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]] if text.endswith("i") else int(text)


class Allocator:
    """What is left of a slice's devices."""

    def __init__(self, spec: Any) -> None:
        self.devices = [device for device in spec["devices"] if "taints" not in device]
        self.pool = spec["pool"]["name"]
        self.used: dict[tuple[str, str], int] = {}
        self._shares = 0

    def allocate(self, *requests: dict[str, str], same_device: bool = False) -> list[Any] | None:
        """Results of a claim with these requests (their `capacity.requests`), named gpu-0, gpu-1, ...; None: it waits.

        Requests of one claim have different devices, unless they are of `same_device` (matchAttribute).
        """
        results: list[Any] = []
        before = dict(self.used)
        for number, wanted in enumerate(requests):
            others = {result["device"] for result in results}
            fitting = [
                (device, consumed)
                for device in self.devices
                if (device["name"] in others if same_device and others else device["name"] not in others)
                and (consumed := self._consumed(device, wanted)) is not None
            ]
            if not fitting:
                self.used = before
                return None
            device, consumed = fitting[0]
            for name, value in consumed.items():
                self.used[device["name"], name] = self.used.get((device["name"], name), 0) + value
            self._shares += 1
            results.append(
                {
                    "request": f"gpu-{number}",
                    "driver": "gpu.nvshare.com",
                    "pool": self.pool,
                    "device": device["name"],
                    "shareID": f"00000000-0000-4000-8000-{self._shares:012}",
                    "consumedCapacity": {name: str(value) for name, value in consumed.items()},
                }
            )
        return results

    def _consumed(self, device: Any, wanted: dict[str, str]) -> dict[str, int] | None:
        found = {}
        for name, capacity in device["capacity"].items():
            policy = capacity["requestPolicy"]
            least, most, step = (quantity(policy["validRange"][key]) for key in ("min", "max", "step"))
            value = max(quantity(wanted.get(name, policy["default"])), least)
            value = least + -(-(value - least) // step) * step
            if value > most or self.used.get((device["name"], name), 0) + value > quantity(capacity["value"]):
                return None
            found[name] = value
        return found
