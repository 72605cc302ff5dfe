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

from nvshare.coordinator.daemon.settings_file import Key
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import SETTINGS, Value
from nvshare.coordinator.system.journal import boot_id, start_time

log: Final = logging.getLogger("nvshare")


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a setting: a process, an allocation of a slot, or the node."""

    process_id: int = 0
    started_at: int = 0
    slot: str = ""
    allocation: str = ""


NODE: Final = Owner()

MAX_GPU_NAME: Final = 95
SHARES: Final = ("share_limit", "share_request")
"""Settings that bound each other: the engine lowers a request to the limit at hand, so both are set, in this order."""


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

    def __init__(self, path: Path, allocation: Callable[[str], str | None] = lambda _: None) -> None:
        """Reads the file of an earlier coordinator.

        `allocation`: the present allocation of a slot; None for an unknown slot.
        """
        self._allocation = allocation
        self._path = path
        self._failure: str | None = None
        self._clients: dict[int, _Client] = {}
        self._live: dict[Owner, dict[Key, Live]] = {}
        for live in _read(path):
            if not live.owner.process_id or start_time(live.owner.process_id) == live.owner.started_at:
                self._live.setdefault(live.owner, {})[live.setting, live.gpu] = live

    # --- settings -----------------------------------------------------------------------------------------------------

    def all(self) -> list[Live]:
        """Settings of the node and of existing processes and slots."""
        for owner in [owner for owner in self._live if not self._exists(owner)]:
            del self._live[owner]
        return [live for own in self._live.values() for live in own.values()]

    def node(self) -> dict[Key, Value]:
        """Settings of the node."""
        return {key: live.value for key, live in self._of(NODE).items()}

    def put(
        self,
        owner: Owner,
        setting: str,
        value: Value,
        gpus: Iterable[str | None] = (None,),
        *,
        by_operator: bool = True,
    ) -> None:
        """Stores a setting.  A setting for all GPUs (None) replaces those for single GPUs, which keep their operators'
        values if a user sets it."""
        own = self._live.setdefault(owner, {})
        for gpu in gpus:
            for key in [key for key in own if key[0] == setting and gpu in (None, key[1])]:
                if by_operator or own[key].operators is None:
                    del own[key]
                else:
                    own[key] = replace(own[key], value=value)
            own.setdefault((setting, gpu), Live(owner, setting, gpu, value, value if by_operator else None))
        self._write()

    def ceilings(self, client: int, setting: str) -> list[Value]:
        """The operators' values of a client's setting, one for each GPU."""
        found = self._of(self._clients[client].owner).items()
        return [live.operators for (name, _), live in found if name == setting and live.operators is not None]

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
            if live.operators is None or by_operator:
                del self._live[live.owner][key]
            else:
                self._live[live.owner][key] = replace(live, value=live.operators)
        if found:
            self._write()
        return found

    def forget(self) -> None:
        """Removes all settings and the file."""
        self._live.clear()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def problem(self) -> str | None:
        """The file's fault, for the operator; None without one."""
        return self._failure

    # --- clients ------------------------------------------------------------------------------------------------------

    def registered(self, client: events.ClientRegistered) -> list[events.Set]:
        """Events that apply the settings of its process or slot to a new client."""
        owner = self._identify(client)
        values: dict[str, Any] = {
            **{name: setting.default for name, setting in SETTINGS.items() if setting.of_client},
            "priority": client.hello.priority,
            "weight": client.hello.weight,
            "limit": client.hello.memory_limit_bytes,
            "gang": client.hello.gang,
        }
        self._clients[client.client] = _Client(owner, values)
        names = dict.fromkeys(setting for setting, _ in self._of(owner))
        return [event for name in names for event in self.in_force(client.client, name)]

    def attached(self, client: int, uuid: str) -> list[events.Set]:
        """Events that apply the client's settings for a GPU that it begins to use."""
        known = self._clients[client]
        found = [live for (_, gpu), live in self._of(known.owner).items() if gpu == uuid]
        return [event for live in found for event in self.changes(client, live.setting, live.value, uuid)]

    def profiled(self, event: events.Profiled) -> events.Profiled:
        """A client's profile, with its live settings in place of its own."""
        for name in ("class", *SHARES):
            setting, base = SETTINGS[name], self._clients[event.client].base
            base[name] = setting.kind.plain(getattr(event, setting.field))
            event = replace(event, **{setting.field: setting.kind.typed(self.value(event.client, name))})
        return event

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

    def changes(self, client: int, setting: str, value: Value, gpu: str | None) -> list[events.Set]:
        """Events that give the client this value."""
        if setting not in SHARES:
            return [events.Set(setting, value, gpu, client)]
        values = {name: self.value(client, name) for name in SHARES} | {setting: value}
        return [events.Set(name, values[name], gpu, client) for name in SHARES]

    def value(self, client: int, setting: str) -> Any:
        """The value in force for all GPUs: the live setting, else the client's own."""
        known = self._clients[client]
        live = self._of(known.owner).get((setting, None))
        return known.base[setting] if live is None else live.value

    def in_force(self, client: int, setting: str) -> list[events.Set]:
        """Events that give the client its value: the live setting, else its own."""
        found = self.changes(client, setting, self.value(client, setting), None)
        for (name, gpu), live in self._of(self._clients[client].owner).items():
            if name == setting and gpu is not None:
                found += self.changes(client, setting, live.value, gpu)
        return found

    def slot_changed(self, event: events.Set) -> list[events.Set]:
        """Events for a change of a slot's file, unless a live setting is in force."""
        assert event.client is not None
        self._clients[event.client].base[event.setting] = event.value
        return self.in_force(event.client, event.setting)

    def _identify(self, client: events.ClientRegistered) -> Owner | None:
        if client.group:
            allocation = self._allocation(client.group)
            return Owner(slot=client.group, allocation=allocation) if allocation else None
        started_at = start_time(client.process_id) if client.process_id > 0 else None
        return None if started_at is None else Owner(client.process_id, started_at)

    def _of(self, owner: Owner | None) -> dict[Key, Live]:
        return {} if owner is None else self._live.get(owner, {})

    def _exists(self, owner: Owner) -> bool:
        if owner.process_id:
            return start_time(owner.process_id) == owner.started_at
        return not owner.slot or self._allocation(owner.slot) == owner.allocation

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
        declared.kind.check(each)
    owner = Owner(**entry)
    typed = all(isinstance(found, type(like)) for found, like in zip(astuple(owner), astuple(NODE), strict=True))
    placed = (gpu is None or declared.by_gpu) if declared.of_client else (gpu is not None) == declared.by_gpu
    named = gpu is None or (isinstance(gpu, str) and 0 < len(gpu) <= MAX_GPU_NAME)
    if not (typed and placed and named and declared.is_live) or (owner == NODE) == declared.of_client:
        raise ValueError(f"{setting} of {owner}")
    return Live(owner, setting, gpu, value, operators)
