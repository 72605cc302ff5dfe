"""How `nvshare-run --gpu` has placed a program.

The coordinator writes a placement, the launcher passes it on by NVSHARE_PLACEMENT, and the hook of each process below
tells it with `Hello`.  So it holds for children, and survives a restart of the coordinator.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass, replace
from typing import Final

MOST_BYTES: Final = 255
"""Size of `Hello.placement`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One start of a program.  `placement` is an id, common to its processes; "": it was not placed."""

    placement: str = ""
    placed_alone: bool = False
    """No other program is placed on its GPUs."""
    placed_apart: str = ""
    """Programs of this name are placed on other GPUs."""
    placed_why: str = ""

    def text(self) -> str:
        """For the environment.  The reason is cut to fit."""
        made = json.dumps(astuple(self), ensure_ascii=False, separators=(",", ":"))
        excess = len(made.encode()) - MOST_BYTES
        why = self.placed_why[: -max(1, excess // 4)]
        return replace(self, placed_why=why).text() if excess > 0 and self.placed_why else made


NOT_PLACED: Final = Placement()


def parse_placement(text: str) -> Placement:
    """The placement that a client tells.  A malformed one counts as none."""
    try:
        told: object = json.loads(text or "0")
    except ValueError:
        return NOT_PLACED
    kinds = [str, bool, str, str]
    if not isinstance(told, list) or [*map(type, told)] != kinds or not re.fullmatch("[0-9a-f]{1,8}", told[0]):
        return NOT_PLACED
    identity, alone, apart, why = told
    apart, why = ("".join(c if c.isprintable() else "?" for c in each) for each in (apart, why))
    return Placement(identity, alone, apart, why)
