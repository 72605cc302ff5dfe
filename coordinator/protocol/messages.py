"""The only declaration of the messages between hooks and the coordinator.

`codegen` turns this module into `client_hook/src/coord/protocol/wire.gen.h`.  A message is one ZeroMQ frame: a msgpack
array `[type, field, field, ...]`.

Invariants:
- Type numbers and field order never change.  New fields are appended, with a default.
- A missing trailing field has its default.  An extra trailing field is ignored.  An unknown type is reported to its
  sender and has no other effect, so that either side may be newer.
- Frames, texts and integers are bounded.  A value out of bounds is a `RemoteProtocolError`.
"""

from __future__ import annotations

from typing import Final

from nvshare.coordinator.protocol.codec import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from nvshare.coordinator.protocol.codec import decode as decode
from nvshare.coordinator.protocol.codec import encode as encode
from nvshare.coordinator.protocol.fields import (
    BOOL,
    BYTES,
    COUNT,
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
from nvshare.coordinator.protocol.kinds import MemoryMode as MemoryMode
from nvshare.coordinator.protocol.kinds import Rejection as Rejection
from nvshare.coordinator.protocol.kinds import ReleaseReason as ReleaseReason

PROTOCOL_VERSION: Final = 3
"""Increases when an old peer could misunderstand a new one; appended fields do not need that."""

UNBOUNDED: Final = (1 << 64) - 1
"""In a field of bytes: all."""

VERSION: Final = Field("uint", 16, least=PROTOCOL_VERSION, most=PROTOCOL_VERSION)
WORDS: Final = Field("text", 511)
PERMILLE: Final = Field("uint", 16, most=1000)

MAX_GPUS_PER_CLIENT: Final = 32
"""A client names its GPUs by its own CUDA ordinals, which are below this number."""
ORDINAL: Final = Field("uint", 8, most=MAX_GPUS_PER_CLIENT - 1)

HOST: Final = 255
"""Instead of an ordinal in `State` and `Target`: the node's budget of pinned host memory."""


# --- from a client -------------------------------------------------------------------------------------------------


@declare(TO_COORDINATOR, 1, VERSION, NAME, NAME, U8, BYTES, SENTENCE, BOOL, BOOL, WORDS)
class Hello(Message):
    """First message of a connection.

    The kernel identifies the process.  `memory_limit_bytes` 0 asks for no limit.
    `placement` is what the coordinator gave its launcher (model/placement.py); "": the program was not placed.
    `memory_auto`: the hook chose the memory mode; it is not `SWAP` only where a GPU of the program cannot do that.
    `spatial`: the process is a client of MPS.  `profile`: lines of `word=value` (model/profile.py).
    """

    protocol: int
    name: str
    program: str
    memory_mode: int
    memory_limit_bytes: int
    placement: str = ""
    memory_auto: bool = False
    spatial: bool = False
    profile: str = ""


@declare(TO_COORDINATOR, 2, ORDINAL, UUID, U64, BOOL, BYTES, BYTES, BYTES, BOOL)
class AttachGpu(Message):
    """The client is about to use a GPU, or has reconnected while it uses it.

    `gpu` is the client's ordinal of the GPU in all later messages.  `lease_id` is a lease still held from before a
    lost connection (0: none).  `wanted`: a thread waits for a lease.  `parked`: `Park(True)` came, and no end of it.
    """

    gpu: int
    uuid: str
    lease_id: int
    wanted: bool
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    parked: bool = False


@declare(TO_COORDINATOR, 3, ORDINAL)
class Request(Message):
    """A thread waits for the lease of this GPU."""

    gpu: int


@declare(TO_COORDINATOR, 4, ORDINAL, U64, U8, BOOL, BOOL, TIME, TIME, COUNT)
class Release(Message):
    """The client returns its lease: the gate is closed and the work drained.

    `drained` false: the drain passed its deadline and work may still run.  `wanted`: a thread waits, so this is also
    a request.  `drain_ns` is the time from closing the gate to the end of the work.  `opened_at_ns` is the time at
    which the gate opened for this lease, by CLOCK_MONOTONIC of the node.  `submissions` counts its gated calls.
    """

    gpu: int
    lease_id: int
    reason: int
    drained: bool
    wanted: bool
    drain_ns: int
    opened_at_ns: int
    submissions: int


@declare(
    TO_COORDINATOR, 15,
    U8, U32, BYTES, BYTES, BYTES, BYTES, U64, BYTES, BOOL, U64, U64, TIME, BOOL, U32, U32, BYTES, BYTES, U32, BYTES,
)  # fmt: skip
class State(Message):
    """The client's memory on this GPU, and how far it is with its target; each replaces the one before.

    allocated = resident + evicted; pinned is the immovable part of resident.  Resident is never less than what is on
    the GPU: what comes in counts before, and what goes out until it has gone.
    `target` is the number of the newest `Target` of this connection that the client has taken note of: it obeys no
    older one (0: none).  `at_rest`: the client moves nothing before another one comes, whether it has reached this one
    or not.  `error`: CUresult of its last move (0: none).
    `moved_out_bytes`, `moved_in_bytes` and `moving_ns` are sums since `AttachGpu`.
    `released_bytes`: what the program's callbacks of `on_pressure` have freed since its start.
    `prepared_bytes`: pinned host memory that an eviction finds ready.
    `linked`: this GPU and others of the client reach each other's memory or share a graph, so they run together.

    Two questions, each with its number (0: none yet); a new number is a new question, which `Target` answers:
    - `asks`: may the client have `total_bytes` in all?  The driver had no memory for `lacking_bytes` of what it was
      promised before: others are to make room on the card.  Less under the number of an old question gives back.
    - `asks_pins`: may `pins_bytes` in all be immovable (`GpuSettings.ask_pins`)?  Answered at once, except in the
      first second after a restart of the coordinator, when clients that need room may not have reconnected.

    For `gpu` = `HOST` only `asks` and `total_bytes` count: the client's share of the node's pinned host memory.
    """

    gpu: int
    target: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    host_bytes: int
    released_bytes: int = 0
    prepared_bytes: int = 0
    linked: bool = False
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    moving_ns: int = 0
    at_rest: bool = True
    error: int = 0
    asks: int = 0
    total_bytes: int = 0
    lacking_bytes: int = 0
    asks_pins: int = 0
    pins_bytes: int = 0


@declare(TO_COORDINATOR, 8)
class Goodbye(Message):
    """The process ends normally; its leases are free."""


@declare(TO_COORDINATOR, 11, ORDINAL, U64, TIME, U64, TIME, TIME, U64)
class Progress(Message):
    """The client's work on this GPU, in sums since its start; at most every 100 ms while it holds a lease.

    `at_ns` is the time of the count, by CLOCK_MONOTONIC of the node.  `work` counts submissions, weighted by what their
    kind takes when nothing else runs, in units of the client's own.  `busy_ns` of `watched_ns` the GPU had unfinished
    work of the client; both grow only while the hook watches.  `steps` counts calls of `nvshare.client_hook.step()`.
    """

    gpu: int
    lease_id: int
    at_ns: int
    work: int
    busy_ns: int
    watched_ns: int
    steps: int


@declare(TO_COORDINATOR, 13, ORDINAL)
class ExplainWait(Message):
    """A thread has waited for seconds.  Answered by `WaitExplained`, unless the client has a lease by then."""

    gpu: int


@declare(TO_COORDINATOR, 14, BOOL, SENTENCE)
class ParkAnswer(Message):
    """Answers `Park(True)`.  `ready`: no call of the program reaches the driver; otherwise the reason."""

    ready: bool
    reason: str = ""


# --- to a client ---------------------------------------------------------------------------------------------------


@declare(TO_CLIENT, 64, U64)
class Welcome(Message):
    """Answers `Hello`."""

    client_id: int


@declare(
    TO_CLIENT, 65,
    U8, U64, U64, BOOL, U64, U64, U64, U64, BOOL, BOOL, BOOL, U64, PERMILLE, BOOL, BOOL,
)  # fmt: skip
class GpuSettings(Message):
    """Answers `AttachGpu`, and is sent again after each change: one message, so that the values change together.

    - `memory_limit_bytes`: limit of this client's allocations (0: none).
    - `capacity_bytes`: resident memory of all clients together; the GPU's size as seen by a client without a limit.
    - `reserve`: growth beyond the reservation is asked for (`State.asks`).
    - `pacing_budget_ns`: limit of submitted, unfinished GPU time (0: none).
    - `idle_release_ns`: idle time after which the lease is released while another client waits (0: never).
    - `prepare_host_bytes`: expected size of an eviction, for which the hook prepares pinned memory.
    - `room_bytes`: the largest resident memory possible beside the others' immovable memory (0: unknown).
    - `ask_pins`: memory becomes immovable only after a question (`State.asks_pins`).
    - `limit_of_slot`: the memory limit belongs to the client's slot, and its programs share it.
    - `prepare_now`: the hook prepares that memory without rests, and reports once it is ready.
    - `slot_bytes`: memory of the slot's other programs, for the figures that this one is told.
    - `rate`: thousandths of the time in which the client's work may keep the GPU busy; the gate holds it.
    - `report`: the client sends `Progress` while it holds a lease.  `watch`: it also samples `busy_ns`.
    """

    gpu: int
    memory_limit_bytes: int
    capacity_bytes: int
    reserve: bool
    pacing_budget_ns: int
    idle_release_ns: int
    prepare_host_bytes: int = 0
    room_bytes: int = 0
    ask_pins: bool = False
    limit_of_slot: bool = False
    prepare_now: bool = False
    slot_bytes: int = 0
    rate: int = 1000
    report: bool = False
    watch: bool = False


@declare(TO_CLIENT, 66, U8, U64, U32)
class Grant(Message):
    """Grants the lease `lease_id`.  `waiters` is the number of waiting clients."""

    gpu: int
    lease_id: int
    waiters: int


@declare(TO_CLIENT, 67, U8, U64, U64)
class Revoke(Message):
    """Orders the client to close the gate, to drain within `drain_deadline_ns`, and to send `Release`."""

    gpu: int
    lease_id: int
    drain_deadline_ns: int


@declare(TO_CLIENT, 68, U8, U64, U32)
class Waiters(Message):
    """Number of other clients that wait for the held lease, sent when it changes from or to zero."""

    gpu: int
    lease_id: int
    waiters: int


@declare(TO_CLIENT, 80, U8, U32, BYTES, BOOL, U32, BYTES, BOOL, U32, BYTES)
class Target(Message):
    """`bytes` of the client's memory are to be on the GPU while it has no lease; each replaces the one before.

    At most so many where memory comes in, and where it goes out as well, as far as it can move.  `number` counts the
    targets of a GPU and connection from 1 (0: none yet); with the number of the one before, nothing about it is new.
    `rises`: probably and soon, so the client waits there for a moment.

    `answers` and `answers_pins` are the newest questions of a `State` that are answered (0: none): the client may have
    `total_bytes` in all, of which `pins_bytes` may be immovable; after a refusal, what it might have before.
    `by_limit`: the refusal's reason is the client's memory limit.
    For `gpu` = `HOST`, `answers` and `total_bytes` are the client's share of pinned host memory, the others 0.
    """

    gpu: int
    number: int
    bytes: int
    rises: bool = False
    answers: int = 0
    total_bytes: int = 0
    by_limit: bool = False
    answers_pins: int = 0
    pins_bytes: int = 0


@declare(TO_CLIENT, 73, U8, U64)
class Standby(Message):
    """Announces a message about this GPU's lease within `within_ns`: the hook polls for it.

    Sent to the holder shortly before its quantum ends, and to the expected next holder.
    """

    gpu: int
    within_ns: int


@declare(TO_CLIENT, 78, U8, U16, SENTENCE)
class WaitExplained(Message):
    """Answers `ExplainWait`: `text` says what the client waits for.  `index` is the GPU's number on the node."""

    gpu: int
    index: int
    text: str


@declare(TO_CLIENT, 79, BOOL, ORDINAL, UUID, BOOL)
class Park(Message):
    """`on`: the client is to close its ways to the driver, since it leaves the GPUs.  Not `on`: it runs again.

    With a `uuid`, that is the GPU which the client's `ordinal` is from now on.  `lost`: the driver has failed in its
    midst, so all calls are to reach it and to fail.
    """

    on: bool
    ordinal: int = 0
    uuid: str = ""
    lost: bool = False


@declare(TO_CLIENT, 72, U16, BOOL, SENTENCE, ORDINAL)
class Rejected(Message):
    """A refusal.  `final`: the coordinator closes the connection.

    `UNKNOWN_GPU` and `FORBIDDEN_GPU` answer the `AttachGpu` of this `ordinal`.
    """

    code: int
    final: bool
    text: str
    ordinal: int = 0
