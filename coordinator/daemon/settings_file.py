"""The coordinator's settings: read from a file, the environment and flags, and validated once.

Invariants: flags take precedence over environment, file and defaults, in this order.  All mistakes are reported at
once, each with its source (file and key, variable, flag).  An unknown key is a mistake, reported with the nearest
known name.  The result is frozen, in integer nanoseconds and bytes.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nvshare.coordinator.daemon.control.api import I32_MAX, I32_MIN
from nvshare.coordinator.model.settings import OverdueAction
from nvshare.coordinator.protocol.messages import MAX_WEIGHT, Sharing
from nvshare.coordinator.units import parse_duration, parse_duration_or_never, parse_quantum, parse_share, parse_size
from nvshare.scheduler_policies import registry


class SettingsError(Exception):
    """Faulty settings; the text has one line for each mistake."""


def _text(value: object, parse: Any) -> Any:
    if isinstance(value, str):
        return parse(value)
    raise ValueError(f"{value!r} is not text: write it in quotes, such as {_EXAMPLES[parse]}")


def _duration_or_never(value: object) -> int:
    bare_zero = value == 0 and not isinstance(value, bool)
    return 0 if bare_zero else int(_text(value, parse_duration_or_never))


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return _positive(_text(value, parse_size))


def _positive(value: int) -> int:
    if value <= 0:
        raise ValueError("must be more than 0")
    return value


def _sharing(value: object) -> Sharing:
    names = {member.name.lower(): member for member in Sharing}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    raise ValueError(f"{value!r} is none of auto, exclusive, concurrent")


def _offered(name: str) -> str:
    if name not in (known := registry.offers()):
        raise ValueError(f"no policy {name!r}; known: {', '.join(known)}")
    return name


def _overdue(value: object) -> OverdueAction:
    try:
        return OverdueAction(value)
    except ValueError:
        raise ValueError(f"{value!r} is none of nothing, demote, kill") from None


_EXAMPLES: Final[dict[Any, str]] = {
    parse_duration: '"100ms"',
    parse_duration_or_never: '"100ms" or "0"',
    parse_quantum: '"100ms" or "auto"',
    parse_share: '"5%"',
    parse_size: '"4GiB"',
}
Duration = Annotated[int, BeforeValidator(lambda value: _text(value, parse_duration))]
DurationOrNever = Annotated[int, BeforeValidator(_duration_or_never)]
Quantum = Annotated[int | None, BeforeValidator(lambda value: _text(value, parse_quantum))]
Size = Annotated[int, BeforeValidator(_size)]
Share = Annotated[float, BeforeValidator(lambda value: _text(value, parse_share))]
SharingName = Annotated[Sharing, BeforeValidator(_sharing)]
OverdueName = Annotated[OverdueAction, BeforeValidator(_overdue)]
LogLevel = Annotated[str, Field(pattern="^(debug|info|warning|error)$")]
ShareBy = Literal["user", "program"]
PolicyName = Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_offered)]

_FROZEN: Final = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=False)


class GpuOverride(BaseModel):
    """Settings of one GPU; None means the value for all GPUs."""

    model_config = _FROZEN

    policy: PolicyName | None = None
    quantum_ns: Annotated[int | None, BeforeValidator(lambda value: _text(value, parse_quantum))] = Field(
        default=None, alias="quantum"
    )
    sharing: SharingName | None = None
    capacity_bytes: Size | None = Field(default=None, alias="capacity")

    @property
    def sets_quantum(self) -> bool:
        """Whether a quantum is set here: None may also mean `auto`."""
        return "quantum_ns" in self.model_fields_set


class Settings(BaseModel):
    """All settings.  The alias is the key in a file; the variable is NVSHARE_ and the key in capitals.

    The reference page has these texts: `python -m tests.docs.generated` after a change.
    """

    model_config = _FROZEN

    policy: PolicyName = "auto"
    """Chooses which programs run now and which is next."""
    quantum_ns: Quantum = Field(default=None, alias="quantum")
    """How long a turn lasts while others wait; `auto` follows the measured cost of switching."""
    sharing: SharingName = Sharing.AUTO
    """`auto`: as the policy plans; `exclusive`: one lease at a time; `concurrent`: all programs at once while their
    memory fits together, in turns otherwise."""
    capacity_bytes: Size | None = Field(default=None, alias="capacity")
    """Bytes of each GPU that all programs together may have resident. By default all but what CUDA contexts need:
    1/32 of the card's memory, from 512 MiB to 3 GiB. A context needs 0.2 to 0.6 GiB."""
    switch_share: Share = 0.05
    """With `quantum = "auto"`: the share of time that switching may cost."""
    longest_wait_ns: Duration = Field(default=5_000_000_000, alias="longest_wait")
    """With `quantum = "auto"`: turns are short enough for this wait, unless switching would then cost more than a
    fifth of the time. Read at the start."""
    host_budget_bytes: Size | None = Field(default=None, alias="host_budget")
    """Pinned host memory for evicted data of all programs; by default 3/4 of the machine's or container's."""
    drain_deadline_ns: Duration = Field(default=10_000_000_000, alias="drain_deadline")
    """How long submitted work may take to end after a revoke.  What takes longer than a quantum is a debt of the
    program's user or slot: while others want the GPU, its programs wait until each other user could have had as much
    time."""
    overdue_action: OverdueName = OverdueAction.NOTHING
    """What happens to a program that exceeds `drain_deadline`: `nothing`, `demote`, `kill`. The others continue in
    any case, if memory allows."""
    pacing_budget_ns: DurationOrNever = Field(default=10_000_000, alias="pacing_budget")
    """GPU time that a program may have submitted and unfinished. A program alone on its GPU is bounded loosely; 0:
    every program is bounded loosely, at 10 ms."""
    idle_release_ns: DurationOrNever = Field(default=2_000_000, alias="idle_release")
    """An idle holder returns the lease after this time while others wait, and a gang member after eight times this;
    0: never."""
    share_by: ShareBy = "user"
    """Time is divided between users first (`user`), or between programs (`program`)."""
    max_priority: int = Field(default=0, ge=I32_MIN, le=I32_MAX)
    """Highest `--priority` of a user's program. Root and the coordinator's own user have no bound; Kubernetes slots
    have annotations."""
    max_weight: int = Field(default=100, ge=1, le=MAX_WEIGHT)
    """The same for `--weight`."""
    hide_other_users: bool = False
    """`nvshare-ctl` hides names and process ids of other users' programs, except from root and the coordinator's own
    user; the web page shows no names at all, nor do metrics without `metrics_token_file`."""
    recovery_ns: Duration = Field(default=5_000_000_000, alias="recovery")
    """After a restart: the longest wait for the earlier holder while it runs."""
    hello_timeout_ns: Duration = Field(default=10_000_000_000, alias="hello_timeout")
    """A connection that sends nothing for so long is closed."""
    max_clients: int = Field(default=1024, ge=1, le=65_536)
    """Connected programs."""
    max_messages_per_s: int = Field(default=20_000, ge=100)
    """Messages of all programs of one user or slot; beyond that, the connections that send the most are closed."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of the Prometheus metrics over HTTP."""
    metrics_address: str = "127.0.0.1"
    """Address of the metrics."""
    web_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of the web page, on 127.0.0.1; 0 chooses one.  Needs the extra `web`.  Read at the start."""
    web_token_file: Path | None = None
    """File with the token that lets the web page change programs; without it the page only shows."""
    metrics_token_file: Path | None = None
    """File with a token: scrapes then need `Authorization: Bearer TOKEN`. Read again at each scrape."""
    metrics_tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key`: metrics over HTTPS; a renewed certificate is used at once."""
    log_level: LogLevel = "info"
    """`debug`, `info`, `warning`, `error`."""
    mps: Literal["off", "same_user"] = "off"
    """`same_user`: programs of one user at a time run as clients of MPS; a fault of one ends the others. Read at
    the start."""
    gpu: dict[str, GpuOverride] = Field(default_factory=dict)


KEYS: Final = {field.alias or name: name for name, field in Settings.model_fields.items()}
"""Name in a file -> name of the field."""

RELOADED: Final = frozenset(
    ("policy", "quantum", "sharing", "switch_share", "host_budget", "max_priority", "max_weight", "hide_other_users")
)
"""A reload applies these, and the same ones of single GPUs."""

_GPU_KEYS: Final = {field.alias or name: name for name, field in GpuOverride.model_fields.items()}


@dataclass(frozen=True, slots=True)
class _Value:
    source: str
    value: object


def load(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """Merges and validates.  `flags` are by file key; None means not given.  Raises SettingsError."""
    env = os.environ if environment is None else environment
    mistakes: list[str] = []
    if file is None and env.get("NVSHARE_CONFIG"):
        file = Path(env["NVSHARE_CONFIG"])
    merged: dict[str, _Value] = {}
    if file is not None:
        merged |= _from_file(file, mistakes)
    merged |= _from_environment(env, mistakes)
    merged |= {key: _Value("--" + key.replace("_", "-"), value) for key, value in flags.items() if value is not None}
    try:
        settings = Settings.model_validate({key: entry.value for key, entry in merged.items()})
    except ValidationError as error:
        mistakes += [_sentence(detail, merged) for detail in error.errors()]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def needs_restart(started: Settings, now: Settings) -> list[str]:
    """Keys whose new values only a restart applies."""
    found = [key for key, name in KEYS.items() if key not in RELOADED and getattr(started, name) != getattr(now, name)]
    of_gpus = [{uuid: own.capacity_bytes for uuid, own in each.gpu.items()} for each in (started, now)]
    return [key for key in found if key != "gpu" or of_gpus[0] != of_gpus[1]]


def _from_file(file: Path, mistakes: list[str]) -> dict[str, _Value]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        mistakes.append(f"{file}: {error.strerror}; give a readable file with --config")
        return {}
    except (ValueError, RecursionError) as error:
        mistakes.append(f"{file}: not TOML: {error}")
        return {}
    found: dict[str, _Value] = {}
    for key, value in content.items():
        if key in KEYS:
            found[key] = _Value(f"{file}: {key}", value)
        else:
            mistakes.append(f"{file}: {key}: no such setting{_hint(key, KEYS)}")
    return found


def _from_environment(env: Mapping[str, str], mistakes: list[str]) -> dict[str, _Value]:
    """Reads the variables of settings.  Others with the prefix may be the clients' and are ignored."""
    variables = {"NVSHARE_" + key.upper(): key for key in KEYS if key != "gpu"}
    found: dict[str, _Value] = {}
    for variable, key in variables.items():
        text = env.get(variable)
        if text and not (variable == "NVSHARE_MPS" and text in ("0", "1")):  # a client's: whether it joined
            found[key] = _Value(variable, int(text) if _is_number(key) and text.strip().isdecimal() else text)
    for variable in env:
        if variable.startswith("NVSHARE_") and variable not in variables:
            near = difflib.get_close_matches(variable, variables, 1, 0.9)
            if near and variable not in _CLIENT_VARIABLES:
                mistakes.append(f"{variable}: no such setting; did you mean {near[0]}?")
    return found


_CLIENT_VARIABLES: Final = frozenset({"NVSHARE_SIMULATE", "NVSHARE_MEMORY", "NVSHARE_LOG", "NVSHARE_LOG_FILE"})


def _is_number(key: str) -> bool:
    return key in ("max_clients", "max_messages_per_s", "max_weight", "metrics_port", "web_port")


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"


def _sentence(detail: Any, merged: Mapping[str, _Value]) -> str:
    path = [str(part) for part in detail["loc"]]
    top = path[0]
    where = merged[top].source if top in merged else top
    inner = [part for part in path[1:] if part not in ("int", "function-before[_size(), int]")]
    text = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        text = f"no such setting{_hint(path[-1], _GPU_KEYS if top == 'gpu' else KEYS)}"
    elif top == "log_level":
        text = "is none of debug, info, warning, error"
    return f"{'.'.join([where, *inner])}: {text}"
