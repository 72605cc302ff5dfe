"""A bounded log of events and commands, to read after a failure and to replay.

Rules:
- The log has two halves.  Each begins with a copy of the core's state; when the newer half is full, the older one is
  dropped.  So the log replays however long the core has run, and holds at least the last `length / 2` events.
- Recording an event costs one append.
- `complete` is false when a state could not be copied.  Such a log does not replay.
- Events are written as JSON, one a line, and read back equal.  Reading a file runs no code that the file names.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import gc
import io
import json
import pickle
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, get_type_hints

from nvshare.coordinator.model import events
from nvshare.coordinator.model.commands import Command
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol.messages import TO_COORDINATOR, Message

SHOWN: Final = 40
"""Entries in the message of an InvariantError."""

MAX_STATE_BYTES: Final = 1 << 30


_PURE: Final = (
    *(f"nvshare.coordinator.{layer}." for layer in ("engine", "model", "protocol")),
    "nvshare.scheduler_policies.",
)
"""Layers without I/O, as the layer checks of pyproject.toml hold: making an object of their classes has no effect."""
_CONTAINERS: Final[dict[str, type]] = {"Counter": Counter, "deque": deque}

_EVENTS: Final[dict[str, type]] = {cls.__name__: cls for cls in events.Event.__args__}
_HINTS: Final[dict[str, dict[str, object]]] = {name: get_type_hints(cls) for name, cls in _EVENTS.items()}


class InvariantError(AssertionError):
    """A mistake of the core.  The message ends with the last events; `lines` is the log for `read` and `replay`."""

    def __init__(self, text: str, log: EventLog) -> None:
        lost = "the state before them is lost"
        whole = "`replay(scheduler, read(error.lines))` runs them" if log.complete else lost
        super().__init__(f"{text}\n\nThe last of {len(log)} events ({whole}):\n" + "\n".join(log.describe(SHOWN)))
        self.lines = list(log.lines())


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """The state of a core before the events that follow, as `freeze` gives it."""

    state: bytes


@dataclasses.dataclass(slots=True)
class _Half:
    began_ns: int
    state: bytes | None
    entries: list[tuple[int, events.Event, Sequence[Command] | Exception]] = dataclasses.field(default_factory=list)


class EventLog:
    """The last events of one scheduler, each with its commands."""

    def __init__(self, length: int) -> None:
        self._half_length = self._room = max(1, length // 2)
        self._halves: deque[_Half] = deque([_Half(0, None)], maxlen=2)

    def __len__(self) -> int:
        return sum(len(half.entries) for half in self._halves)

    @property
    def complete(self) -> bool:
        """The log begins with a state, so it replays."""
        return self._halves[0].state is not None

    @property
    def full(self) -> bool:
        """The newer half is full: `begin` the next one."""
        return len(self._halves[-1].entries) >= self._room

    def begin(self, now_ns: int, state: bytes | None, at_least: int = 0) -> None:
        """Begins a half, for at least `at_least` events, and drops the oldest one.

        `state` None: it could not be copied.
        """
        if not len(self):
            self._halves.clear()
        self._room = max(self._half_length, at_least)
        self._halves.append(_Half(now_ns, state))

    def record(self, now_ns: int, event: events.Event, outcome: Sequence[Command] | Exception) -> None:
        """Keeps `outcome`, without a copy."""
        self._halves[-1].entries.append((now_ns, event, outcome))

    def _entries(self) -> Iterator[tuple[int, events.Event, Sequence[Command] | Exception]]:
        for half in self._halves:
            yield from half.entries

    def describe(self, count: int) -> list[str]:
        """The last entries, for people."""
        told = []
        for now_ns, event, outcome in list(self._entries())[-count:]:
            told.append(f"{now_ns} {event!r}")
            if isinstance(outcome, Exception):
                told.append(f"    ! {outcome!r}")
            else:
                told.extend(f"    -> {command!r}" for command in outcome)
        return told

    def lines(self) -> Iterator[str]:
        """The state and the events after it as JSON, one a line, for `read`."""
        first = self._halves[0]
        if first.state is not None:
            text = base64.b64encode(zlib.compress(first.state)).decode()
            yield json.dumps([first.began_ns, Beginning.__name__, {"state": text}])
        for now_ns, event, _ in self._entries():
            yield _write(now_ns, event)


def freeze(state: object) -> bytes | None:
    """A copy of a core's state for `thaw`; None when something in it, such as a foreign class, cannot be copied."""
    collects = gc.isenabled()
    gc.disable()  # the pickler's temporary objects would cause full collections
    try:
        return pickle.dumps(state, 5)
    except Exception:  # a foreign class may raise anything
        return None
    finally:
        if collects:
            gc.enable()


def thaw(state: bytes) -> Any:
    """The argument of `freeze`.  Raises ValueError for anything else."""
    try:
        return _Unpickler(io.BytesIO(state)).load()
    except Exception as error:  # damaged content raises many exceptions
        raise ValueError(f"not a state: {error!r}") from None


def _member(kind: type, name: str) -> enum.Enum:
    if not issubclass(kind, enum.Enum):
        raise pickle.UnpicklingError(f"{kind} is no enumeration")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Makes records of the core, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name in _CONTAINERS:
            return _CONTAINERS[name]
        if (module, name) == ("builtins", "getattr"):  # an enumeration's member, by Python up to 3.11.3
            return _member
        found = super().find_class(module, name) if module.startswith(_PURE) and "." not in name else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is not a record of the core")
        return found


def _plain(value: Any) -> Any:
    """A message begins with its type, as on the wire."""
    if isinstance(value, Message):
        return [value.TYPE, *dataclasses.astuple(value)]  # type: ignore[call-overload]
    return dataclasses.asdict(value) if isinstance(value, Facts) else value


def _write(now_ns: int, event: events.Event) -> str:
    values = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return json.dumps([now_ns, type(event).__name__, values])


def read(lines: Iterable[str]) -> list[tuple[int, events.Event | Beginning]]:
    """Reads what `EventLog.lines` wrote.  Raises ValueError for anything else."""
    return [_read(line) for line in lines]


@functools.cache
def _facts() -> Any:
    """Makes `Facts` of what JSON makes of them."""
    from pydantic import TypeAdapter  # for readers of a log, not for the core

    return TypeAdapter(Facts)


def _read(line: str) -> tuple[int, events.Event | Beginning]:
    try:
        now_ns, name, values = json.loads(line)
        if name == Beginning.__name__:
            packed = base64.b64decode(values["state"], validate=True)
            return now_ns, Beginning(zlib.decompressobj().decompress(packed, MAX_STATE_BYTES))
        cls, hints = _EVENTS[name], _HINTS[name]
        for field, value in list(values.items()):
            kind = hints[field]
            if isinstance(kind, type) and issubclass(kind, Message):
                number, *parts = value
                values[field] = TO_COORDINATOR[number](*parts)
            elif kind is Facts:
                values[field] = _facts().validate_python(value)
        event: events.Event = cls(**values)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"not a line of an event log: {line[:200]!r}: {error!r}") from None
    return now_ns, event


class Handles(Protocol):
    """A scheduler, as far as a replay needs one."""

    def handle(self, event: events.Event, now_ns: int) -> list[Command]:
        """See `Scheduler.handle`."""
        ...

    def load(self, state: bytes) -> None:
        """See `Scheduler.load`."""
        ...


def replay(scheduler: Handles, log: Iterable[tuple[int, events.Event | Beginning]]) -> list[list[Command] | Exception]:
    """Runs a complete log through a scheduler, whose state and settings become the log's.

    Returns what each event led to.  An InvariantError is raised as it is.
    """
    outcomes: list[list[Command] | Exception] = []
    for now_ns, event in log:
        if isinstance(event, Beginning):
            scheduler.load(event.state)
            continue
        try:
            outcomes.append(scheduler.handle(event, now_ns))
        except InvariantError:
            raise
        except Exception as error:
            outcomes.append(error)
    return outcomes
