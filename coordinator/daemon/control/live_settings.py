"""Live settings: settings made with `nvshare-ctl` at run time, in a file that the next coordinator reads.

A setting belongs to the node (to one of its GPUs, or to none), to a process, or to a slot with all its processes.  It
lasts until it is unset, its process ends, its slot is allocated anew, or the machine boots.  It takes precedence over
a reloaded configuration file and over a slot's annotations.

Invariants: a process is identified by its id *and* start time, so a reused id gets no settings.  The file is replaced
as a whole.  An unreadable or unwritable file loses its settings only, and the log says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from nvshare.coordinator.daemon.control.settings import SETTINGS
from nvshare.coordinator.model import events
from nvshare.coordinator.protocol.messages import Sharing
from nvshare.coordinator.system.journal import boot_id, start_time
from nvshare.scheduler_policies.api import JobClass

log: Final = logging.getLogger("nvshare")

Value = int | float | str | bool | None
Key = tuple[str, str | None]
"""A setting's name, and its GPU or None."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a setting: a process, an allocation of a slot, or the node."""

    process_id: int = 0
    started_at: int = 0
    slot: str = ""
    allocation: str = ""


NODE: Final = Owner()

NODE_EVENTS: Final[dict[str, Callable[[Any, str | None], events.Event]]] = {
    "quantum": events.QuantumSet,
    "policy": lambda value, gpu: events.PolicySet(value, {}, gpu),
    "sharing": lambda value, gpu: events.SharingSet(Sharing[value.upper()], gpu),
    "switch_share": events.SwitchShareSet,
    "host_budget": lambda value, gpu: events.HostBudgetSet(value),
}
CLIENT_EVENTS: Final[dict[str, Callable[[int, Any, str | None], events.Event]]] = {
    "priority": lambda client, value, gpu: events.PrioritySet(client, value),
    "weight": lambda client, value, gpu: events.WeightSet(client, value),
    "class": lambda client, value, gpu: events.ClassSet(client, JobClass[value.upper()]),
    "share_request": lambda client, value, gpu: events.SharesSet(client, request=value),
    "share_limit": lambda client, value, gpu: events.SharesSet(client, limit=value),
    "limit": events.LimitSet,
    "paused": lambda client, value, gpu: events.Paused(client) if value else events.Resumed(client),
}
MAX_GPU_NAME: Final = 95
SHARES: Final = ("share_request", "share_limit")
"""Settings that bound each other: an event carries both."""


@dataclass(frozen=True, slots=True)
class Live:
    """One setting."""

    owner: Owner
    setting: str
    gpu: str | None
    value: Value
    operators: Value = None
    """The operators' value, a ceiling for the program's user; None: the user alone has set it."""

    def __str__(self) -> str:
        owner = f"process {self.owner.process_id}" if self.owner.process_id else ""
        owner = owner or (f"slot {self.owner.slot}" if self.owner.slot else "")
        return " of ".join(part for part in (self.setting, owner, self.gpu) if part)

    def plain(self) -> dict[str, Any]:
        """The setting as values for JSON."""
        return {
            "setting": self.setting,
            "gpu": self.gpu,
            "value": self.value,
            "operators": self.operators,
            **asdict(self.owner),
        }


@dataclass(slots=True)
class _Client:
    owner: Owner | None
    base: dict[str, Any]
    """Its values without live settings."""


class LiveSettings:
    """All live settings, and the connected clients.  For the loop's thread."""

    def __init__(self, path: Path) -> None:
        """Reads the file of an earlier coordinator."""
        self.allocation: Callable[[str], str | None] = lambda slot: None
        """The present allocation of a slot; None for an unknown slot."""
        self._path = path
        self._failure: str | None = None
        self._clients: dict[int, _Client] = {}
        self._values: dict[Owner, dict[Key, Value]] = {}
        self._ceilings: dict[Owner, dict[Key, Value]] = {}
        """The values that operators have set, a part of `_values` unless the program's user has set other ones."""
        for live in _read(path):
            if not live.owner.process_id or start_time(live.owner.process_id) == live.owner.started_at:
                self._values.setdefault(live.owner, {})[live.setting, live.gpu] = live.value
                if live.operators is not None:
                    self._ceilings.setdefault(live.owner, {})[live.setting, live.gpu] = live.operators

    # --- settings -----------------------------------------------------------------------------------------------------

    def all(self) -> list[Live]:
        """Settings of the node and of existing processes and slots."""
        for owner in [owner for owner in self._values if not self._exists(owner)]:
            del self._values[owner]
            self._ceilings.pop(owner, None)
        return [
            Live(owner, setting, gpu, value, self._ceilings.get(owner, {}).get((setting, gpu)))
            for owner, values in self._values.items()
            for (setting, gpu), value in values.items()
        ]

    def node(self) -> dict[Key, Value]:
        """Settings of the node."""
        return self._values.get(NODE, {})

    def put(
        self,
        owner: Owner,
        setting: str,
        value: Value,
        gpus: Iterable[str | None] = (None,),
        *,
        by_operator: bool = True,
    ) -> None:
        """Stores a setting.  A setting for all GPUs (None) replaces those for single GPUs."""
        for gpu in gpus:
            _store(self._values.setdefault(owner, {}), setting, gpu, value)
            if by_operator:
                _store(self._ceilings.setdefault(owner, {}), setting, gpu, value)
        for key in self._ceilings.get(owner, {}):
            self._values[owner].setdefault(key, value)  # `all` lists each ceiling beside the value in force
        self._write()

    def ceilings(self, client: int, setting: str) -> list[Value]:
        """The operators' values of a client's setting, one for each GPU."""
        owner = self._clients[client].owner
        found = {} if owner is None else self._ceilings.get(owner, {})
        return [value for (name, _), value in found.items() if name == setting]

    def drop(
        self, owner: Owner | None, setting: str | None, gpu: str | None, *, by_operator: bool = True
    ) -> list[Live]:
        """Removes and returns the settings of this owner, name and GPU; None means any.

        Where an operator has set a value, a user's removal restores it.
        """
        found = [
            live
            for live in self.all()
            if owner in (None, live.owner) and setting in (None, live.setting) and gpu in (None, live.gpu)
        ]
        if not by_operator:
            found = [live for live in found if live.value != live.operators]
        for live in found:
            key = (live.setting, live.gpu)
            if by_operator:
                self._ceilings.get(live.owner, {}).pop(key, None)
            if live.operators is None or by_operator:
                del self._values[live.owner][key]
            else:
                self._values[live.owner][key] = live.operators
        if found:
            self._write()
        return found

    def forget(self) -> None:
        """Removes all settings and the file."""
        self._values.clear()
        self._ceilings.clear()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def problem(self) -> str | None:
        """The file's fault, for the operator; None without one."""
        return self._failure

    # --- clients ------------------------------------------------------------------------------------------------------

    def registered(self, client: events.ClientRegistered) -> list[events.Event]:
        """Events that apply the settings of its process or slot to a new client."""
        owner = self._identify(client)
        values: dict[str, Any] = {
            "priority": client.priority,
            "weight": client.weight,
            "limit": client.memory_limit_bytes,
            "class": "batch",
            "share_request": 0.0,
            "share_limit": 1.0,
            "paused": False,
        }
        self._clients[client.client] = _Client(owner, values)
        names = dict.fromkeys(setting for setting, _ in self._of(owner))
        return [event for name in names for event in self.in_force(client.client, name)]

    def attached(self, client: int, uuid: str) -> list[events.Event]:
        """Events that apply the client's settings for a GPU that it begins to use."""
        known = self._clients[client]
        found = [(name, value) for (name, gpu), value in self._of(known.owner).items() if gpu == uuid]
        return [event for name, value in found for event in self.changes(client, name, value, uuid)]

    def profiled(self, event: events.Profiled) -> events.Profiled:
        """A client's profile, with its live settings in place of its own."""
        own = {"class": event.job_class.name.lower(), "share_request": event.share_request}
        self._clients[event.client].base |= {**own, "share_limit": event.share_limit}
        job_class, request, limit = (self.value(event.client, name) for name in ("class", *SHARES))
        return replace(event, job_class=JobClass[job_class.upper()], share_request=request, share_limit=limit)

    def gone(self, client: int) -> None:
        """Handles the end of a client's connection; its process may reconnect."""
        self._clients.pop(client, None)

    def owner(self, client: int) -> Owner | None:
        """The owner of the client's settings; None if its process could not be recognised after a reconnect."""
        return self._clients[client].owner

    def alike(self, client: int) -> list[int]:
        """All clients of the same process or slot, this one included."""
        owner = self._clients[client].owner
        return [client] if owner is None else self.clients_of(owner)

    def clients_of(self, owner: Owner) -> list[int]:
        """Connected clients of an owner."""
        return [client for client, known in self._clients.items() if known.owner == owner]

    def changes(self, client: int, setting: str, value: Value, gpu: str | None) -> list[events.Event]:
        """Events that give the client this value."""
        if setting in SHARES:
            values = {name: self.value(client, name) for name in SHARES} | {setting: value}
            return [events.SharesSet(client, values["share_request"], values["share_limit"])]
        return [CLIENT_EVENTS[setting](client, value, gpu)]

    def value(self, client: int, setting: str) -> Any:
        """The value in force for all GPUs: the live setting, else the client's own."""
        known = self._clients[client]
        return self._of(known.owner).get((setting, None), known.base[setting])

    def in_force(self, client: int, setting: str) -> list[events.Event]:
        """Events that give the client its value: the live setting, else its own."""
        found = self.changes(client, setting, self.value(client, setting), None)
        for (name, gpu), value in self._of(self._clients[client].owner).items():
            if name == setting and gpu is not None:
                found += self.changes(client, setting, value, gpu)
        return found

    def slot_changed(self, event: events.Event) -> list[events.Event]:
        """Events for a change of a slot's file, unless a live setting is in force."""
        name: str
        value: object
        if isinstance(event, events.PrioritySet):
            name, value = "priority", event.priority
        elif isinstance(event, events.WeightSet):
            name, value = "weight", event.weight
        elif isinstance(event, events.LimitSet):
            name, value = "limit", event.limit_bytes
        elif isinstance(event, events.ClassSet):
            name, value = "class", event.job_class.name.lower()
        elif isinstance(event, events.SharesSet):
            name, value = "share_request", event.request
            self._clients[event.client].base["share_limit"] = event.limit
        else:
            return [event]
        self._clients[event.client].base[name] = value
        return self.in_force(event.client, name)

    def _identify(self, client: events.ClientRegistered) -> Owner | None:
        if client.group:
            allocation = self.allocation(client.group)
            return Owner(slot=client.group, allocation=allocation) if allocation else None
        started_at = start_time(client.process_id) if client.process_id > 0 else None
        return None if started_at is None else Owner(client.process_id, started_at)

    def _of(self, owner: Owner | None) -> dict[Key, Value]:
        return {} if owner is None else self._values.get(owner, {})

    def _exists(self, owner: Owner) -> bool:
        if owner.process_id:
            return start_time(owner.process_id) == owner.started_at
        return not owner.slot or self.allocation(owner.slot) == owner.allocation

    # --- the file -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        content = {"boot": boot_id().decode("ascii", "replace"), "settings": [live.plain() for live in self.all()]}
        beside = self._path.with_name(self._path.name + ".new")
        try:
            beside.touch()
            beside.chmod(0o600)  # process ids of all users
            beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            if self._failure is None:
                log.warning("%s: %s", self._path, error.strerror)
            self._failure = f"cannot write {self._path} ({error.strerror}): new live settings will not last"
        else:
            self._failure = None


def _store(values: dict[Key, Value], setting: str, gpu: str | None, value: Value) -> None:
    for key in [key for key in values if key[0] == setting and gpu in (None, key[1])]:
        del values[key]
    values[setting, gpu] = value


def _read(path: Path) -> Iterable[Live]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["boot"] != boot_id().decode("ascii", "replace"):
            return []
        return [_checked(entry) for entry in content["settings"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        why = str(error.strerror)
    except (LookupError, TypeError, ValueError) as error:
        why = f"damaged: {error!r}"[:300]
    log.warning("%s: %s; the earlier live settings are lost", path, why)
    return []


def _checked(entry: dict[str, Any]) -> Live:
    setting, gpu, value = entry.pop("setting"), entry.pop("gpu"), entry.pop("value")
    operators = entry.pop("operators", value)  # before 0.2 only operators could set a value
    declared = SETTINGS[setting]
    for each in (value, value if operators is None else operators):
        declared.check(each)
    owner = Owner(**entry)
    typed = all(isinstance(found, type(like)) for found, like in zip(astuple(owner), astuple(NODE), strict=True))
    placed = (gpu is None or declared.by_gpu) if declared.of_client else (gpu is not None) == declared.by_gpu
    named = gpu is None or (isinstance(gpu, str) and 0 < len(gpu) <= MAX_GPU_NAME)
    if not (typed and placed and named) or (owner == NODE) == declared.of_client:
        raise ValueError(f"{setting} of {owner}")
    return Live(owner, setting, gpu, value, operators)
