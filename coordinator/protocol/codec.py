"""Encodes a message as one frame, and decodes it.

Decoders in Python and C (compared by tests/unit/protocol) accept one msgpack array with nothing after it.
Integers have any width; text is valid UTF-8 without a zero byte; further well-formed fields of any type are ignored.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Final

import msgpack

from nvshare.coordinator.protocol.fields import Message, RemoteProtocolError

MAX_FRAME_BYTES: Final = 1024
"""Longest message.  Longer frames are refused before decoding."""

_UNPACK: Final[dict[str, Any]] = {"raw": True, "strict_map_key": False, "timestamp": 1}


def encode(message: Message) -> bytes:
    """One frame.  Asserts the bounds, because the sender must keep them."""
    cls = type(message)
    values = [getattr(message, name) for name in cls.NAMES]
    for bound, value in zip(cls.LIMITS, values, strict=True):
        assert _fits(bound, value), f"{message!r}: {value!r} is outside {bound}"
    frame: bytes = msgpack.packb([cls.TYPE, *values])
    assert len(frame) <= MAX_FRAME_BYTES
    return frame


def decode(frame: bytes, table: dict[int, type[Message]]) -> Message | int:
    """The message in a frame; for an unknown type its number.  Raises RemoteProtocolError for a malformed frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        # Raw: fields check their text themselves.  The pairs hook avoids hashing of keys.
        items = msgpack.unpackb(frame, object_pairs_hook=_nothing, ext_hook=_nothing, **_UNPACK)
    except Exception as error:  # msgpack raises exceptions of many types
        raise RemoteProtocolError(f"not msgpack: {error!r}") from None
    if type(items) is not list or not items or type(items[0]) is not int or not 0 <= items[0] < 256:
        raise RemoteProtocolError("not an array that begins with a message type")
    cls = table.get(items[0])
    if cls is None:
        return int(items[0])
    return _build(cls, items)


def _nothing(*_: object) -> None:
    """Replaces maps and extension types, which no field has."""


def _build(cls: type[Message], items: list[Any]) -> Message:
    limits = cls.LIMITS
    del items[0]
    if len(items) < len(limits):
        items += _defaults(cls, len(items))
    elif len(items) > len(limits):
        del items[len(limits) :]
    for index, bound in enumerate(limits):
        kind, low, high = bound
        value = items[index]
        if kind == 0:
            if type(value) is int and low <= value <= high:
                continue
        elif kind == 1:
            if value is True or value is False:
                continue
        elif (text := _text(value, high)) is not None:
            items[index] = text
            continue
        raise RemoteProtocolError(f"{cls.__name__}.{cls.NAMES[index]}: {_shown(value)} is not allowed")
    return cls(*items)


def _shown(value: object) -> str:
    """A value for an error's text.  `repr` of a peer's nested arrays would exceed the interpreter's recursion limit."""
    return "an array" if type(value) is list else f"{value!r:.80}"


def _text(value: object, limit: int) -> str | None:
    if type(value) is str:  # a default
        return value
    if type(value) is not bytes or len(value) > limit or b"\0" in value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _defaults(cls: type[Message], present: int) -> list[Any]:
    values = [f.default for f in fields(cls)[present:]]  # type: ignore[arg-type]
    if MISSING in values:
        raise RemoteProtocolError(f"{cls.__name__} with {present} of its fields")
    return values


def _fits(bound: tuple[int, int, int], value: object) -> bool:
    kind, low, high = bound
    if kind != 2:
        return isinstance(value, int) and isinstance(value, bool) == (kind == 1) and low <= value <= high
    try:
        return type(value) is str and len(value.encode()) <= high and "\0" not in value
    except UnicodeEncodeError:  # a lone surrogate
        return False
