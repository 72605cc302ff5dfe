"""Frozen inputs of the core: everything that can happen, as the shell reports it.

An event carries no socket, clock or callback.  `client` is the id that the shell gave to a connection; ids are never
reused.  Times are integer nanoseconds of CLOCK_MONOTONIC.  Non-goals: what an event does (engine/scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from nvshare.coordinator.kinds import Value
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.protocol.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class GpuAdded:
    """A scheduling domain exists.  `capacity_bytes` is what clients may have resident; `integrated`: of the host's own.

    `next_lease_id` continues the numbering of an earlier coordinator.  `expected_holder` is the process that held the
    lease then and still lives.  No lease is granted until it claims its lease, has ended (`ProcessEnded`), or
    `Settings.recovery_ns` has passed.  `commands.MANY_HOLDERS`: several processes may have held one, so nothing
    exclusive is granted until then.
    """

    uuid: str
    name: str
    total_bytes: int
    capacity_bytes: int
    next_lease_id: int = 1
    expected_holder: int | None = None
    integrated: bool = False


@dataclass(frozen=True, slots=True)
class ClientRegistered:
    """A hook said hello.  The kernel reports `process_id` and `user_id`.  `Settled` follows.

    Clients of one `group` (other than "") and one `allocation` of it share their memory limit and count as one for
    time.
    """

    client: int
    hello: Hello
    process_id: int
    user_id: int
    group: str = ""
    allocation: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """These facts hold for a client from now on."""

    client: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a client, as it came: `Received(client, Request(gpu))`."""

    client: int
    message: Message


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The connection ended, by death or goodbye.  Everything that the client held is free, but not its memory while
    its process lives (`ProcessEnded`)."""

    client: int
    process_lives: bool = False


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a client that is gone, or an expected holder, has ended: the driver has freed its memory."""

    process_id: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The deadline of the last `SetTimer` has come."""


# --- administration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Set:
    """A setting (model/settings.py) has this value from now on: for one GPU, or all and those to come (None)."""

    setting: str
    value: Value
    gpu: str | None = None
    client: int | None = None
    """Of a program's setting."""


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """The driver's figures after `commands.CheckMemory`: memory by process id (decimal), and of no such process."""

    uuid: str
    by_process: dict[str, int]
    unlisted_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The end of `commands.Checkpoint`.  With an `error` the process runs as before; if `lost`, all its calls fail.

    `unsure`: perhaps the checkpoint was made.
    """

    client: int
    error: str = ""
    lost: bool = False
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The end of `commands.Restore`.  With an `error` the process is still off the GPUs; `lost` as above."""

    client: int
    error: str = ""
    gpu: str = ""
    """The GPU on which it is; "": where it was."""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """A second has passed, while `park_after` or `rebalance` is set, or somebody waits.

    `stopped`: the processes of `Scheduler.watched` that are stopped by a signal or a debugger.
    """

    stopped: tuple[int, ...] = ()


Event = (
    GpuAdded
    | ClientRegistered
    | Settled
    | Received
    | ClientGone
    | ProcessEnded
    | MemoryChecked
    | TimerFired
    | Set
    | Saved
    | Restored
    | Look
)
