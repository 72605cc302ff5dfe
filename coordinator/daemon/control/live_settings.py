"""Live settings: settings made with `nvshare-ctl` at run time, in a file that the next coordinator reads.

A setting belongs to the node (to one of its GPUs, or to none), to a process, or to a slot with all its processes.  It
lasts until it is unset, its process ends, its slot is allocated anew, or the machine boots.  It takes precedence over
a reloaded configuration file and over a slot's annotations.  A setting of a process that cannot be identified lasts as
long as its connection, and is in no file.

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
from nvshare.coordinator.kinds import Value
from nvshare.coordinator.model import events
from nvshare.coordinator.model.profile import Facts
from nvshare.coordinator.model.settings import SETTINGS
from nvshare.coordinator.system.journal import boot_id, start_time

log: Final = logging.getLogger("nvshare")


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a setting: a process, an allocation of a slot, a connection, or the node."""

    process_id: int = 0
    """Negative: the connection of that number, whose process cannot be identified."""
    started_at: int = 0
    slot: str = ""
    allocation: str = ""

    @property
    def of_connection(self) -> bool:
        """Its settings end with a connection."""
        return self.process_id < 0


NODE: Final = Owner()

MAX_GPU_NAME: Final = 95


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
        owner = f"process {self.owner.process_id}" if self.owner.process_id > 0 else ""
        owner = owner or (f"client c{-self.owner.process_id}" if self.owner.of_connection else "")
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


class LiveSettings:
    """All live settings, and the connected clients.  For the loop's thread."""

    def __init__(self, path: Path, allocation: Callable[[str], str | None] = lambda _: None) -> None:
        """Reads the file of an earlier coordinator.

        `allocation`: the present allocation of a slot; None for an unknown slot.
        """
        self._allocation = allocation
        self._path = path
        self._failure: str | None = None
        self._owners: dict[int, Owner] = {}  # of connected clients
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

    def ceilings(self, client: int, setting: str) -> list[Value]:
        """The operators' values of a client's setting, one for each GPU."""
        found = self._of(self._owners[client]).items()
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
        return found

    def save(self) -> None:
        """Writes the file.  Call it after the engine has taken a change: one that crashes it must not come back."""
        lasting = [live.plain() for live in self.all() if not live.owner.of_connection]
        content = {"boot": boot_id().decode("ascii", "replace"), "settings": lasting}
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

    def forget(self) -> None:
        """Removes all settings and the file."""
        self._live.clear()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def problem(self) -> str | None:
        """The file's fault, for the operator; None without one."""
        return self._failure

    # --- clients ------------------------------------------------------------------------------------------------------

    def registered(self, client: events.ClientRegistered) -> None:
        """A client is connected: the settings of its process or slot are its own."""
        self._owners[client.client] = self._identify(client)

    def over(self, client: int, facts: Facts) -> Facts:
        """The facts, with the settings in force in place of those that they replace."""
        own = self._of(self._owners[client]).values()
        typed = {live: SETTINGS[live.setting].kind.typed(live.value) for live in own}
        values = {SETTINGS[live.setting].field: value for live, value in typed.items() if live.gpu is None}
        limits = tuple((live.gpu, value) for live, value in typed.items() if live.gpu is not None)
        return facts.having(**values, limits_of_gpus=limits)

    def gone(self, client: int) -> None:
        """Handles the end of a client's connection; its process may reconnect."""
        owner = self._owners.pop(client, NODE)
        if owner.of_connection:
            self._live.pop(owner, None)

    def owner(self, client: int) -> Owner:
        """The owner of the client's settings."""
        return self._owners[client]

    def clients_of(self, owner: Owner) -> list[int]:
        """Connected clients of an owner."""
        return [client for client, known in self._owners.items() if known == owner]

    def _identify(self, client: events.ClientRegistered) -> Owner:
        if client.allocation:
            return Owner(slot=client.group, allocation=client.allocation)
        started_at = start_time(client.process_id) if client.process_id > 0 and not client.group else None
        return Owner(-client.client, 0) if started_at is None else Owner(client.process_id, started_at)

    def _of(self, owner: Owner) -> dict[Key, Live]:
        return self._live.get(owner, {})

    def _exists(self, owner: Owner) -> bool:
        if owner.of_connection:
            return owner in self._owners.values()
        if owner.process_id:
            return start_time(owner.process_id) == owner.started_at
        return not owner.slot or self._allocation(owner.slot) == owner.allocation


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
    operators = entry.pop("operators")
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
