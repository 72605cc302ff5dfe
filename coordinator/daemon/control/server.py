"""The coordinator's side of the control protocol: turns requests into admin events and snapshots into plain values.

Invariants: a request is answered at once, in time proportional to the number of clients.  A refused request changes
nothing; rights (rights.py) are checked first.  A setting lasts (live_settings.py), or the reply says when it `ends`.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.live_settings import NODE
from nvshare.coordinator.daemon.control.placements import Placements
from nvshare.coordinator.daemon.control.rights import OfProgram, hide_names
from nvshare.coordinator.daemon.peers import Peer
from nvshare.coordinator.engine.event_log import InvariantError
from nvshare.coordinator.engine.snapshot import ClientSnapshot, GpuSnapshot
from nvshare.coordinator.kinds import Value
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import SETTINGS
from nvshare.coordinator.system.devices import integrated_bytes
from nvshare.coordinator.system.processes import end_process
from nvshare.coordinator.system.sensors import CardSensors

if TYPE_CHECKING:
    from nvshare.coordinator.daemon.control.live_settings import Live, LiveSettings, Owner
    from nvshare.coordinator.daemon.control.rights import Rights
    from nvshare.coordinator.daemon.dispatch import Dispatcher
    from nvshare.coordinator.daemon.settings_file import Key
    from nvshare.coordinator.engine.snapshot import Snapshot
    from nvshare.coordinator.system.devices import Device

log: Final = logging.getLogger("nvshare")

MakePolicy = Callable[[str, str], object]
"""(name, uuid) -> a policy.  Raises an exception with a sentence for an unknown or unusable policy."""

_LOGGED: Final = ("name", "process_id", "slot", "uuids", "why")
_SAMPLES: Final = ("recent_handovers_ns", "recent_drains_ns")


@dataclass(frozen=True, slots=True)
class Call:
    """When a request came, and whose it is."""

    now_ns: int
    user_id: int
    by_operator: bool
    process_id: int
    """0: unknown."""


class Administration:
    """Answers nvshare-ctl."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        devices: Sequence[Device],
        make_policy: MakePolicy,
        facts: dict[str, Any],
        live: LiveSettings,
        configured: Callable[[], dict[Key, Value]],
        problems: Callable[[], list[str]],
        rights: Rights,
        *,
        mps: Callable[[], dict[str, Any]] | None = None,
        sensors: Callable[[str], CardSensors] = lambda uuid: CardSensors(),
    ) -> None:
        """`facts` are added to the results of `ping` and `status`.  `configured` gives the configured values.
        `problems` are present faults, for the operator.  `mps`: its state; None: it is off.  `sensors`: those of a GPU,
        at once."""
        self._dispatcher = dispatcher
        self._devices = {device.uuid: device for device in devices}
        self._make_policy = make_policy
        self._live = live
        self._configured = configured
        self._problems = problems
        self._rights = rights
        self.changes = 0
        """Requests that have changed something; each is logged."""
        self._mps = mps or (lambda: {"mode": "off"})
        self._sensors = sensors
        self._facts = {"pid": os.getpid(), **facts}
        self._placements = Placements(devices, rights)

    def answer(self, frame: bytes, user_id: int, now_ns: int, process_id: int = 0) -> bytes:
        """The reply to one request of this user and process."""
        call, kind = Call(now_ns, user_id, self._rights.is_operator(user_id), process_id), "a malformed request"
        try:
            request = api.decode_request(frame)
            kind = request.ask
            self._rights.check_kind(user_id, request)
            result = _ANSWERS[type(request)](self, request, call)
            if not isinstance(request, (api.Ping, api.Status)):
                self.changes += 1
                log.info("user %d: %s", user_id, _sentence(request, result))
            return api.encode_result(result)
        except api.ControlError as error:
            return api.encode_error(error)
        except InvariantError:  # the core's state cannot be trusted any more
            raise
        except Exception:
            log.exception("%s failed", kind)
            return api.encode_error(api.ControlError("internal", "internal error; see the coordinator's log"))

    def _ping(self, request: api.Ping, call: Call) -> dict[str, Any]:
        return {**self._facts, "clients": len(self._dispatcher)}

    def _status(self, request: api.Status, call: Call) -> dict[str, Any]:
        snapshot = self._snapshot(call.now_ns)
        hides = self._rights.hide_other_users and not call.by_operator
        gpus, problems = [], self._problems()
        for gpu in snapshot.gpus:
            values = plain(gpu)
            if failed := values.pop("policy_failed"):
                failed = failed.partition(" (")[0] if self._rights.hide_other_users else failed  # it may name programs
                advice = f"{gpu.rules.policy} decides instead; correct it, then `nvshare-ctl set policy` again"
                problems.append(f"GPU {self._devices[gpu.uuid].index}: {failed}; {advice}")
            for name in _SAMPLES:
                values[name.replace("recent_", "").replace("_ns", "") + "_us"] = _quantiles(values.pop(name))
            device = self._devices[gpu.uuid]
            sensors = self._sensors(gpu.uuid).plain()
            if gpu.memory.integrated:
                values["available_bytes"] = integrated_bytes()[1]
            gpus.append({"index": device.index, "is_mig": device.is_mig, **values, "sensors": sensors})
        clients = [plain(client) for client in snapshot.clients] if request.clients or hides else []
        host = {"host_budget_bytes": snapshot.host_budget_bytes, "host_shared_bytes": snapshot.host_shared_bytes}
        owners = [plain(owner) for owner in snapshot.host_owners]
        more: dict[str, Any] = {"problems": problems, "live": [live.plain() for live in self._live.all()]}
        more["mps"] = self._mps()
        more["hides_names"] = self._rights.hide_other_users
        more |= {"gangs": [plain(gang) for gang in snapshot.gangs], "host_owners": owners, **self._slots(snapshot)}
        found = {**self._facts, "now_ns": call.now_ns, **host, "gpus": gpus, "clients": clients, **more}
        found = hide_names(found, call.user_id) if hides else found
        return found if request.clients else {**found, "clients": []}

    def _slots(self, snapshot: Snapshot) -> dict[str, Any]:
        """Empty without slots, that is without Kubernetes."""
        book = self._dispatcher.slots
        return {} if book is None else {"slots": [slot.plain() for slot in book.snapshots(snapshot.clients)]}

    def _set(self, request: api.Set, call: Call) -> dict[str, Any]:
        uuid = self._gpu(request.gpu)
        if SETTINGS[request.setting].of_client:
            client = self._client(request, call)
            found = self._set_client(client, {request.setting: request.value}, uuid, call)
            if request.setting == "limit":
                used = (seat.memory.allocated_bytes for seat in client.seats if uuid in (None, seat.uuid))
                found |= {"gpu": uuid, "allocated_bytes": max(used, default=0)}
        else:
            found = self._set_node(request.setting, request.value, uuid, call)
        return {**found, SETTINGS[request.setting].reply: request.value}

    def _set_node(self, setting: str, value: Any, uuid: str | None, call: Call) -> dict[str, Any]:
        changed = list(self._devices) if uuid is None else [uuid]
        if setting == "policy":
            self._check_policy(value)
        self._dispatcher.event(events.Set(setting, value, uuid), call.now_ns)
        if SETTINGS[setting].by_gpu:
            self._live.put(NODE, setting, value, changed)
            indices = [self._devices[each].index for each in changed]
            return {"gpus": changed, "indices": indices, **self._lasting()}
        self._live.put(NODE, setting, value)
        return {"host_shared_bytes": self._snapshot(call.now_ns).host_shared_bytes, **self._lasting()}

    def _check_policy(self, name: str) -> None:
        try:
            self._make_policy(name, "")
        except Exception as error:  # third-party code
            raise api.ControlError("policy", str(error) or repr(error)) from None

    def _set_share(self, request: api.SetShare, call: Call) -> dict[str, Any]:
        client = self._client(request, call)
        asked = {"share_request": request.request, "share_limit": request.limit}
        given = {name: new for name, new in asked.items() if new is not None}
        had = self._dispatcher.facts(client.client).rank
        values = {"share_request": had.share_request, "share_limit": had.share_limit, **given}
        if values["share_request"] > values["share_limit"]:
            raise api.ControlError(
                "share", f"the request {values['share_request']:g} would be above the limit {values['share_limit']:g}"
            )
        return {**self._set_client(client, given, None, call), **values}

    def _pause(self, request: api.Pause, call: Call) -> dict[str, Any]:
        client = self._client(request, call)
        return {**self._set_client(client, {"paused": True}, None, call), "paused": True}

    def _resume(self, request: api.Resume, call: Call) -> dict[str, Any]:
        client = self._client(request, call)
        owner = self._live.owner(client.client)
        self._live.drop(owner, "paused", None, by_operator=call.by_operator)
        self._settle(owner, call)
        return {**_identity(client), **self._lasting(owner), "paused": False}

    def _park(self, request: api.ParkClient, call: Call) -> dict[str, Any]:
        """Begins; the client's `parking` says how far it is."""
        client = self._client(request, call)
        self._dispatcher.event(events.Set("parked", request.parked, client=client.client), call.now_ns)
        return self._parking(client, call)

    def _migrate(self, request: api.MigrateClient, call: Call) -> dict[str, Any]:
        """Begins, or refuses: then the client moves to no GPU, and `why` says why."""
        client, uuid = self._client(request, call), self._gpu(request.gpu)
        assert uuid is not None
        self._dispatcher.event(events.Set("moved_to", uuid, client=client.client), call.now_ns)
        return {**self._parking(client, call), "gpu": uuid}

    def _end(self, request: api.EndClient, call: Call) -> dict[str, Any]:
        """Its connection is open, so its process id is still its own."""
        client = self._client(request, call)
        found = _identity(client)
        try:
            if found["process_id"] <= 1:
                raise ProcessLookupError
            end_process(found["process_id"], kill=request.kill)
        except OSError as error:
            text = f"the coordinator cannot end it ({error.strerror or 'its process is not visible here'})"
            raise api.ControlError("process", f"{text}; end it where it was started") from None
        return {**found, "killed": request.kill}

    def _parking(self, client: ClientSnapshot, call: Call) -> dict[str, Any]:
        now = self._dispatcher.scheduler.client_snapshot(client.client, call.now_ns)
        assert now is not None
        found = {"parking": now.parking, "why": now.parking_why, "moves_to": now.moves_to}
        return {**_identity(client), **found, "gpus": [seat.uuid for seat in now.seats]}

    def _set_client(
        self, client: ClientSnapshot, values: Mapping[str, Value], uuid: str | None, call: Call
    ) -> dict[str, Any]:
        """Sets values for all clients of the client's process or slot."""
        owner = self._live.owner(client.client)
        if owner.of_connection and not call.by_operator:
            raise api.ControlError("permission", "this program's process cannot be identified")
        for setting, value in values.items():
            self._live.put(owner, setting, value, (uuid,), by_operator=call.by_operator)
        self._settle(owner, call)
        return {**_identity(client), **self._lasting(owner)}

    def _settle(self, owner: Owner, call: Call) -> None:
        for each in self._live.clients_of(owner):
            self._dispatcher.settle(each, call.now_ns)

    def _unset(self, request: api.Unset, call: Call) -> dict[str, Any]:
        uuid, named = self._gpu(request.gpu), request.client is not None
        owner = self._live.owner(self._client(request, call).client) if named else None
        names = ("share_request", "share_limit") if request.setting == "share" else (request.setting,)
        undone = self._drop(owner, names, uuid, call)
        configured = self._configured()
        if not undone:
            raise api.ControlError("not_set", "no such live setting; see `nvshare-ctl status`")
        for live in undone:
            key = (live.setting, live.gpu)
            if live.owner == NODE and key in configured:
                self._dispatcher.event(events.Set(live.setting, configured[key], live.gpu), call.now_ns)
        for owner in {live.owner for live in undone}:
            self._settle(owner, call)
        return {"undone": [live.plain() for live in undone], **self._lasting()}

    def _place(self, request: api.Place, call: Call) -> dict[str, Any]:
        caller = Peer(call.process_id, call.user_id)
        return self._placements.place(request, caller, self._snapshot(call.now_ns), self._gpu)

    def _drop(self, owner: Owner | None, names: Sequence[str | None], uuid: str | None, call: Call) -> list[Live]:
        return [e for name in names for e in self._live.drop(owner, name, uuid, by_operator=call.by_operator)]

    def _lasting(self, owner: Owner = NODE) -> dict[str, Any]:
        """Stores live settings.  Empty if this owner's last, else when they end."""
        if owner.of_connection:
            return {"ends": "with the client's connection: its process cannot be identified"}
        self._live.save()
        problem = self._live.problem()
        return {} if problem is None else {"ends": f"with this coordinator: {problem}"}

    # --- names ------------------------------------------------------------------------------------------------------

    def _snapshot(self, now_ns: int) -> Snapshot:
        return self._dispatcher.scheduler.snapshot(now_ns)

    def _gpu(self, name: str | None) -> str | None:
        """A UUID, its unambiguous beginning, or an index."""
        if name is None or name in self._devices:
            return name
        if name.isdecimal():
            found = [device.uuid for device in self._devices.values() if device.index == int(name)]
        else:
            found = [uuid for uuid in self._devices if uuid.startswith(name)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(f"{device.index} ({uuid})" for uuid, device in self._devices.items())
        problem = "is ambiguous" if found else "is not a GPU of this coordinator"
        raise api.ControlError("gpu", f"{name!r} {problem}; the GPUs are {known}"[:2000])

    def _client(self, request: OfProgram, call: Call) -> ClientSnapshot:
        """The client that the request names.

        A user's own programs come before others of the same name.  Raises ControlError if the user may not change it.
        """
        name, rights, user_id = request.client or "", self._rights, call.user_id
        found = [
            each
            for each in self._snapshot(call.now_ns).clients
            if api.is_named(name, each.client, each.identity.process_id, each.identity.name)
            and (name == f"c{each.client}" or rights.may_name(user_id, each))
        ]
        if not call.by_operator:
            found = [each for each in found if rights.owns(user_id, each)] or found
        only = api.the_only(name, found, lambda c: f"c{c.client} (pid {c.identity.process_id}, {c.identity.name})")
        rights.check_change(user_id, request, only, lambda setting: self._live.ceilings(only.client, setting))
        return only


_ANSWERS: Final[dict[type[Any], Callable[[Administration, Any, Call], dict[str, Any]]]] = {
    api.Ping: Administration._ping,
    api.Status: Administration._status,
    api.Set: Administration._set,
    api.SetShare: Administration._set_share,
    api.Unset: Administration._unset,
    api.Pause: Administration._pause,
    api.Resume: Administration._resume,
    api.ParkClient: Administration._park,
    api.Place: Administration._place,
    api.MigrateClient: Administration._migrate,
    api.EndClient: Administration._end,
}


def _identity(client: ClientSnapshot) -> dict[str, Any]:
    found = {"client": client.client, "name": client.identity.name, "process_id": client.identity.process_id}
    return {**found, "slot": client.identity.group} if client.identity.group else found


def _sentence(request: api.Request, result: Mapping[str, Any]) -> str:
    """A request for the log: `set setting=quantum value=100ms`.  Users choose some of the texts."""
    values = request.model_dump(exclude_defaults=True) | {name: result[name] for name in _LOGGED if result.get(name)}
    if isinstance(request, api.Set):
        values["value"] = SETTINGS[request.setting].kind.show(request.value)
    texts = (",".join(value) if isinstance(value, (list, tuple)) else value for value in values.values())
    shown = " ".join((request.ask, *(f"{name}={text}" for name, text in zip(values, texts, strict=True))))
    return "".join(c if c.isprintable() else "?" for c in shown)


def plain(record: Any) -> dict[str, Any]:
    """A snapshot as values for msgpack and JSON; enumerations by their names in lower case.

    The getters are cached because a thousand clients have thirty values each and the loop waits meanwhile.
    """
    cls = type(record)
    known = _GETTERS.get(cls)
    if known is None:
        paths = _paths(record)
        named = tuple(_field_name(path) for path in paths)
        assert len(set(named)) == len(named), f"{cls.__name__}: two fields of one name"
        known = _GETTERS[cls] = (named, operator.attrgetter(*paths))
    names, values = known
    found = dict(zip(names, values(record), strict=True))
    for name, convert in _CONVERTED.get(cls, ()):
        found[name] = convert(found[name])
    return found


def _paths(record: Any, prefix: str = "") -> list[str]:
    """The fields of a record, those of records in it included."""
    paths = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        path = prefix + field.name
        paths += _paths(value, path + ".") if dataclasses.is_dataclass(value) else [path]
    return paths


def _field_name(path: str) -> str:
    """The last part of a path; figures of progress keep their prefix."""
    return path.replace(".", "_") if path.startswith("progress.") else path.rpartition(".")[2]


_GETTERS: Final[dict[type[Any], tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]]] = {}


def _name(member: Enum) -> str:
    return member.name.lower()


_CONVERTED: Final[dict[type[Any], tuple[tuple[str, Callable[[Any], Any]], ...]]] = {
    ClientSnapshot: (
        ("memory_mode", _name),
        ("job_class", _name),
        ("seats", lambda seats: [plain(seat) for seat in seats]),
    ),
    GpuSnapshot: (("sharing", _name),),
}


def _quantiles(samples: list[int]) -> dict[str, float] | None:
    """p50 and p99 of the samples in us; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return {
        "p50": ordered[len(ordered) // 2] / 1_000,
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1_000,
    }
