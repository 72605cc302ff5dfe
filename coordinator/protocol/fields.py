"""Types and bounds of message fields, and the tables of message types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Final, TypeVar, dataclass_transform


class RemoteProtocolError(Exception):
    """The peer broke the protocol, and loses its connection."""


@dataclass(frozen=True, slots=True)
class Field:
    """Bounds of one field.  `kind` is `uint`, `bool` or `text`; `size` is bits, or bytes of UTF-8.

    `least` and `most` narrow a `uint`.  Decoders refuse values outside; the hook's encoder sends at most `most`.
    """

    kind: str
    size: int
    least: int = 0
    most: int | None = None


U8: Final = Field("uint", 8)
U16: Final = Field("uint", 16)
U32: Final = Field("uint", 32)
U64: Final = Field("uint", 64)
MOST_BYTES: Final = 1 << 47
"""Address space of one process.  The sum over 65536 clients stays below 64 bits."""
BYTES: Final = Field("uint", 64, most=MOST_BYTES)
TIME: Final = Field("uint", 64, most=1 << 62)
"""Nanoseconds: a time of the node's clock, or a duration; 146 years."""
COUNT: Final = Field("uint", 64, most=1 << 48)
"""Count of events in one lease: a billion a second for three days."""
BOOL: Final = Field("bool", 1)
NAME: Final = Field("text", 63)
UUID: Final = Field("text", 95)
SENTENCE: Final = Field("text", 255)

M = TypeVar("M", bound="Message")


class Message:
    """Base class of messages.  `TYPE` is the number on the wire.  The others tell of the fields, in order: `LAYOUT` has
    their bounds, `LIMITS` the same as `limits` gives them."""

    __slots__ = ()
    TYPE: ClassVar[int]
    NAMES: ClassVar[tuple[str, ...]]
    LAYOUT: ClassVar[tuple[Field, ...]]
    LIMITS: ClassVar[tuple[tuple[int, int, int], ...]]


TO_COORDINATOR: Final[dict[int, type[Message]]] = {}
TO_CLIENT: Final[dict[int, type[Message]]] = {}


@dataclass_transform(frozen_default=True)
def declare(table: dict[int, type[Message]], number: int, *layout: Field) -> Callable[[type[M]], type[M]]:
    """Class decorator: makes a frozen slotted dataclass, and enters it into a table under its number."""

    def bind(plain: type[M]) -> type[M]:
        cls = dataclass(frozen=True, slots=True)(plain)
        assert number not in {*TO_COORDINATOR, *TO_CLIENT}, f"type {number} is taken"
        cls.TYPE, cls.LAYOUT, cls.LIMITS = number, layout, tuple(map(limits, layout))
        cls.NAMES = tuple(each.name for each in fields(cls))  # type: ignore[arg-type]
        assert len(layout) == len(cls.NAMES), f"{cls.__name__}: a bound for every field"
        table[number] = cls
        return cls

    return bind


def limits(bound: Field) -> tuple[int, int, int]:
    """(kind, lowest, highest) with kind 0 for integers, 1 for bool, 2 for text (highest is its length)."""
    if bound.kind == "uint":
        return 0, bound.least, (1 << bound.size) - 1 if bound.most is None else bound.most
    return (1, 0, 1) if bound.kind == "bool" else (2, 0, bound.size)
