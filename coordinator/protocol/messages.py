"""The only declaration of the messages between hooks and the coordinator.

Purpose: name every message, its fields, their types and their bounds, once.  `wire_codegen` turns this
module into `client_hook/src/coord/protocol/wire.gen.h`; nothing else may spell out a message.

A message is one ZeroMQ frame: a msgpack array `[type, field, field, ...]`.

Invariants:
- Type numbers and field order never change; new fields are appended, with a default.
- A missing trailing field takes its default; an extra trailing field is skipped; an unknown type is
  reported to its sender and costs it nothing else, so that either side may be newer.
- Everything is bounded: a frame by `MAX_FRAME_BYTES`, text by its field's length in UTF-8 bytes, integers by
  their width, and what a client says by what can be.  What breaks a bound is a `RemoteProtocolError`, never a crash.

May not go here: bytes (protocol/codec.py), sockets, clocks, what a message means for scheduling.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from nvshare.coordinator.protocol.codec import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from nvshare.coordinator.protocol.codec import decode as decode
from nvshare.coordinator.protocol.codec import encode as encode
from nvshare.coordinator.protocol.codec import learn
from nvshare.coordinator.protocol.fields import (
    BOOL,
    BYTES,
    COUNT,
    I32,
    NAME,
    SENTENCE,
    TIME,
    U8,
    U16,
    U32,
    U64,
    UUID,
    Field,
    declare,
)
from nvshare.coordinator.protocol.fields import MOST_BYTES as MOST_BYTES
from nvshare.coordinator.protocol.fields import TO_CLIENT as TO_CLIENT
from nvshare.coordinator.protocol.fields import TO_COORDINATOR as TO_COORDINATOR
from nvshare.coordinator.protocol.fields import Message as Message
from nvshare.coordinator.protocol.fields import RemoteProtocolError as RemoteProtocolError

PROTOCOL_VERSION: Final = 1
"""Grows when an old peer could misunderstand a new one; appended fields do not need it."""

UNBOUNDED: Final = (1 << 64) - 1
"""In a field of bytes: as many as there are."""

MAX_WEIGHT: Final = 10_000
WEIGHT: Final = Field("uint", 16, least=1, most=MAX_WEIGHT)

MAX_GPUS_PER_CLIENT: Final = 32
"""A client names its GPUs by its own CUDA ordinals, below this."""
ORDINAL: Final = Field("uint", 8, most=MAX_GPUS_PER_CLIENT - 1)


class MemoryMode(enum.IntEnum):
    """What the hook does with device allocations."""

    DEVICE = 0
    MANAGED = 1
    SWAP = 2


class Sharing(enum.IntEnum):
    """One lease at a time, or all clients at once."""

    EXCLUSIVE = 0
    CONCURRENT = 1


class ReleaseReason(enum.IntEnum):
    """Why a client gave its lease back."""

    REVOKED = 0
    IDLE = 1


class Rejection(enum.IntEnum):
    """Why the coordinator refuses something; the text beside it names the remedy."""

    PROTOCOL_VERSION = 1
    UNKNOWN_GPU = 2
    UNKNOWN_MESSAGE = 3
    MALFORMED = 4
    TOO_MANY_CLIENTS = 5
    NOT_ALLOWED = 6


# --- from a client -------------------------------------------------------------------------------------------------


@declare(TO_COORDINATOR, 1, U16, NAME, NAME, U32, I32, U8, BYTES, NAME, WEIGHT, NAME)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message of a connection.

    `process_id` is the client's own view (its PID namespace) and only shown; who it is comes from the kernel.
    `memory_limit_bytes` 0 means no limit asked for.  `weight` is from 1 to `MAX_WEIGHT`; `gang` "": in none.
    """

    protocol: int
    name: str
    program: str
    process_id: int
    priority: int
    memory_mode: int
    memory_limit_bytes: int
    library_version: str
    weight: int = 1
    gang: str = ""


@declare(TO_COORDINATOR, 2, ORDINAL, UUID, BYTES, U64, BOOL, BYTES, BYTES, BYTES)
@dataclass(frozen=True, slots=True)
class AttachGpu(Message):
    """The client is about to use a GPU, or uses it already and has connected again.

    `gpu` is the client's ordinal for it in all later messages.  `lease_id` is the lease that it still holds from
    before the connection was lost (0: none); `wanted` that a thread waits for one.
    """

    gpu: int
    uuid: str
    total_bytes: int
    lease_id: int
    wanted: bool
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int


@declare(TO_COORDINATOR, 3, ORDINAL)
@dataclass(frozen=True, slots=True)
class Request(Message):
    """A thread waits for the lease of this GPU."""

    gpu: int


@declare(TO_COORDINATOR, 4, ORDINAL, U64, U8, BOOL, BOOL, TIME, TIME, COUNT)
@dataclass(frozen=True, slots=True)
class Release(Message):
    """The lease is given back: the gate is closed and the work drained.

    `drained` false: the drain passed its deadline and work may still run.  `wanted`: a thread waits already, so
    this is a request too.  `drain_ns` is the time from closing the gate until the work was done.
    `opened_at_ns` is when the gate was opened for this lease, by CLOCK_MONOTONIC of the node.
    `submissions` counts the gated calls that passed under this lease.
    """

    gpu: int
    lease_id: int
    reason: int
    drained: bool
    wanted: bool
    drain_ns: int
    opened_at_ns: int
    submissions: int


@declare(TO_COORDINATOR, 5, ORDINAL, BYTES, BYTES, BYTES, BYTES)
@dataclass(frozen=True, slots=True)
class MemoryReport(Message):
    """What the client has on this GPU: allocated = resident + evicted; pinned is the resident part that cannot move."""

    gpu: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int


@declare(TO_COORDINATOR, 6, ORDINAL, U32, BYTES)
@dataclass(frozen=True, slots=True)
class ReserveMemory(Message):
    """Asks that the client's reservation on this GPU be `bytes` in all.  Answered by `MemoryReserved`."""

    gpu: int
    sequence: int
    bytes: int


@declare(TO_COORDINATOR, 7, ORDINAL, U64, BYTES, TIME, BOOL, U32)
@dataclass(frozen=True, slots=True)
class MoveProgress(Message):
    """Bytes moved so far for an `Evict` or `Restore` order.

    `finished` ends the order, also when less could be moved than asked.  `error` is a CUresult (0: none).
    """

    gpu: int
    order_id: int
    moved_bytes: int
    elapsed_ns: int
    finished: bool
    error: int


@declare(TO_COORDINATOR, 8)
@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """The process ends in order; its leases are free."""


@declare(TO_COORDINATOR, 9, U32, BYTES)
@dataclass(frozen=True, slots=True)
class ReserveHost(Message):
    """Asks that the client's share of the node's host budget be `bytes` in all; fewer than before gives some back.

    Answered by `HostReserved`.
    """

    sequence: int
    bytes: int


@declare(TO_COORDINATOR, 10, ORDINAL, U32, BYTES)
@dataclass(frozen=True, slots=True)
class ReservePins(Message):
    """Asks that `bytes` in all of what the client has on this GPU may stay there whatever happens.

    Only where `GpuSettings.ask_pins` says so.  Answered by `PinsReserved`: at once, but for the first second after a
    restart of the coordinator, in which clients may be missing who need room too.
    """

    gpu: int
    sequence: int
    bytes: int


# --- to a client ---------------------------------------------------------------------------------------------------


@declare(TO_CLIENT, 64, U16, U64)
@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answers `Hello`."""

    protocol: int
    client_id: int


@declare(TO_CLIENT, 65, U8, U64, U64, BOOL, U64, U64, U64, U8, U64, U64, U64, BOOL, BOOL)
@dataclass(frozen=True, slots=True)
class GpuSettings(Message):
    """Answers `AttachGpu`, and is sent again whenever one of its values changes.

    `memory_limit_bytes` 0: no limit for this client.  `capacity_bytes` is what all clients together may have
    resident, and the card's size as the client sees it without a limit.  `reserve`: each growth beyond the
    reservation needs `ReserveMemory`.  `pacing_budget_ns` bounds submitted GPU time that has not finished (0: not).
    `idle_release_ns`: give the lease back after being idle so long while somebody waits (0: never).
    `resident_limit_bytes`: always 0; hooks of version 0.1 run what lies beyond it from the host.
    `prepare_host_bytes`: so much will probably be evicted from this client at a time; have pinned memory ready for it.
    `room_bytes`: more than this can never be on the GPU, beside what others have there that cannot move (0: not said).
    `ask_pins`: what is not going to move any more is asked for first, with `ReservePins`.
    `limit_of_slot`: the memory limit is that of the client's slot, whose programs have it together.
    """

    gpu: int
    memory_limit_bytes: int
    capacity_bytes: int
    reserve: bool
    pacing_budget_ns: int
    idle_release_ns: int
    drain_deadline_ns: int
    sharing: int
    resident_limit_bytes: int = 0
    prepare_host_bytes: int = 0
    room_bytes: int = 0
    ask_pins: bool = False
    limit_of_slot: bool = False


@declare(TO_CLIENT, 66, U8, U64, U64, U32)
@dataclass(frozen=True, slots=True)
class Grant(Message):
    """The client holds the lease `lease_id`.  `quantum_ns` is how long it is meant to last; `waiters` who wait."""

    gpu: int
    lease_id: int
    quantum_ns: int
    waiters: int


@declare(TO_CLIENT, 67, U8, U64, U64)
@dataclass(frozen=True, slots=True)
class Revoke(Message):
    """Close the gate, drain within `drain_deadline_ns`, then `Release`."""

    gpu: int
    lease_id: int
    drain_deadline_ns: int


@declare(TO_CLIENT, 68, U8, U64, U32)
@dataclass(frozen=True, slots=True)
class Waiters(Message):
    """How many others wait for the lease that this client holds, sent when it becomes zero or stops being zero."""

    gpu: int
    lease_id: int
    waiters: int


@declare(TO_CLIENT, 69, U8, U64, U64)
@dataclass(frozen=True, slots=True)
class Evict(Message):
    """Move at least `bytes` of this client's resident memory off the GPU, or all that can be moved."""

    gpu: int
    order_id: int
    bytes: int


@declare(TO_CLIENT, 70, U8, U64, U64, U64)
@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Bring up to `bytes` of this client's evicted memory back, of which `credit_bytes` have room now.

    The rest may follow as `MoveCredit` says, while others are still being evicted.
    """

    gpu: int
    order_id: int
    bytes: int
    credit_bytes: int = UNBOUNDED


@declare(TO_CLIENT, 74, U8, U64, U64)
@dataclass(frozen=True, slots=True)
class MoveCredit(Message):
    """Of this `Restore`, `credit_bytes` in all have room now; it never shrinks.

    More may never follow: a `Grant` ends a `Restore` that waits for credit.
    """

    gpu: int
    order_id: int
    credit_bytes: int


@declare(TO_CLIENT, 71, U8, U32, U64, BOOL)
@dataclass(frozen=True, slots=True)
class MemoryReserved(Message):
    """Answers `ReserveMemory`: the reservation is now `bytes` in all (unchanged when it was refused).

    `by_limit`: the client's memory limit refused it.
    """

    gpu: int
    sequence: int
    bytes: int
    by_limit: bool = False


@declare(TO_CLIENT, 75, U32, U64)
@dataclass(frozen=True, slots=True)
class HostReserved(Message):
    """Answers `ReserveHost`: the client's share is now `bytes` in all (unchanged when it was refused)."""

    sequence: int
    bytes: int


@declare(TO_CLIENT, 76, U8, U32, U64)
@dataclass(frozen=True, slots=True)
class PinsReserved(Message):
    """Answers `ReservePins`: so many bytes in all may stay (what it was before when it was refused)."""

    gpu: int
    sequence: int
    bytes: int


@declare(TO_CLIENT, 73, U8, U64)
@dataclass(frozen=True, slots=True)
class Standby(Message):
    """A message about this GPU's lease will come within so long: wait for it wide awake.

    Sent to the holder shortly before its quantum ends, and to whoever will probably be next.
    """

    gpu: int
    within_ns: int


@declare(TO_CLIENT, 72, U16, BOOL, SENTENCE)
@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """Something was refused.  `final`: trying again on this connection is no use."""

    code: int
    final: bool
    text: str


for _table in (TO_COORDINATOR, TO_CLIENT):
    learn(_table)
