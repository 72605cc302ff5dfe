"""The rights of users on the control and event sockets: what each may see and change.

Operators, who are root and the coordinator's user, see and change everything.  Every other user sees everything, under
`hide_other_users` without the names of other users' programs, and changes their own programs within the operators'
settings.  Invariants: the user id is the kernel's.  Pure: no sockets, clock or files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.model.profile import I32_MAX, MAX_WEIGHT

if TYPE_CHECKING:
    from nvshare.coordinator.engine.snapshot import ClientSnapshot
    from nvshare.coordinator.kinds import Value

HIDDEN: Final = "(hidden)"
"""Stands for a name that the reader must not see."""

OfProgram = (
    api.Set | api.SetShare | api.Unset | api.Pause | api.Resume | api.ParkClient | api.MigrateClient | api.EndClient
)
"""Requests that change one program; `Set` and `Unset` only where they name one."""
_NAMES_IN_EVENTS: Final = frozenset({"name", "program", "process", "gang", "owner"})

Ceilings = Callable[[str], "list[Value]"]
"""The operators' values of a client's setting, one for each GPU."""


@dataclass(slots=True)
class Rights:
    """Rights that the configuration gives.  `own_user` is the coordinator's."""

    own_user: int
    max_priority: int = I32_MAX
    max_weight: int = MAX_WEIGHT
    hide_other_users: bool = False

    def set_bounds(self, max_priority: int, max_weight: int, *, hide: bool) -> None:
        """Applies a reloaded configuration."""
        self.max_priority, self.max_weight, self.hide_other_users = max_priority, max_weight, hide

    @property
    def operators(self) -> frozenset[int]:
        return frozenset({0, self.own_user})

    def is_operator(self, user_id: int) -> bool:
        return user_id in (0, self.own_user)

    def lower(self, user_id: int, claims: dict[str, Any]) -> list[str]:
        """Lowers what a user's program claims by its environment to what it may have.  Says what is not as claimed.

        Root and the coordinator's user are not limited, because they may use nvshare-ctl.  Slots have annotations.  A
        guaranteed share takes time from other users: operators give it, and slots.
        """
        if self.is_operator(user_id):
            return []
        claimed = claims.get("priority", 0), claims.get("weight", 1)
        claims["priority"], claims["weight"] = min(claimed[0], self.max_priority), min(claimed[1], self.max_weight)
        told = []
        if claimed != (most := (claims["priority"], claims["weight"])):
            told.append(
                f"user {user_id} is limited to priority {most[0]} and weight {most[1]} (max_priority, max_weight)"
            )
        if claims.pop("share_request", 0):
            text = f"user {user_id} may ask for no guaranteed share; an operator gives it by nvshare-ctl set share"
            told.append(text)
        return told

    def may_name(self, user_id: int, client: ClientSnapshot) -> bool:
        """Whether the user may see the client's name."""
        return not self.hide_other_users or self.is_operator(user_id) or self.owns(user_id, client)

    def owns(self, user_id: int, client: ClientSnapshot) -> bool:
        """Whether the client is the user's.  User ids inside of pods mean nothing outside."""
        return client.identity.user_id == user_id and not client.identity.group

    @property
    def _who(self) -> str:
        return "root" if self.own_user == 0 else f"root or user {self.own_user}"

    def check_kind(self, user_id: int, request: api.Request) -> None:
        """Raises ControlError for a request that only operators may make, whatever it names."""
        if isinstance(request, (api.Ping, api.Status, api.Place)) or self.is_operator(user_id):
            return
        if not isinstance(request, OfProgram) or request.client is None:
            raise _refused(
                f"only {self._who} may change settings of the node; you (user {user_id}) may change your own programs"
            )

    def check_change(self, user_id: int, request: OfProgram, client: ClientSnapshot, ceilings: Ceilings) -> None:
        """Raises ControlError unless the user may make this change of this client."""
        if self.is_operator(user_id):
            return
        if not self.owns(user_id, client):
            in_slot = bool(client.identity.group)
            owner = "a slot" if in_slot else f"user {client.identity.user_id}"
            who = self._who if in_slot else f"{owner} or {self._who}"
            raise _refused(f"client c{client.client} belongs to {owner}; only {who} may change it, not user {user_id}")
        why = self._beyond(request, ceilings)
        if why is not None:
            raise _refused(f"{why}; only {self._who} may change that")

    def _beyond(self, request: OfProgram, ceilings: Ceilings) -> str | None:
        """Says how a change of one's own program is beyond the operators' settings; None if it is not."""
        if isinstance(request, api.SetShare):
            if request.request is not None:
                return "a live guaranteed share takes time from other users"
            return _above("share limit", request.limit or 0, ceilings("share_limit"))
        if isinstance(request, api.Set):
            value: Any = request.value
            if request.setting == "priority":
                return _above("priority", value, ceilings("priority") or [self.max_priority])
            if request.setting == "weight":
                return _above("weight", value, ceilings("weight") or [self.max_weight])
            if request.setting == "limit":
                limits = [limit for limit in ceilings("limit") if limit]
                return _above("memory limit in bytes", value or 1 << 62, limits)
            others = [each for each in ceilings("class") if each != value]
            return f"an operator has set the class {others[0]}" if others else None
        if isinstance(request, api.MigrateClient):
            return "a move to another GPU concerns the programs there"
        if isinstance(request, api.Resume) and True in ceilings("paused"):
            return "an operator has paused this program"
        return None

    def hidden_event(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a trace event without names of programs."""
        shown = {key: value for key, value in values.items() if key not in _NAMES_IN_EVENTS}
        if kind == "plan":
            shown.pop("why", None)
        return shown


def _refused(text: str) -> ControlError:
    return ControlError("permission", text)


def _above(what: str, wanted: float, ceilings: Sequence[Value]) -> str | None:
    most = min((value for value in ceilings if isinstance(value, (int, float))), default=None)
    return None if most is None or wanted <= most else f"a {what} of at most {most} is allowed"


def hide_names(status: dict[str, Any], user_id: int) -> dict[str, Any]:
    """A status without names, processes, gangs and slots of other users' programs.  Their user ids stay."""
    own = [c for c in status["clients"] if c["user_id"] == user_id and not c["group"]]
    own_clients, own_processes, own_names = ({c[key] for c in own} for key in ("client", "process_id", "name"))
    names = {c["name"]: f"client c{c['client']}" for c in status["clients"] if c["name"] not in own_names}
    gang = f"user:{user_id}/"
    names |= {g["name"]: HIDDEN for g in status["gangs"] if not g["name"].startswith(gang)}
    shown = dict(status)
    shown["clients"] = [c if c["client"] in own_clients else _hidden_client(c) for c in status["clients"]]
    shown["gangs"] = [{**g, "name": names.get(g["name"], g["name"])} for g in status["gangs"]]
    shown["gpus"] = [
        {
            **g,
            "why": _without(names, g["why"]),
            "slot_of_gang": names.get(g["slot_of_gang"], g["slot_of_gang"]),
            "expected_process": -1 if g["expected_process"] else 0,
        }
        for g in status["gpus"]
    ]
    shown["live"] = [
        s for s in status["live"] if s["process_id"] in own_processes or not (s["process_id"] or s["slot"])
    ]
    shown["host_owners"] = [o for o in status["host_owners"] if not o["owner"].startswith("slot ")]
    if "slots" in status:
        shown["slots"] = []
    return shown


def _hidden_client(client: dict[str, Any]) -> dict[str, Any]:
    gang = HIDDEN if client["gang"] else ""
    placed = {name: HIDDEN if client[name] else "" for name in ("placement", "placed_apart", "placed_why")}
    return {**client, "name": HIDDEN, "program": HIDDEN, "process_id": 0, "group": "", "gang": gang, **placed}


def _without(names: Mapping[str, str], text: str) -> str:
    """A sentence with other names, the longest first."""
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first)
    return re.sub(pattern, lambda found: names[found[0]], text)
