"""Every setting, declared once: its kind of value with unit and bounds, its default, its scope and its help.

A field of `Settings` made with `setting` is a setting of the node, and perhaps of single GPUs; `_OF_CLIENT` has the
settings of programs.  From the declaration follow the flag of `nvshare-coordinator`, the variable `NVSHARE_NAME`, the
key of the file (daemon/settings_file.py), the sample file, `nvshare-ctl set` (cli/ctl_settings.py), what lasts over a
restart (daemon/control/live_settings.py), the engine's event `Set` (engine/operator_commands.py), the reference page
and the chart's schema (tests/docs/generated.py).  Other fields are the engine's own figures.

The records never change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from nvshare.coordinator.protocol.messages import MAX_WEIGHT, Sharing
from nvshare.coordinator.units import (
    QUANTUM_BOUNDS_NS,
    SHARE_BOUNDS,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_duration_or_never,
    parse_part,
    parse_quantum,
    parse_share,
    parse_size,
)
from nvshare.scheduler_policies.api import JobClass

MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
RECONNECT_NS: Final = SECOND_NS
"""After a start, clients of an earlier coordinator connect again within this time."""
I32_MIN: Final = -(1 << 31)
I32_MAX: Final = (1 << 31) - 1

Value = int | float | str | bool | None
"""A value as in an event, a request and a file of live settings: a choice by its word."""


class OverdueAction(enum.Enum):
    """The action on a client whose drain passes its deadline.  Other clients run beside it in any case."""

    NOTHING = "nothing"
    DEMOTE = "demote"
    """It runs only when nobody else waits, until it gives a lease back in time."""
    KILL = "kill"


# --- kinds of values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The values of a setting, and how they are written."""

    of: type
    """Python's type of a value."""
    parse: Callable[[str], Any] = str
    """Raises ValueError, with the accepted forms."""
    shown: Callable[[Any], str] = str
    low: float = 0
    high: float | None = None
    """Bounds of a number, or of the length of a text."""
    words: tuple[str, ...] = ()
    """All values of a choice."""
    choice: type[enum.Enum] | None = None
    """The engine's form of the words."""
    none: str = ""
    """The word for None, if that is a value."""
    bare: bool = False
    """A whole number needs no quotes in a file."""
    sample: str = ""
    """Accepted forms, for a value that lacks its quotes."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the chart's value."""

    def read(self, raw: object) -> Value:
        """The value of a text, a TOML number or a TOML boolean.  Raises ValueError."""
        if not self.quoted or (self.bare and type(raw) is int):
            raw = str(raw).lower()
        if isinstance(raw, str):
            value: Value = self.parse(raw)
            self.check(value)
            return value
        raise ValueError(f"{raw!r} is not text: write it in quotes, such as {self.sample}")

    def check(self, value: Any) -> None:
        """Raises ValueError for what is no value of this kind."""
        if value is None and self.none:
            return
        if type(value) is not self.of and not (self.of is float and type(value) is int):
            raise ValueError(f"{value!r:.40} is not of the type {self.of.__name__}")
        if self.words and value not in self.words:
            raise ValueError(f"{value!r:.40} is none of {', '.join(self.words)}")
        measure: Any = len(value) if isinstance(value, str) else value
        shown = str if isinstance(value, str) else self.shown
        if measure < self.low or (self.high is not None and measure > self.high) or measure != measure:
            bounds = f"at least {shown(self.low)}" if self.high is None else f"{shown(self.low)} to {shown(self.high)}"
            unit = " characters" if isinstance(value, str) else ""
            raise ValueError(f"{self.shown(value)!r:.40} is out of range: {bounds}{unit}")

    @property
    def quoted(self) -> bool:
        """A file has its values in quotes."""
        return self.schema.get("type") not in ("integer", "boolean")

    @property
    def forms(self) -> str:
        """The accepted forms, for help."""
        return ", ".join(map(self.show, self.words)) or self.sample.replace('"', "")

    def show(self, value: Value) -> str:
        """The value for people, as a file or command has it."""
        return self.none if value is None else self.shown(value)

    def typed(self, value: Value) -> Any:
        """The engine's form of a value."""
        return value if self.choice is None else self.choice[str(value).upper()]

    def plain(self, typed: Any) -> Value:
        """The opposite of `typed`."""
        value: Value = typed.name.lower() if isinstance(typed, enum.Enum) else typed
        return value


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


def _choice(*words: str, choice: type[enum.Enum] | None = None) -> Kind:
    return Kind(of=str, parse=str.lower, words=words, choice=choice, sample=f'"{words[0]}"', schema={"enum": [*words]})


def _whole(low: int, high: int | None = None) -> Kind:
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Kind(of=int, parse=_parse_whole, low=low, high=high, schema={"type": "integer", **bounds})


def _parse_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def _parse_positive_size(text: str) -> int:
    if (size := parse_size(text)) <= 0:
        raise ValueError("must be more than 0")
    return size


DURATION: Final = Kind(
    of=int, parse=parse_duration, shown=format_duration, low=1, sample='"100ms"', schema=_ref("duration")
)
DURATION_OR_NEVER: Final = replace(
    DURATION, parse=parse_duration_or_never, shown=lambda ns: format_duration(ns) if ns else "0", low=0, bare=True,
    sample='"100ms" or "0"', schema=_ref("durationOrNever"),
)  # fmt: skip
OWN_OR_COMMON: Final = replace(
    DURATION_OR_NEVER, parse=lambda text: None if text == "common" else parse_duration_or_never(text), none="common",
    sample='"10m", "0" or "common"', schema=_ref("durationOrCommon"),
)  # fmt: skip
QUANTUM: Final = Kind(
    of=int, parse=parse_quantum, shown=format_duration, none="auto", low=QUANTUM_BOUNDS_NS[0],
    high=QUANTUM_BOUNDS_NS[1], sample='"100ms" or "auto"', schema=_ref("quantum"),
)  # fmt: skip
SIZE: Final = Kind(
    of=int, parse=_parse_positive_size, shown=format_size, low=1, high=1 << 60, bare=True, sample='"4GiB"',
    schema=_ref("size"),
)  # fmt: skip
LIMIT: Final = replace(SIZE, parse=parse_size, shown=lambda size: format_size(size) if size else "none", low=0)
SHARE: Final = Kind(
    of=float, parse=parse_share, shown=format_share, low=SHARE_BOUNDS[0], high=SHARE_BOUNDS[1], sample='"5%"',
    schema={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$"},
)  # fmt: skip
PART: Final = Kind(of=float, parse=parse_part, shown=format_share, low=0.0, high=1.0)
FLAG: Final = Kind(of=bool, parse=_parse_flag, shown=lambda flag: str(flag).lower(), schema={"type": "boolean"})
TEXT: Final = Kind(of=str, low=1, sample='"text"', schema={"type": "string", "minLength": 1})
POLICY: Final = replace(TEXT, high=63, sample='"auto"', schema={"type": "string", "minLength": 1, "maxLength": 63})
JOB_CLASS: Final = replace(
    _choice("interactive", "batch", "best_effort", choice=JobClass),
    parse=lambda text: text.replace("-", "_"),
    shown=lambda word: word.replace("_", "-"),
)
PORT: Final = _whole(0, 65_535)


# --- the settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    kind: Kind
    help: str = ""
    """Its meaning, for the reference page and the help of the tools."""
    by_gpu: bool = False
    """Single GPUs, or a client on single GPUs, may have their own value."""
    of_client: bool = False
    chapter: str = ""
    """Heading of the sample file; "": as the setting before."""
    sample: str = ""
    """Value in the sample file, if there is no default that could be written."""
    default_text: str = "none"
    """Of None as the default, for the reference page, where no word means None."""
    reloaded: bool = False
    """SIGHUP applies it, as all settings that `nvshare-ctl` sets."""
    in_chart: bool = True
    live: bool = False
    """`nvshare-ctl set` has it."""
    done: str = ""
    """The message of a change, if it is no usual one."""
    reply: str = ""
    """The value's key in the reply to a change."""
    name: str = ""
    field: str = ""
    """Of the engine's record; with the unit."""
    default: Any = None

    @property
    def is_live(self) -> bool:
        """It may change while programs run."""
        return self.live or self.of_client

    @property
    def default_shown(self) -> str:
        return self.kind.show(self.kind.plain(self.default))


def setting(kind: Kind, default: Any, **declared: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(kind=kind, default=default, **declared)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the node, in the order of the reference page and the sample file."""

    policy: str = setting(
        POLICY, "auto", by_gpu=True, chapter="How a GPU is shared",
        live=True,
        help="Chooses which programs run now and which is next: `auto`, `round_robin`, `priority`, `fair_share`, "
        "`least_attained`, `edf`, or a plug-in",
    )  # fmt: skip
    quantum_ns: int | None = setting(
        QUANTUM, None, by_gpu=True, live=True, sample='"auto"',
        help="How long a turn lasts while others wait; `auto` follows the measured cost of switching",
    )  # fmt: skip
    switch_share: float = setting(
        SHARE, 0.05, by_gpu=True, live=True, reply="share",
        help='With `quantum = "auto"`: the share of time that switching may cost',
        done="switching may cost {value} on {gpus}",
    )  # fmt: skip
    longest_wait_ns: int = setting(
        DURATION, 5 * SECOND_NS,
        help='With `quantum = "auto"`: the turns of the others last no longer together, unless switching would then '
        "cost more than a fifth of the time. Moves of memory come on top. Read at the start",
    )  # fmt: skip
    sharing: Sharing = setting(  # noqa: RUF009 (a field)
        _choice("auto", "exclusive", "concurrent", choice=Sharing), Sharing.AUTO, by_gpu=True, live=True,
        help="`auto`: as the policy plans; `exclusive`: one lease at a time; `concurrent`: all programs at once while "
        "their memory fits together, in turns otherwise",
    )  # fmt: skip
    mps: str = setting(
        _choice("off", "same_user"), "off",
        help="`same_user`: the programs of one user run as clients of MPS; a fault of one ends the others. Read "
        "at the start",
    )  # fmt: skip
    share_by: str = setting(
        _choice("user", "program"), "user", chapter="Users",
        help="Time is divided between users first (`user`), or between programs (`program`)",
    )  # fmt: skip
    max_priority: int = setting(
        _whole(I32_MIN, I32_MAX), 0, reloaded=True,
        help="Highest `--priority` of a user's program. Root and the coordinator's own user have no bound; Kubernetes "
        "slots have annotations",
    )  # fmt: skip
    max_weight: int = setting(_whole(1, MAX_WEIGHT), 100, reloaded=True, help="The same for `--weight`")
    hide_other_users: bool = setting(
        FLAG, False, reloaded=True,
        help="`nvshare-ctl` hides names and process ids of other users' programs, except from root and the "
        "coordinator's own user; the web page and the metrics show no names at all",
    )  # fmt: skip
    capacity_bytes: int | None = setting(
        SIZE, None, by_gpu=True, sample='"20GiB"', default_text="most of the card's",
        chapter="Memory; the defaults are the card's own, and 3/4 of the machine's or container's",
        help="Bytes of each GPU that all programs together may have resident. By default all but what CUDA contexts "
        "need: 1/32 of the card's memory, from 512 MiB to 3 GiB. A context needs 0.2 to 0.6 GiB",
    )  # fmt: skip
    host_budget_bytes: int | None = setting(
        SIZE, None, live=True, sample='"64GiB"', default_text="3/4 of memory",
        help="Pinned host memory for evicted data of all programs; by default 3/4 of the machine's or container's",
        done="host budget is {value}; {used} of it are in use{more}",
    )  # fmt: skip
    drain_deadline_ns: int = setting(
        DURATION, 10 * SECOND_NS, chapter="Slow and lost programs",
        help="How long submitted work may take to end after a revoke. What takes longer than a quantum is a debt of "
        "the program's user or slot: while others want the GPU, its programs wait until each other user could have "
        "had as much time. A stopped program has about a second instead, while `overdue_action` is `nothing`",
    )  # fmt: skip
    overdue_action: OverdueAction = setting(  # noqa: RUF009 (a field)
        _choice("nothing", "demote", "kill", choice=OverdueAction), OverdueAction.NOTHING,
        help="What happens to a program that exceeds `drain_deadline`: `nothing`, `demote`, `kill`. The others "
        "continue in any case, if memory allows",
    )  # fmt: skip
    pacing_budget_ns: int = setting(
        DURATION_OR_NEVER, 10 * MILLISECOND_NS,
        help="GPU time that a program may have submitted and unfinished. A program alone on its GPU is bounded "
        "loosely; 0: every program is bounded loosely, at 10 ms",
    )  # fmt: skip
    idle_release_ns: int = setting(
        DURATION_OR_NEVER, 2 * MILLISECOND_NS,
        help="An idle holder returns the lease after this time while others wait, and a gang member after eight times "
        "this; 0: never",
    )  # fmt: skip
    park_after_ns: int = setting(
        DURATION_OR_NEVER, 0, live=True,
        help="A program in mode `swap` that has not used its GPUs for this time leaves them altogether, contexts "
        "included, and comes back at its next call; 0: never. A program's own time (`--park-after`) comes first, "
        "then that of its class, if it has one. Needs NVIDIA's driver 570",
    )  # fmt: skip
    park_after_interactive_ns: int | None = setting(
        OWN_OR_COMMON, None, live=True,
        help="`park_after` of programs of class interactive; `common`: the value of `park_after`",
    )  # fmt: skip
    park_after_best_effort_ns: int | None = setting(
        OWN_OR_COMMON, None, live=True, help="The same for programs of class best-effort"
    )  # fmt: skip
    rebalance: bool = setting(
        FLAG, False, live=True, in_chart=False,
        help="A program in mode `swap` whose GPU is busy with others moves to an idle one of the same model, when it "
        "would lose more of the next minute than the move takes. Needs what `park_after` needs, and driver 580",
    )  # fmt: skip
    recovery_ns: int = setting(
        DURATION, 5 * SECOND_NS, help="After a restart: the longest wait for the earlier holder while it runs"
    )
    hello_timeout_ns: int = setting(
        DURATION, 10 * SECOND_NS, chapter="Connections", help="A connection that sends nothing for so long is closed"
    )
    max_clients: int = setting(
        _whole(1, 65_536),
        1024,
        help="Connected programs",
    )
    max_messages_per_s: int = setting(
        _whole(100), 20_000,
        help="Messages of all programs of one user or slot; beyond that, the connections that send the most are closed",
    )  # fmt: skip
    metrics_port: int | None = setting(
        PORT, None, sample="9400", in_chart=False, help="Port of the Prometheus metrics over HTTP",
        chapter="Metrics for Prometheus; without a port there are none",
    )  # fmt: skip
    metrics_address: str = setting(
        TEXT,
        "127.0.0.1",
        in_chart=False,
        help="Address of the metrics",
    )
    metrics_tls_dir: str | None = setting(
        TEXT, None, sample='"/etc/nvshare/tls"', in_chart=False,
        help="Directory with `tls.crt` and `tls.key`: metrics over HTTPS; a renewed certificate is used at once",
    )  # fmt: skip
    web_port: int | None = setting(
        PORT, None, sample="9401", in_chart=False,
        chapter="The web page on 127.0.0.1; whoever has the token of the file may change settings there",
        help="Port of the web page, on 127.0.0.1; 0 chooses one. Needs the extra `web`. Read at the start",
    )  # fmt: skip
    web_token_file: str | None = setting(
        TEXT, None, sample='"/etc/nvshare/web-token"', in_chart=False,
        help="File with the token that lets the web page change programs; without it the page only shows",
    )  # fmt: skip
    log_level: str = setting(
        _choice("debug", "info", "warning", "error"), "info", chapter="Messages",
        help="`debug`, `info`, `warning`, `error`",
    )  # fmt: skip
    gpu: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """UUID -> the fields in which this GPU differs, and their values."""

    # --- the engine's own ---
    quantum_min_ns: int = 20 * MILLISECOND_NS
    quantum_max_ns: int = 60 * SECOND_NS
    """Bounds of the automatic quantum."""
    silent_ns: int = SECOND_NS
    """A member without a turn that reports no progress for this time leaves the running set."""
    move_deadline_ns: int = 30 * SECOND_NS
    """After this time the next client is granted with the memory that is there."""
    move_stall_ns: int = 5 * SECOND_NS
    """An order without a report for this time has stalled."""
    host_fair_times: int = 8
    """An owner may have at most this many times what is left for others; 0: there are no others."""
    check_invariants: bool = False
    """Checks all invariants after each event, O(clients): for tests.  Otherwise a cheap subset."""
    event_log_length: int = 4096

    def park_after_of_ns(self, job_class: JobClass) -> int:
        """Idleness after which programs of a class are parked, unless they have their own time; 0: never."""
        own = {
            JobClass.INTERACTIVE: self.park_after_interactive_ns,
            JobClass.BEST_EFFORT: self.park_after_best_effort_ns,
        }.get(job_class)
        return self.park_after_ns if own is None else own

    @property
    def parks(self) -> bool:
        """Programs of some class may be parked by themselves."""
        return bool(self.park_after_ns or self.park_after_interactive_ns or self.park_after_best_effort_ns)

    @property
    def users_first(self) -> bool:
        """Time is divided between users and slots, then between the programs of each."""
        return self.share_by == "user"


def declared(record: type) -> dict[str, Setting]:
    """The settings of a record by their names, which have no units."""
    found = {}
    for each in fields(record):
        if "setting" in each.metadata:
            name = each.name.removesuffix("_ns").removesuffix("_bytes")
            made: Setting = each.metadata["setting"]
            found[name] = replace(made, name=name, field=each.name, reply=made.reply or each.name)
    return found


_OF_CLIENT: Final = (
    Setting(
        name="priority", field="priority", kind=_whole(I32_MIN, I32_MAX), default=0, live=True,
        help="Higher runs first, under the policy priority", done="{client} has priority {value}",
    ),
    Setting(
        name="weight", field="weight", kind=_whole(1, MAX_WEIGHT), default=1, live=True,
        help="Share of time under the policy fair_share, from 1 to 10000", done="{client} has weight {value}",
    ),
    Setting(
        name="class", field="job_class", reply="class", kind=JOB_CLASS, default="batch", live=True,
        help="What a client is for, under the policy auto", done="{client} is {value}",
    ),
    Setting(name="share_request", field="share_request", kind=PART, default=0.0),
    Setting(name="share_limit", field="share_limit", kind=PART, default=1.0),
    Setting(
        name="limit", field="limit_bytes", kind=LIMIT, default=0, by_gpu=True, live=True,
        help="GPU memory that a client may allocate; 0: no limit", done="{client} has {limit} of GPU memory{more}",
    ),
    Setting(name="paused", field="paused", kind=replace(FLAG, shown=lambda flag: "yes"), default=False),
    Setting(name="parked", field="parked", kind=FLAG, default=False),
    Setting(name="moved_to", field="moved_to", kind=TEXT, default=""),
    Setting(name="gang", field="gang", kind=replace(TEXT, low=0), default=""),
)  # fmt: skip

CONFIGURED: Final = declared(Settings)
"""By the key of the file."""
SETTINGS: Final = CONFIGURED | {
    each.name: replace(each, of_client=True, reply=each.reply or each.field) for each in _OF_CLIENT
}
