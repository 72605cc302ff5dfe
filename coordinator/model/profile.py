"""The settings of a program, one row each, and the one reader of the words that set them.

A program's profile is a map of words.  `nvshare-run --share-limit 0.3` sets the variable NVSHARE_SHARE_LIMIT, the hook
forwards its variables as text, the annotation nvshare.com/share-limit and the word `share_limit` of a slot hold the
same.  From a row follow the flag, the variable, the annotation, the word of a slot, `nvshare-ctl set`, the hook's list
of variables (client_hook/src/base/profile.gen.h) and the reference page (both by tests/docs/generated.py).

Non-goals: who may set how much (daemon/control/rights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from nvshare.coordinator.kinds import DURATION, LIMIT, PART, TEXT, Kind, Setting, Value, choice_of, whole
from nvshare.coordinator.units import parse_duration
from nvshare.scheduler_policies.api import JobClass, Rank

I32_MIN: Final = -(1 << 31)
I32_MAX: Final = (1 << 31) - 1
MAX_WEIGHT: Final = 10_000

Words = Mapping[str, str]
"""A profile, as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSetting(Setting):
    """One setting of a program.  `name`: of its live setting; "": it has none.  `field`: of the program's `Facts`."""

    word: str
    metavar: str
    """Of the flag of `nvshare-run`."""
    flag: str = ""
    """Its name, if it is not the word."""
    of_hook: bool = False
    """The hook reads the variable itself."""
    within: Callable[[Any, Any], Any] | None = None
    """The value from the slot's (None: not set) and the program's own.  None: slots have no such word."""

    @property
    def option(self) -> str:
        return self.flag or "--" + self.word.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"NVSHARE_{self.word.upper()}"

    @property
    def annotation(self) -> str:
        return "nvshare.com/" + self.word.replace("_", "-")

    def read(self, text: str) -> Any:
        """The engine's form of a text.  Raises ValueError with the accepted forms."""
        try:
            return self.kind.typed(self.kind.read(text))
        except ValueError:
            shown = ascii(text)
            shown = shown if len(shown) <= 64 else shown[:61] + "..."
            raise ValueError(f"{shown} is not allowed: write {self.kind.forms}") from None

    def plain(self, text: str | None) -> Value:
        """The value of a text for JSON, None for none; a choice by its word."""
        return text if text is None or self.kind.words else self.kind.read(text)


def _parse_time(text: str) -> int:
    return parse_duration(f"{text}s" if text.isdecimal() else text)


def _name(most: int) -> Kind:
    def parse(text: str) -> str:
        if not 0 < len(text.encode(errors="surrogateescape")) <= most:
            raise ValueError(text)
        return text

    return replace(TEXT, parse=parse, low=0, sample=f'"a name of 1 to {most} bytes"')


def _slot_decides(default: Any) -> Callable[[Any, Any], Any]:
    """Takes from others, and a container controls its environment."""
    return lambda slot, own: default if slot is None else slot


def _slot_first(slot: Any, own: Any) -> Any:
    return own if slot is None else slot


TIME: Final = replace(DURATION, parse=_parse_time, sample='"90s", "30m" or "2h"')
TIME_OR_NEVER: Final = replace(
    TIME, parse=lambda text: 0 if text == "0" else _parse_time(text), low=0, sample='"10m", "2h", or "0" for never'
)
JOB_CLASS: Final = replace(
    choice_of("interactive", "batch", "best_effort", choice=JobClass),
    parse=lambda text: text.replace("-", "_"),
    shown=lambda word: word.replace("_", "-"),
)
MEMORY_LIMIT: Final = replace(LIMIT, sample='"a size such as 4GiB or 512MiB"')
MEMORY_MODES: Final = ("auto", "swap", "managed", "device")

_ROWS: Final = (
    ProgramSetting(
        word="memory", of_hook=True, kind=choice_of(*MEMORY_MODES), default="auto", metavar="MODE",
        help="kind of device allocations: auto, swap, managed or device; auto: swap where the GPU can, else managed",
    ),
    ProgramSetting(
        word="name", of_hook=True, kind=_name(63), default="", metavar="S",
        help="name shown by tools; by default the script, module or notebook, else the program",
    ),
    ProgramSetting(
        word="priority", name="priority", field="priority", kind=whole(I32_MIN, I32_MAX), default=0, metavar="N",
        live=True, within=_slot_decides(0), done="{client} has priority {value}",
        help="higher runs first, under the policy priority",
    ),
    ProgramSetting(
        word="weight", name="weight", field="weight", kind=whole(1, MAX_WEIGHT), default=1, metavar="N",
        live=True, within=_slot_decides(1), done="{client} has weight {value}",
        help="share of time under the policy fair_share, from 1 to 10000",
    ),
    ProgramSetting(
        word="gang", name="gang", field="gang", kind=_name(253), default="", metavar="NAME", within=_slot_first,
        help="run at the same time as the user's other programs of this gang, each on its GPU",
    ),
    ProgramSetting(
        word="class", name="class", field="job_class", reply="class", kind=JOB_CLASS, default="batch", metavar="CLASS",
        live=True, done="{client} is {value}",
        within=lambda slot, own: own if own is JobClass.BEST_EFFORT else slot or JobClass.BATCH,
        help="batch, interactive (someone waits for it) or best-effort (runs in what others leave)",
    ),
    ProgramSetting(
        word="share_request", name="share_request", field="share_request", kind=PART, default=0.0, metavar="S",
        within=_slot_decides(0.0), help="guaranteed share of the GPU's time: 0.3 or 30%",
    ),
    ProgramSetting(
        word="share_limit", name="share_limit", field="share_limit", kind=replace(PART, low=0.001), default=1.0,
        metavar="S", within=lambda slot, own: own if slot is None else min(slot, own),
        help="largest share of the GPU's time, also when alone: 0.3 or 30%",
    ),
    ProgramSetting(
        word="deadline", field="deadline_ns", kind=TIME, metavar="TIME",
        help="when it should be done, from its start: 90s, 30m, 2h",
    ),
    ProgramSetting(
        word="park_after", field="park_after_ns", kind=TIME_OR_NEVER, default_text="as set for its class",
        metavar="TIME", within=lambda slot, own: slot if own is None else own,
        help="leave the GPU altogether after this time without use of it: 10m, 2h; 0: never",
    ),
    ProgramSetting(
        word="memory_limit", name="limit", field="limit_bytes", kind=MEMORY_LIMIT, default=0, by_gpu=True,
        metavar="SIZE", flag="--gpu-memory-limit", of_hook=True, live=True, within=_slot_first,
        done="{client} has {limit} of GPU memory{more}", help="GPU memory that it may allocate: 4GiB; 0: no limit",
    ),
)  # fmt: skip

PROFILE: Final = {each.word: each for each in _ROWS}


def of_text(text: str) -> dict[str, str]:
    """The words of a hook's text: lines of `word=value`."""
    return {word: value for word, _, value in (line.partition("=") for line in text.split("\n") if line)}


def read(words: Words) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by the fields of `Facts`, and a sentence for each word that cannot be used."""
    values, mistakes = {}, {}
    for word, text in words.items():
        row = PROFILE.get(word)
        if row is None or not row.field:
            mistakes[word] = f"this version of nvshare does not know it; it knows {', '.join(PROFILE)}"
            continue
        try:
            values[row.field] = row.read(text)
        except ValueError as error:
            mistakes[word] = str(error)
    return values, mistakes


def of_slots() -> Iterable[ProgramSetting]:
    """The settings that slots and annotations have."""
    return (row for row in PROFILE.values() if row.within is not None)


_OF_RANK: Final = frozenset(each.name for each in fields(Rank))


@dataclass(frozen=True, slots=True)
class Facts:
    """What is settled of a program: its own words within its user's rights, its slot's word over them, and live
    settings over both.  The shell puts them together (daemon/dispatch.py); the engine has them from `events.Settled`.
    """

    rank: Rank = field(default_factory=Rank)
    limit_bytes: int = 0
    """Memory on each GPU; 0: no limit."""
    limits_of_gpus: tuple[tuple[str, int], ...] = ()
    """UUIDs of GPUs that have another limit, and bytes."""
    gang: str = ""
    """"": none."""
    spatial: bool = False
    """It is a client of MPS."""
    paused: bool = False
    park_after_ns: int | None = None
    """Idleness after which it is parked; 0: never.  None: as its class."""

    def limit_on(self, uuid: str) -> int:
        """Bytes of GPU memory; 0: no limit."""
        return dict(self.limits_of_gpus).get(uuid, self.limit_bytes)

    def having(self, **values: Any) -> Facts:
        """With these values, by the names of the fields here and in `rank`."""
        rank = replace(self.rank, **{name: values.pop(name) for name in _OF_RANK & values.keys()})
        return replace(self, rank=rank, **values)

    def within(self, slot: Words) -> Facts:
        """What holds in a slot for a program of which this holds outside."""
        given, _ = read(slot)
        values = {}
        for row in of_slots():
            own = getattr(self.rank if row.field in _OF_RANK else self, row.field)
            values[row.field] = row.within(given.get(row.field), own) if row.within else own
        return self.having(**values)
