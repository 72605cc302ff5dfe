"""The settings that change while programs run, each declared once.

From a row follow its command `nvshare-ctl set`, what may be stored, and how its value is shown.  Its event is in
live_settings.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from nvshare.coordinator.units import (
    format_duration,
    format_share,
    format_size,
    parse_quantum,
    parse_share,
    parse_size,
)

PolicyName = Annotated[str, Field(min_length=1, max_length=63)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]
PositivePart = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.  Without `about` it has no command `set` of its own."""

    kind: Any
    """The type of its values, with their bounds."""
    key: str
    """The value's key in the reply to a change."""
    about: str = ""
    value: str = ""
    """Name and help of the command's argument."""
    parse: Callable[[str], Any] = str
    shown: Callable[[Any], str] = str
    done: str = ""
    """The message of a change."""
    of_client: bool = False
    by_gpu: bool = False

    def read(self, text: str) -> Any:
        """The value of an argument.  Raises ValueError."""
        value = self.parse(text)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        """Raises ValueError for a value out of bounds."""
        try:
            _adapter(self).validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from None


@functools.cache
def _adapter(setting: Setting) -> TypeAdapter[Any]:
    return TypeAdapter(setting.kind)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


SETTINGS: Final[dict[str, Setting]] = {
    "quantum": Setting(
        Annotated[int, Field(ge=1_000_000, le=3_600_000_000_000)] | None, "quantum_ns",
        "Set the length of a turn.", "QUANTUM: 250ms, 2s, auto", parse_quantum,
        lambda value: "auto" if value is None else format_duration(value), "quantum is {value} on {gpus}", by_gpu=True,
    ),
    "policy": Setting(
        PolicyName, "policy", "Set the scheduling policy.",
        "POLICY: auto, round_robin, priority, fair_share, opportunistic, least_attained, edf, or a plug-in",
        done="policy is {value} on {gpus}", by_gpu=True,
    ),
    "sharing": Setting(
        Literal["auto", "exclusive", "concurrent"], "sharing",
        "Let the policy decide who runs together, or let clients run in turns, or all at once.",
        "SHARING: auto, exclusive or concurrent", done="sharing is {value} on {gpus}", by_gpu=True,
    ),
    "switch_share": Setting(
        Annotated[float, Field(ge=0.001, le=0.5)], "share",
        "Set the largest share of time for switching, under an automatic quantum.", "SHARE: 5%, 2%",
        parse_share, format_share, "switching may cost {value} on {gpus}", by_gpu=True,
    ),
    "host_budget": Setting(
        Annotated[int, Field(ge=1, le=1 << 60)], "host_budget_bytes",
        "Set the pinned host memory of all clients together.", "BUDGET: 64GiB", parse_size, format_size,
        "host budget is {value}; {used} of it are in use{more}",
    ),
    "priority": Setting(
        Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)], "priority", "Set a client's priority.",
        "PRIORITY: higher runs first, under the policy priority", _whole, done="{client} has priority {value}",
        of_client=True,
    ),
    "weight": Setting(
        Annotated[int, Field(ge=1, le=10_000)], "weight", "Set a client's weight.",
        "WEIGHT: 1 to 10000: share of time under the policy fair_share", _whole, done="{client} has weight {value}",
        of_client=True,
    ),
    "class": Setting(
        Literal["interactive", "batch", "best_effort"], "class",
        "Set what a client is for, under the policies auto and opportunistic.",
        "CLASS: interactive, batch or best-effort", lambda text: text.replace("-", "_"),
        lambda value: value.replace("_", "-"), "{client} is {value}", of_client=True,
    ),
    "share_request": Setting(Part, "share_request", shown=format_share, of_client=True),
    "share_limit": Setting(PositivePart, "share_limit", shown=format_share, of_client=True),
    "limit": Setting(
        Annotated[int, Field(ge=0, le=1 << 60)], "limit_bytes", "Set the GPU memory that a client may allocate.",
        "LIMIT: 4GiB, 512MiB; 0 removes the limit", parse_size,
        lambda value: format_size(value) if value else "none", "{client} has {limit} of GPU memory{more}",
        of_client=True, by_gpu=True,
    ),
    "paused": Setting(Literal[True], "paused", shown=lambda value: "yes", of_client=True),
}  # fmt: skip
