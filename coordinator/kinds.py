"""What a setting is: its kind of value with unit and bounds, its default, its scope and its help.

Non-goals: which settings there are (model/settings.py for a node's, model/profile.py for a program's).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nvshare.coordinator.units import (
    QUANTUM_BOUNDS_NS,
    SHARE_BOUNDS,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_duration_or_never,
    parse_part,
    parse_quantum,
    parse_share,
    parse_size,
)

Value = int | float | str | bool | None
"""A value as in an event, a request and a file of live settings: a choice by its word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The values of a setting, and how they are written."""

    of: type
    """Python's type of a value."""
    parse: Callable[[str], Any] = str
    """Raises ValueError, with the accepted forms."""
    shown: Callable[[Any], str] = str
    low: float = 0
    high: float | None = None
    """Bounds of a number, or of the length of a text."""
    words: tuple[str, ...] = ()
    """All values of a choice."""
    choice: type[enum.Enum] | None = None
    """The engine's form of the words."""
    none: str = ""
    """The word for None, if that is a value."""
    bare: bool = False
    """A whole number needs no quotes in a file."""
    sample: str = ""
    """Accepted forms, for a value that lacks its quotes."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the chart's value."""

    def read(self, raw: object) -> Value:
        """The value of a text, a TOML number or a TOML boolean.  Raises ValueError."""
        if not self.quoted or (self.bare and type(raw) is int):
            raw = str(raw).lower()
        if isinstance(raw, str):
            value: Value = self.parse(raw)
            self.check(value)
            return value
        raise ValueError(f"{raw!r} is not text: write it in quotes, such as {self.sample}")

    def check(self, value: Any) -> None:
        """Raises ValueError for what is no value of this kind."""
        if value is None and self.none:
            return
        if type(value) is not self.of and not (self.of is float and type(value) is int):
            raise ValueError(f"{value!r:.40} is not of the type {self.of.__name__}")
        if self.words and value not in self.words:
            raise ValueError(f"{value!r:.40} is none of {', '.join(self.words)}")
        measure: Any = len(value) if isinstance(value, str) else value
        shown = str if isinstance(value, str) else self.shown
        if measure < self.low or (self.high is not None and measure > self.high) or measure != measure:
            bounds = f"at least {shown(self.low)}" if self.high is None else f"{shown(self.low)} to {shown(self.high)}"
            unit = " characters" if isinstance(value, str) else ""
            raise ValueError(f"{self.shown(value)!r:.40} is out of range: {bounds}{unit}")

    @property
    def quoted(self) -> bool:
        """A file has its values in quotes."""
        return self.schema.get("type") not in ("integer", "boolean")

    @property
    def forms(self) -> str:
        """The accepted forms, for help."""
        if self.of is int and not self.sample:
            return f"a whole number from {self.low} to {self.high}"
        forms = ", ".join(map(self.show, self.words)) or self.sample.replace('"', "")
        return f"{forms}, from {self.shown(self.low)} to {self.shown(self.high)}" if self.of is float else forms

    def show(self, value: Value) -> str:
        """The value for people, as a file or command has it."""
        return self.none if value is None else self.shown(value)

    def typed(self, value: Value) -> Any:
        """The engine's form of a value."""
        return value if self.choice is None else self.choice[str(value).upper()]

    def plain(self, typed: Any) -> Value:
        """The opposite of `typed`."""
        value: Value = typed.name.lower() if isinstance(typed, enum.Enum) else typed
        return value


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


def choice_of(*words: str, choice: type[enum.Enum] | None = None) -> Kind:
    return Kind(of=str, parse=str.lower, words=words, choice=choice, sample=f'"{words[0]}"', schema={"enum": [*words]})


def whole(low: int, high: int | None = None) -> Kind:
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Kind(of=int, parse=_parse_whole, low=low, high=high, schema={"type": "integer", **bounds})


def _parse_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def _parse_positive_size(text: str) -> int:
    if (size := parse_size(text)) <= 0:
        raise ValueError("must be more than 0")
    return size


DURATION: Final = Kind(
    of=int, parse=parse_duration, shown=format_duration, low=1, sample='"100ms"', schema=_ref("duration")
)
DURATION_OR_NEVER: Final = replace(
    DURATION, parse=parse_duration_or_never, shown=lambda ns: format_duration(ns) if ns else "0", low=0, bare=True,
    sample='"100ms" or "0"', schema=_ref("durationOrNever"),
)  # fmt: skip
OWN_OR_COMMON: Final = replace(
    DURATION_OR_NEVER, parse=lambda text: None if text == "common" else parse_duration_or_never(text), none="common",
    sample='"10m", "0" or "common"', schema=_ref("durationOrCommon"),
)  # fmt: skip
QUANTUM: Final = Kind(
    of=int, parse=parse_quantum, shown=format_duration, none="auto", low=QUANTUM_BOUNDS_NS[0],
    high=QUANTUM_BOUNDS_NS[1], sample='"100ms" or "auto"', schema=_ref("quantum"),
)  # fmt: skip
SIZE: Final = Kind(
    of=int, parse=_parse_positive_size, shown=format_size, low=1, high=1 << 60, bare=True, sample='"4GiB"',
    schema=_ref("size"),
)  # fmt: skip
LIMIT: Final = replace(SIZE, parse=parse_size, shown=lambda size: format_size(size) if size else "none", low=0)
SHARE: Final = Kind(
    of=float, parse=parse_share, shown=format_share, low=SHARE_BOUNDS[0], high=SHARE_BOUNDS[1], sample='"5%"',
    schema={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$"},
)  # fmt: skip
PART: Final = Kind(of=float, parse=parse_part, shown=format_share, low=0.0, high=1.0, sample='"0.3" or "30%"')
FLAG: Final = Kind(of=bool, parse=_parse_flag, shown=lambda flag: str(flag).lower(), schema={"type": "boolean"})
TEXT: Final = Kind(of=str, low=1, sample='"text"', schema={"type": "string", "minLength": 1})
POLICY: Final = replace(TEXT, high=63, sample='"auto"', schema={"type": "string", "minLength": 1, "maxLength": 63})
PORT: Final = whole(0, 65_535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    kind: Kind
    help: str = ""
    """Its meaning, for the reference page and the help of the tools."""
    by_gpu: bool = False
    """Single GPUs, or a client on single GPUs, may have their own value."""
    of_client: bool = False
    chapter: str = ""
    """Heading of the sample file; "": as the setting before."""
    sample: str = ""
    """Value in the sample file, if there is no default that could be written."""
    default_text: str = "none"
    """Of None as the default, for the reference page."""
    reloaded: bool = False
    """SIGHUP applies it, as all settings that `nvshare-ctl` sets."""
    in_chart: bool = True
    live: bool = False
    """`nvshare-ctl set` has it."""
    done: str = ""
    """The message of a change, if it is no usual one."""
    reply: str = ""
    """The value's key in the reply to a change."""
    name: str = ""
    field: str = ""
    """Of the engine's record; with the unit."""
    default: Any = None

    @property
    def is_live(self) -> bool:
        """It may change while programs run."""
        return self.live or self.of_client

    @property
    def default_shown(self) -> str:
        return self.kind.show(self.kind.plain(self.default))


def setting(kind: Kind, default: Any, **declared: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(kind=kind, default=default, **declared)})
