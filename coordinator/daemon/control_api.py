"""The control protocol: what nvshare-ctl may ask, declared once for both ends.

A request is one msgpack map: `version`, `ask` (which request) and its fields.  A reply is one map: `version`, and
either `result` or `error` {`code`, `text`}.  A trace event is one map: `seq` (counts all events, so that a reader sees
what it lost), `at_ns` (CLOCK_MONOTONIC), `kind`, and the values of that kind.

Invariants: both ends check the version first; an unknown request or field is refused with a sentence, never ignored.

May not go here: carrying requests out (daemon/control_server.py), printing (cli/ctl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

CONTROL_VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 4096

ClientName = Annotated[str, Field(min_length=1, max_length=63)]
GpuName = Annotated[str, Field(min_length=1, max_length=95)]
I32_MIN: Final = -(1 << 31)
I32_MAX: Final = (1 << 31) - 1
U64_MAX: Final = (1 << 64) - 1


class ControlError(Exception):
    """A request that is refused.  `code` is stable, for programs; the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Ping(_Request):
    """Who runs here."""

    ask: Literal["ping"] = "ping"


class Status(_Request):
    """The GPUs, and optionally their clients."""

    ask: Literal["status"] = "status"
    clients: bool = True


class SetQuantum(_Request):
    """`quantum_ns` None: automatic.  `gpu` (UUID or index) None: all."""

    ask: Literal["set_quantum"] = "set_quantum"
    quantum_ns: int | None = Field(default=None, ge=1_000_000, le=3_600_000_000_000)
    gpu: GpuName | None = None


class SetPolicy(_Request):
    """By the name under which the policy is registered."""

    ask: Literal["set_policy"] = "set_policy"
    policy: ClientName
    gpu: GpuName | None = None


class SetSharing(_Request):
    """Exclusive or concurrent."""

    ask: Literal["set_sharing"] = "set_sharing"
    sharing: Literal["exclusive", "concurrent"]
    gpu: GpuName | None = None


class SetPriority(_Request):
    """`client` is an id, a process id or a name."""

    ask: Literal["set_priority"] = "set_priority"
    client: ClientName
    priority: int = Field(ge=I32_MIN, le=I32_MAX)


class SetWeight(_Request):
    """For policies that divide time; `client` as above."""

    ask: Literal["set_weight"] = "set_weight"
    client: ClientName
    weight: int = Field(ge=1, le=10_000)


class SetLimit(_Request):
    """Memory limit; 0 lifts it."""

    ask: Literal["set_limit"] = "set_limit"
    client: ClientName
    limit_bytes: int = Field(ge=0, le=1 << 60)
    gpu: GpuName | None = None


class SetHostBudget(_Request):
    """Pinned host memory of all clients together."""

    ask: Literal["set_host_budget"] = "set_host_budget"
    budget_bytes: int = Field(ge=1, le=1 << 60)


class SetSwitchShare(_Request):
    """Automatic quantum: the share of time that switching may cost."""

    ask: Literal["set_switch_share"] = "set_switch_share"
    share: float = Field(ge=0.001, le=0.5)
    gpu: GpuName | None = None


SettingName = Literal[
    "quantum",
    "policy",
    "sharing",
    "switch_share",
    "host_budget",
    "priority",
    "weight",
    "limit",
    "paused",
]


class Unset(_Request):
    """Undo what was set live: `setting`, `client` and `gpu` None mean all."""

    ask: Literal["unset"] = "unset"
    setting: SettingName | None = None
    client: ClientName | None = None
    gpu: GpuName | None = None


class Pause(_Request):
    """Grant this client nothing more."""

    ask: Literal["pause"] = "pause"
    client: ClientName


class Resume(_Request):
    """End a pause."""

    ask: Literal["resume"] = "resume"
    client: ClientName


Request = (
    Ping
    | Status
    | SetQuantum
    | SetPolicy
    | SetSharing
    | SetPriority
    | SetWeight
    | SetLimit
    | SetHostBudget
    | SetSwitchShare
    | Unset
    | Pause
    | Resume
)
_REQUEST: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="ask")])


def encode_request(request: Request) -> bytes:
    """The caller's side."""
    packed: bytes = msgpack.packb({"version": CONTROL_VERSION, **request.model_dump()})
    return packed


def decode_request(frame: bytes) -> Request:
    """The coordinator's side.  Raises ControlError for anything that is no request."""
    try:
        content = msgpack.unpackb(frame, strict_map_key=True, max_map_len=16, max_array_len=16)
    except Exception:  # msgpack raises many kinds
        raise ControlError("malformed", "not msgpack") from None
    if not isinstance(content, dict):
        raise ControlError("malformed", "not a map")
    version = content.pop("version", None)
    if version != CONTROL_VERSION:
        text = f"this coordinator speaks control protocol {CONTROL_VERSION}; use the nvshare-ctl of the same version"
        raise ControlError("version", text)
    try:
        return _REQUEST.validate_python(content)
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise ControlError("malformed", f"{where}: {detail['msg']}"[:500]) from None


def encode_result(result: Any) -> bytes:
    """The answer to a request that was carried out."""
    return _packed({"version": CONTROL_VERSION, "result": result})


def encode_error(error: ControlError) -> bytes:
    """The answer to one that was not."""
    packed: bytes = msgpack.packb({"version": CONTROL_VERSION, "error": {"code": error.code, "text": error.text}})
    return packed


def decode_reply(frame: bytes) -> Any:
    """The result.  Raises ControlError with what the coordinator says."""
    content = msgpack.unpackb(frame)
    if not isinstance(content, dict) or content.get("version") != CONTROL_VERSION:
        raise ControlError("version", "the coordinator is of another version; use its nvshare-ctl")
    if "error" in content:
        raise ControlError(str(content["error"]["code"]), str(content["error"]["text"]))
    return content["result"]


def encode_event(sequence: int, at_ns: int, kind: str, values: Mapping[str, Any]) -> bytes:
    """One frame of the event stream."""
    return _packed({"seq": sequence, "at_ns": at_ns, "kind": kind, **values})


def _packed(content: dict[str, Any]) -> bytes:
    """Sums have no bound, msgpack's integers have one: a sum beyond 64 bits is sent as the largest of them."""
    try:
        packed: bytes = msgpack.packb(content)
    except OverflowError:
        packed = msgpack.packb(_saturated(content))
    return packed


def _saturated(value: Any) -> Any:
    if isinstance(value, int):
        return max(-U64_MAX // 2, min(value, U64_MAX))
    if isinstance(value, dict):
        return {key: _saturated(each) for key, each in value.items()}
    return [_saturated(each) for each in value] if isinstance(value, (list, tuple)) else value


def decode_event(frame: bytes) -> dict[str, Any]:
    """What `encode_event` made."""
    content = msgpack.unpackb(frame)
    if not isinstance(content, dict):
        raise ControlError("malformed", "an event that is no map")
    return content
