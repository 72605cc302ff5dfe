"""What happened: a bounded log of events and commands, to read after a failure and to replay.

Invariants: recording costs one append; the log holds the last `length` events; a story replays only from its
beginning, so `complete` says whether nothing has been dropped.  Events are written as JSON, one a line, and read back
equal.

May not go here: opinions on what happened.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, get_type_hints

from coordinator import events
from coordinator.commands import Command

SHOWN: Final = 40
"""Entries in the message of an InvariantError."""

_EVENTS: Final[dict[str, type]] = {cls.__name__: cls for cls in events.Event.__args__}
_HINTS: Final[dict[str, dict[str, object]]] = {name: get_type_hints(cls) for name, cls in _EVENTS.items()}


class InvariantError(AssertionError):
    """Our own mistake.  The message ends with the last events; `lines` is the story for `read` and `replay`."""

    def __init__(self, text: str, story: Story) -> None:
        whole = "complete" if story.complete else "its beginning is lost"
        super().__init__(
            f"{text}\n\nThe last of {len(story)} events ({whole}; `replay(scheduler, read(error.lines))` runs them):\n"
            + "\n".join(story.tell(SHOWN))
        )
        self.lines = list(story.lines())


class Story:
    """The last events of one scheduler, with what each led to."""

    def __init__(self, length: int) -> None:
        self._entries: deque[tuple[int, events.Event, Sequence[Command] | Exception]] = deque(maxlen=length)
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def complete(self) -> bool:
        """Nothing has been dropped."""
        return self._recorded == len(self._entries)

    def record(self, now_ns: int, event: events.Event, outcome: Sequence[Command] | Exception) -> None:
        """`outcome` is kept, not copied."""
        self._recorded += 1
        self._entries.append((now_ns, event, outcome))

    def tell(self, count: int) -> list[str]:
        """The last entries for a human."""
        entries = list(self._entries)[-count:]
        told = []
        for now_ns, event, outcome in entries:
            told.append(f"{now_ns} {event!r}")
            if isinstance(outcome, Exception):
                told.append(f"    ! {outcome!r}")
            else:
                told.extend(f"    -> {command!r}" for command in outcome)
        return told

    def lines(self) -> Iterable[str]:
        """The events as JSON, one a line, for `read`."""
        return [_write(now_ns, event) for now_ns, event, _ in self._entries]


def _write(now_ns: int, event: events.Event) -> str:
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, events.PolicySet):
        values["policies"] = {}  # instances are made anew by the scheduler's factory
    return json.dumps([now_ns, type(event).__name__, values])


def read(lines: Iterable[str]) -> list[tuple[int, events.Event]]:
    """The events of `Story.lines`.  Raises ValueError for anything else."""
    return [_read(line) for line in lines]


def _read(line: str) -> tuple[int, events.Event]:
    try:
        now_ns, name, values = json.loads(line)
        cls, hints = _EVENTS[name], _HINTS[name]
        for field, value in values.items():
            kind = hints[field]
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                values[field] = kind(value)
        event: events.Event = cls(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a line of a story: {line[:200]!r}: {error!r}") from None
    return now_ns, event


class Handles(Protocol):
    """A scheduler, as far as a replay needs one."""

    def handle(self, event: events.Event, now_ns: int) -> list[Command]:
        """See `Scheduler.handle`."""
        ...


def replay(scheduler: Handles, story: Iterable[tuple[int, events.Event]]) -> list[list[Command] | Exception]:
    """Run a complete story through a fresh scheduler; what each event led to.  An InvariantError comes out as it is."""
    outcomes: list[list[Command] | Exception] = []
    for now_ns, event in story:
        try:
            outcomes.append(scheduler.handle(event, now_ns))
        except InvariantError:
            raise
        except Exception as error:
            outcomes.append(error)
    return outcomes
