"""Why a program waits for a GPU, or gets no more memory there: one sentence for its user.

Invariants: a program learns nothing of another container's programs.  With `hide_names` it learns only the user of
another user's program.
"""

from __future__ import annotations

import shlex
from typing import Final

from nvshare.coordinator.engine.snapshot import RefusalSnapshot, WaitSnapshot
from nvshare.coordinator.model.client import Identity
from nvshare.coordinator.system.users import known_name
from nvshare.coordinator.units import format_size

_STOPPED: Final = "stopped: continue it (kill -CONT) or end it"


def wait(wait: WaitSnapshot, *, hide_names: bool) -> str:
    """For example `waiting for GPU 0, held by train.py (alice); 2nd in line`."""
    begin = f"waiting for GPU {wait.index}"
    if wait.paused:
        return f"{begin}: this program is paused; `nvshare-ctl resume {shlex.quote(wait.identity.name)}` continues it"
    if wait.recovering:
        missing = f"the program that held it is {_STOPPED}" if wait.stopped else "an earlier holder is not back yet"
        return f"{begin}: the coordinator has restarted, and {missing}"
    if wait.moving:
        return f"{begin}: this program is next, and memory is being moved for it"
    place = "next in line" if wait.place == 0 else f"{ordinal(wait.place + 1)} in line"
    if wait.in_debt:
        place = "others come first, because programs of this user gave the GPU back too late"
    if wait.lacking_bytes:
        lacking = format_size(wait.lacking_bytes)
        place = f"{lacking} of this program's memory does not fit beside memory that cannot move"
    elif wait.stuck is not None:
        place = (
            f"the memory of {_holder(wait.stuck, wait.identity, hide_names)} does not move; perhaps it is {_STOPPED}"
        )
    if not wait.holders:
        return f"{begin}, which no program holds now; {place}"
    holder = _holder(wait.holders[0], wait.identity, hide_names)
    others = len(wait.holders) - 1
    more = "" if not others else f" and {others} other program{'s' if others > 1 else ''}"
    return f"{begin}, held by {holder}{more}; {place}"


def refusal(refused: RefusalSnapshot, *, hide_names: bool) -> str:
    """For example `GPU 0 has 4GiB; of that train.py (alice) has 3GiB that cannot move`."""
    begin = f"GPU {refused.index} has {format_size(refused.capacity_bytes)} for programs"
    if not refused.immovable:
        return f"{begin}, and this one wants more of it than can be kept there"
    holder, size = refused.immovable[0]
    named = f"{_holder(holder, refused.identity, hide_names)} has {format_size(size)} that cannot move"
    others = refused.immovable[1:]
    if others:
        rest = format_size(sum(size for _, size in others))
        named += f", {len(others)} other program{'s' if len(others) > 1 else ''} {rest}"
    return f"{begin}, and {named}; free memory there, or start device-mode programs with `--memory swap`"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _holder(holder: Identity, asker: Identity, hide_names: bool) -> str:
    if (holder.group, holder.allocation) != (asker.group, asker.allocation):
        return "another container"
    if holder.group:
        return holder.name
    name = known_name(holder.user_id)
    user = f"user {name}" if name == str(holder.user_id) else name
    if hide_names and holder.user_id != asker.user_id:
        return f"a program of {user}"
    return f"{holder.name} ({user})"
