"""The control protocol: the requests of nvshare-ctl, declared once for both ends.

A request is one msgpack map: `version`, `ask` (the request's name) and its fields.  A reply is one map: `version`, and
either `result` or `error` {`code`, `text`}.  A trace event is one map: `seq` (counts all events, so that a reader can
detect losses), `at_ns` (CLOCK_MONOTONIC), `kind`, and the values of that kind.

Invariants: both ends check the version first.  Unknown requests and fields are refused with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from nvshare.coordinator.kinds import Value
from nvshare.coordinator.model.settings import SETTINGS
from nvshare.coordinator.protocol.messages import MAX_GPUS_PER_CLIENT, MOST_BYTES
from nvshare.scheduler_policies.api import JobClass

CONTROL_VERSION: Final = 2
MAX_REQUEST_BYTES: Final = 4096

ClientName = Annotated[str, Field(min_length=1, max_length=63)]
GpuName = Annotated[str, Field(min_length=1, max_length=95)]


def _printable(text: str) -> str:
    if not text.isprintable() or len(text.encode()) > 63:
        raise ValueError("has more than 63 bytes, or a control character")
    return text


ShownName = Annotated[str, AfterValidator(_printable)]
GpuNames = Annotated[str, Field(max_length=3500)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]
PositivePart = Annotated[float, Field(gt=0.0, le=1.0)]
U64_MAX: Final = (1 << 64) - 1
T = TypeVar("T")


class ControlError(Exception):
    """A refused request.  `code` is stable, for programs; the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def is_named(name: str, client: int, process_id: int, own_name: str) -> bool:
    """Whether CLIENT of a command is this program's id (`c12`), its process id, or its name, if CLIENT is no id."""
    if re.fullmatch("c[0-9]+", name):
        return name == f"c{client}"
    return name == (str(process_id) if re.fullmatch("[0-9]+", name) else own_name)


def the_only(name: str, found: list[T], described: Callable[[T], str]) -> T:
    """The program that CLIENT names.  Raises ControlError unless there is exactly one."""
    if len(found) == 1:
        return found[0]
    if not found:
        raise ControlError("client", f"no client {name!r}; see `nvshare-ctl clients`")
    which = ", ".join(map(described, found[:20]))
    raise ControlError("ambiguous", f"{name!r} matches {len(found)} clients; use the id of one: {which}")


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Ping(_Request):
    """Process id and facts of the coordinator."""

    ask: Literal["ping"] = "ping"


class Status(_Request):
    """State of the GPUs and optionally their clients."""

    ask: Literal["status"] = "status"
    clients: bool = True


class Set(_Request):
    """Changes a setting of `SETTINGS`.

    `client` is a client id, a process id or a name; None for a setting of the node.  `gpu` (UUID or index) None means
    all GPUs.
    """

    ask: Literal["set"] = "set"
    setting: str
    value: Value
    client: ClientName | None = None
    gpu: GpuName | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        setting = SETTINGS.get(self.setting)
        if setting is None or not setting.live:
            raise ValueError(f"{self.setting!r:.40} is no setting")
        if setting.of_client != (self.client is not None) or (self.gpu is not None and not setting.by_gpu):
            raise ValueError(f"{self.setting} belongs to {'a client' if setting.of_client else 'the node'}")
        try:
            setting.kind.check(self.value)
        except ValueError as error:
            raise ValueError(f"{self.setting}: {error}") from None
        return self


class SetShare(_Request):
    """Sets a client's guaranteed and greatest share of the time; None leaves a value as it is."""

    ask: Literal["set_share"] = "set_share"
    client: ClientName
    request: Part | None = None
    limit: PositivePart | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.request is None and self.limit is None:
            raise ValueError("give a request or a limit")
        if self.request is not None and self.limit is not None and self.request > self.limit:
            raise ValueError("the request is above the limit")
        return self


class Unset(_Request):
    """Removes live settings.  `setting`, `client` and `gpu` None mean all; `share` means its request and its limit."""

    ask: Literal["unset"] = "unset"
    setting: str | None = None
    client: ClientName | None = None
    gpu: GpuName | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.setting not in (None, "share", *SETTINGS):
            raise ValueError(f"{self.setting!r:.40} is no setting")
        return self


class Pause(_Request):
    """Stops granting leases to a client."""

    ask: Literal["pause"] = "pause"
    client: ClientName


class Resume(_Request):
    """Ends a pause."""

    ask: Literal["resume"] = "resume"
    client: ClientName


class ParkClient(_Request):
    """Takes an idle client off its GPUs, or wakes it."""

    ask: Literal["park"] = "park"
    client: ClientName
    parked: bool = True


class EndClient(_Request):
    """Ends a client's process by SIGTERM, or by SIGKILL."""

    ask: Literal["end"] = "end"
    client: ClientName
    kill: bool = False


class Place(_Request):
    """Chooses GPUs for the calling process, which becomes the program.

    `gpus` are those that it names, separated by commas; else `count` are chosen among those of `visible`, its
    CUDA_VISIBLE_DEVICES.  `fastest_first`: the indices in it are in CUDA's default order.  `within` is the placement
    (model/placement.py) of the process itself, if it has one.
    """

    ask: Literal["place"] = "place"
    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_CLIENT)] = 1
    gpus: GpuNames = ""
    visible: GpuNames | None = None
    fastest_first: bool = True
    memory_bytes: Annotated[int, Field(ge=0, le=MOST_BYTES)] = 0
    """The most that it will allocate on a GPU; 0: unknown."""
    job_class: Annotated[int, Field(ge=0, le=max(JobClass))] = JobClass.BATCH
    name: ShownName
    beside: ShownName = ""
    apart: ShownName = ""
    alone: bool = False
    within: Annotated[str, Field(max_length=255)] = ""


class MigrateClient(_Request):
    """Moves a client to another GPU."""

    ask: Literal["migrate"] = "migrate"
    client: ClientName
    gpu: GpuName


Request = Ping | Status | Set | SetShare | Unset | Pause | Resume | ParkClient | MigrateClient | EndClient | Place
_REQUEST: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="ask")])


def encode_request(request: Request) -> bytes:
    """One request frame."""
    packed: bytes = msgpack.packb({"version": CONTROL_VERSION, **request.model_dump()})
    return packed


def decode_request(frame: bytes) -> Request:
    """The request in a frame.  Raises ControlError for a malformed one."""
    try:
        content = msgpack.unpackb(frame, strict_map_key=True, max_map_len=16, max_array_len=16)
    except Exception:  # msgpack raises exceptions of many types
        raise ControlError("malformed", "not msgpack") from None
    if not isinstance(content, dict) or any(isinstance(value, (dict, list)) for value in content.values()):
        raise ControlError("malformed", "not a map of plain values")
    version = content.pop("version", None)
    if version != CONTROL_VERSION:
        text = f"this coordinator speaks control protocol {CONTROL_VERSION}; use the nvshare-ctl of the same version"
        raise ControlError("version", text)
    try:
        return _REQUEST.validate_python(content)
    except ValidationError as error:
        raise ControlError("malformed", problem(error)[:500]) from None


def problem(error: ValueError) -> str:
    """What is wrong with a request, in words."""
    if not isinstance(error, ValidationError):
        return str(error)
    said = (
        f"{'.'.join(map(str, d['loc']))}: {_PROBLEMS.get(d['type'], 'is of another type').format(**d.get('ctx', {}))}"
        for d in error.errors(include_input=False, include_url=False)
    )
    return "; ".join(said).removeprefix(": ")


_PROBLEMS: Final = {
    "value_error": "{error}", "missing": "is missing", "extra_forbidden": "is unknown", "string_too_short": "is empty",
    "string_too_long": "has more than {max_length} characters", "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}", "less_than_equal": "must be at most {le}",
    "union_tag_invalid": "unknown request {tag}", "union_tag_not_found": "no request",
}  # fmt: skip


def encode_result(result: Any) -> bytes:
    """The reply to a successful request."""
    return _packed({"version": CONTROL_VERSION, "result": result})


def encode_error(error: ControlError) -> bytes:
    """The reply to a refused request."""
    packed: bytes = msgpack.packb({"version": CONTROL_VERSION, "error": {"code": error.code, "text": error.text}})
    return packed


def decode_reply(frame: bytes) -> Any:
    """The result in a reply.  Raises ControlError for an error reply."""
    content = msgpack.unpackb(frame)
    if not isinstance(content, dict) or content.get("version") != CONTROL_VERSION:
        raise ControlError("version", "the coordinator has another version; use its nvshare-ctl")
    if "error" in content:
        raise ControlError(str(content["error"]["code"]), str(content["error"]["text"]))
    return content["result"]


def encode_event(sequence: int, at_ns: int, kind: str, values: Mapping[str, Any]) -> bytes:
    """One frame of the event stream."""
    return _packed({"seq": sequence, "at_ns": at_ns, "kind": kind, **values})


def _packed(content: dict[str, Any]) -> bytes:
    """Packs a map.  An integer beyond msgpack's 64 bits, such as a sum, is sent as the largest value."""
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
    """The event in a frame of `encode_event`.  Raises ControlError."""
    content = msgpack.unpackb(frame)
    if not isinstance(content, dict):
        raise ControlError("malformed", "not a map")
    return content
