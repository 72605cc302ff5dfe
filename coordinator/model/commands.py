"""Frozen outputs of the core: what the shell must do, in order.

A command names clients by the shell's ids and GPUs by the client's ordinal.  A failure to carry it out comes back as an
event (`events.ClientGone`).  Non-goals: how a command is carried out (daemon/loop.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nvshare.coordinator.protocol import messages


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to one client."""

    client: int
    message: messages.Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire `TimerFired` at this time; replaces the earlier deadline.  None: no timer.

    One follows each `TimerFired`."""

    deadline_ns: int | None


MANY_HOLDERS: Final = -1
"""As `RecordLease.process_id`: the GPU is shared concurrently, so several processes may hold leases."""


@dataclass(frozen=True, slots=True)
class RecordLease:
    """Write to the journal.  `process_id` 0: no process holds the lease.  `lease_id` is the last id that was given.

    `MANY_HOLDERS` must come back as `GpuAdded.expected_holder` after a restart, without a check whether it lives.
    """

    uuid: str
    lease_id: int
    process_id: int


@dataclass(frozen=True, slots=True)
class Notify:
    """Publish a trace event: `kind` (granted, revoked, ...) and plain values for msgpack and JSON."""

    kind: str
    values: dict[str, int | str | bool | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the operator; `level` as in the logging module."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the client's process (SIGKILL, by its pidfd): its drain is overdue and the operator configured so.

    Its death comes back as `events.ClientGone`.
    """

    client: int
    process_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckMemory:
    """Read the driver's figures of this GPU's memory.  They come back as `events.MemoryChecked`."""

    uuid: str


@dataclass(frozen=True, slots=True)
class _OfProcess:
    client: int
    process_id: int
    user_id: int


@dataclass(frozen=True, slots=True)
class ExpectCheckpoint(_OfProcess):
    """The process will soon be saved: what calls the driver for it starts meanwhile."""


@dataclass(frozen=True, slots=True)
class Checkpoint(_OfProcess):
    """The driver saves the process and takes it off the GPUs.  Answered by `events.Saved`."""


@dataclass(frozen=True, slots=True)
class Restore(_OfProcess):
    """The driver brings the process back, whatever its state.  Answered by `events.Restored`."""

    home: str = ""
    target: str = ""
    """With both: the process left the GPU `home` and comes back on `target`."""


@dataclass(frozen=True, slots=True)
class ParkingOver:
    """The client runs, or is gone: what calls the driver for it ends."""

    client: int


DriverCall = ExpectCheckpoint | Checkpoint | Restore | ParkingOver
Command = Send | SetTimer | RecordLease | Notify | Log | Kill | CheckMemory | DriverCall
