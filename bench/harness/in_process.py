"""The hook's cost within one process: turns through the hook's wrappers against turns past them.

Two processes differ by 1 to 20 % for as long as they live (bench/README.md), so half a percent cannot be seen between
them.  Here a program under the hook is told to go `by hook` or `by direct` (in_process.c writes addresses into the
tables of whatever calls the driver) and does the same steps in many short turns: hooked, direct, direct, hooked, in the
next block the other way round.  There are two ways of comparing the turns; used is the one that scatters less.

What the hook costs differs from process to process too, by where things lie in its memory: several can be asked.

Invariants: a figure is given only when the switch is proved, else a reason: words were found and written, and in direct
turns the hook counted fewer gated calls (`bypassed`: what share of a step's calls went past the gate).  Intervals are
drawn from whole processes, and in them from whole blocks, because turns of one are alike.  `control` compares the two
direct turns of a block in the same way: it has to be zero within its own interval.

Non-goals: what a program does; comparing processes without the hook with others under it (worker_group.py).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nvshare.bench.compatibility.cases.switch import LIBRARY
from nvshare.bench.harness.fixture import PROGRAMS, compile_program
from nvshare.bench.harness.worker_group import Member, nanoseconds, pinned, quiet, steps_for

TURN_S: Final = 0.01
BLOCKS_MIN: Final = 8
TRIMMED: Final = 0.25
"""Share of the blocks at either end that does not count: disturbances are rare, and large."""

DRAWS: Final = 1000
BYPASSED_MIN: Final = 0.5
"""With less of the calls bypassed the comparison says little, and is not made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a comparison."""

    seconds: float
    """The time of all turns of a process together."""
    core: int | None = None
    """The processor on which the program is to run."""
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """Nanoseconds a step of the turns of each kind, in the order in which they ran."""

    hooked: tuple[float, ...]
    direct: tuple[float, ...]


def middle(values: Sequence[float]) -> float:
    """The mean of what is left without the outermost at either end."""
    ordered = sorted(values)
    cut = int(len(ordered) * TRIMMED)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def paired(blocks: Sequence[Block]) -> float:
    """Hooked over direct, by the middle of all blocks: what drifts slowly cancels."""
    return math.exp(middle([math.log(sum(block.hooked) / sum(block.direct)) for block in blocks]))


def quietest(blocks: Sequence[Block]) -> float:
    """The same, by the quietest quarter of turns of each kind: what disturbs now and then is left out."""
    hooked = quiet([one for block in blocks for one in block.hooked])
    return hooked / quiet([one for block in blocks for one in block.direct])


Way = Callable[[Sequence[Block]], float]
WAYS: Final[dict[str, Way]] = {"paired": paired, "quietest": quietest}


def repeats(blocks: Sequence[Block]) -> list[Block]:
    """The second direct turn of each block against the first."""
    return [Block((block.direct[1],), (block.direct[0],)) for block in blocks]


def over(runs: Sequence[Sequence[Block]], way: Way) -> float:
    """The mean of several processes: each has its own luck, and a user meets all of them."""
    return math.exp(sum(math.log(way(blocks)) for blocks in runs) / len(runs))


def interval(name: str, runs: Sequence[Sequence[Block]], way: Way) -> dict[str, float]:
    """A ratio less one, and between what 95 % of those lie that come from as many processes and blocks, drawn anew."""
    chance = random.Random(1)

    def again() -> list[list[Block]]:
        return [chance.choices(blocks, k=len(blocks)) for blocks in chance.choices(runs, k=len(runs))]

    drawn = sorted(over(again(), way) for _ in range(DRAWS))
    edge = round(DRAWS * 0.025)
    told = {name: over(runs, way), f"{name}_min": drawn[edge], f"{name}_max": drawn[-edge - 1]}
    return {key: round(value - 1, 5) for key, value in told.items()}


def best_way(controls: Sequence[Sequence[Block]]) -> str:
    """The way of comparing that scatters least here.  Direct turns alone decide: they know nothing of the hook."""
    told = {name: interval("control", controls, way) for name, way in WAYS.items()}
    return min(told, key=lambda name: told[name]["control_max"] - told[name]["control_min"])


def control_of(blocks: Sequence[Block]) -> list[Block]:
    """In every other pair of blocks it looks the other way: a steady drift cancels, as it does in the blocks."""
    return [
        one if number // 2 % 2 == 0 else Block(one.direct, one.hooked) for number, one in enumerate(repeats(blocks))
    ]


def figures(runs: Sequence[Sequence[Block]]) -> dict[str, Any]:
    """Figures of the blocks of each process: `slowdown` and `control`, each with the ends of its interval; `share` of
    the speed that is left; `of_each` process its own slowdown."""
    controls = [control_of(blocks) for blocks in runs]
    way = best_way(controls)
    slowdown = interval("slowdown", runs, WAYS[way])
    direct = [math.exp(middle([math.log(sum(block.direct) / 2) for block in blocks])) for blocks in runs]
    return {
        **slowdown,
        "share": round(1 / (1 + slowdown["slowdown"]), 5),
        **interval("control", controls, WAYS[way]),
        "way": way,
        "by_way": {name: round(over(runs, one) - 1, 5) for name, one in WAYS.items()},
        "of_each": [round(WAYS[way](blocks) - 1, 5) for blocks in runs],
        "blocks": sum(map(len, runs)),
        "direct_ns": round(sum(direct) / len(direct), 1),
    }


def in_turns(turn: Callable[[int], float], seconds: float) -> list[Block]:
    """Blocks for about so long.  `turn(place)`: nanoseconds a step; 0 and 3 are hooked, 1 and 2 direct."""
    blocks: list[Block] = []
    begin = time.monotonic()
    while len(blocks) < BLOCKS_MIN or time.monotonic() - begin < seconds:
        taken = [0.0] * 4
        for place in (0, 1, 2, 3) if len(blocks) % 2 == 0 else (1, 0, 3, 2):
            taken[place] = turn(place)
        blocks.append(Block((taken[0], taken[3]), (taken[1], taken[2])))
    return blocks


class Failure(Exception):  # noqa: N818 - it is an answer
    """The comparison cannot be made here.  The text says why."""


@dataclass(slots=True)
class Switched:
    """A program whose calls go by the hook or past it, and what the hook counted meanwhile."""

    member: Member
    timeout_s: float
    calls: dict[str, int] = field(default_factory=lambda: {"hook": 0, "direct": 0})
    steps: dict[str, int] = field(default_factory=lambda: {"hook": 0, "direct": 0})
    written: int | None = None

    def forget(self) -> None:
        """Counts anew."""
        self.calls, self.steps = {"hook": 0, "direct": 0}, {"hook": 0, "direct": 0}

    def by(self, which: str) -> dict[str, Any]:
        """Its answer.  Raises Failure."""
        told = self.member.ask(f"by {which}", self.timeout_s)
        if "error" in told:
            raise Failure(told["error"])
        return told

    def turn(self, which: str, name: str, steps: int) -> float:
        """Nanoseconds a step of one turn."""
        begin = self.by(which)
        taken = nanoseconds(self.member, f"time {name} {steps}", self.timeout_s)
        end = self.by(which)  # stays; only counts
        if which == "direct" and begin["changed"]:
            self.written = min(begin["changed"], begin["changed"] if self.written is None else self.written)
        self.calls[which] += end["calls"] - begin["calls"]
        self.steps[which] += steps
        return taken / steps

    def proof(self) -> dict[str, Any]:
        """Proof that direct turns were direct.  Raises Failure."""
        if not self.written:
            raise Failure("in one process: no address was switched")
        if self.calls["hook"] <= 0:
            raise Failure("in one process: no call passed the gate in the hooked turns either")
        hooked, direct = (self.calls[which] / self.steps[which] for which in ("hook", "direct"))
        bypassed = 1 - direct / hooked
        if bypassed < BYPASSED_MIN:
            raise Failure(f"in one process: only {100 * bypassed:.0f} % of the calls could be led past the hook")
        return {"calls_per_step": round(hooked, 2), "bypassed": round(bypassed, 4), "switched": self.written}


@dataclass(frozen=True, slots=True)
class Taken:
    """Measurements of one process."""

    blocks: list[Block]
    proof: dict[str, Any]
    """Proof of the switch, see Switched.proof."""


def take(member: Member, name: str, plan: Plan, *, pools: bool) -> Taken:
    """One process in its turns.  Raises Failure."""
    steps = steps_for(member, name, TURN_S, plan.timeout_s)
    switch = Switched(member, plan.timeout_s)
    found = switch.by("look-pools" if pools else "look")
    try:
        with pinned([member], plan.core):
            for which in ("direct", "hook"):  # what is first used then; nothing of it counts
                switch.turn(which, name, max(3, steps))
            switch.forget()
            order = ("hook", "direct", "direct", "hook")
            blocks = in_turns(lambda place: switch.turn(order[place], name, steps), plan.seconds)
    finally:
        switch.by("hook")
    return Taken(blocks, {"steps": steps, "pinned": plan.core is not None, "words": found["words"], **switch.proof()})


def compare(members: Sequence[Member], name: str, plan: Plan, *, pools: bool = False) -> dict[str, Any]:
    """Steps of hooked programs, one after the other, with the hook and past it; or `failed`: why that cannot be told.

    `pools`: past it also where a step allocates in stream order, which it may if it frees all of that itself.  What is
    said of the switch (`calls_per_step`, `bypassed`, ...) is the first program's; each has proved it.
    """
    try:
        taken = [take(member, name, plan, pools=pools) for member in members]
    except Failure as why:
        return {"failed": str(why)}
    told = taken[0].proof | figures([each.blocks for each in taken])
    added_ns = told["slowdown"] * told["direct_ns"] / told["calls_per_step"]
    return told | {"added_ns_per_call": round(added_ns, 1)}  # of the time that passes; the GPU may hide it


def switch_environment(into: Path) -> dict[str, str]:
    """Compiles in_process.c; what tells programs of it.  Raises BenchError."""
    flags = ("-shared", "-fPIC", "-fvisibility=hidden")
    return {LIBRARY: str(compile_program(PROGRAMS / "in_process.c", into, *flags))}
