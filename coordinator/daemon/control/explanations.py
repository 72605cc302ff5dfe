"""Why a program waits for a GPU, or gets no more memory there: one sentence for its user.

Invariants: a program learns nothing of another container's programs.  With `hide_names` it learns only the user of
another user's program.
"""

from __future__ import annotations

import shlex

from nvshare.coordinator.engine.snapshot import RefusalSnapshot, WaitSnapshot
from nvshare.coordinator.model.client import Identity
from nvshare.coordinator.system.users import known_name
from nvshare.coordinator.units import format_size


def wait(wait: WaitSnapshot, *, hide_names: bool) -> str:
    """For example `waiting for GPU 0, held by train.py (alice); 2nd in line`."""
    blocker = "" if wait.blocker is None else _holder(wait.blocker, wait.identity, hide_names)
    why = wait.standing.sentence(shlex.quote(wait.identity.name), blocker, wait.place, wait.lacking_bytes)
    return f"waiting for GPU {wait.index}{',' if why.startswith('held by') else ':'} {why}"


def refusal(refused: RefusalSnapshot, *, hide_names: bool) -> str:
    """For example `GPU 0 has 4GiB; of that train.py (alice) has 3GiB that cannot move`."""
    left_bytes = refused.host_left_bytes
    begin = f"GPU {refused.index} has {format_size(refused.capacity_bytes)} for programs"
    if left_bytes is not None:
        begin += f", of the host's memory, with {format_size(left_bytes)} left"
    if not refused.immovable:
        return f"{begin}, and this one wants more of it than can be kept there"
    holder, size = refused.immovable[0]
    named = f"{_holder(holder, refused.identity, hide_names)} has {format_size(size)} that cannot move"
    others = refused.immovable[1:]
    if others:
        rest = format_size(sum(size for _, size in others))
        named += f", {len(others)} other program{'s' if len(others) > 1 else ''} {rest}"
    remedy = ", or start device-mode programs with `--memory swap`" if left_bytes is None else " or on the host"
    return f"{begin}, and {named}; free memory there{remedy}"


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
