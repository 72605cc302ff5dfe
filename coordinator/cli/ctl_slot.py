"""`nvshare-ctl slot`: slots without Kubernetes, for batch systems and hubs.

A slot's socket decides share, limits and GPUs of the programs that connect through it, whatever their environment says.
Only one user may connect.  The coordinator needs --slots-dir.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import pwd
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.cli.ctl_call import Json, Where, call, directory_of, fail, parse_argument, refusals
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.kubernetes.slots import slot as slots
from nvshare.coordinator.kubernetes.slots.slot import Slot, SlotError
from nvshare.coordinator.model import profile
from nvshare.coordinator.model.profile import PROFILE
from nvshare.coordinator.system.runtime_dir import RuntimeDir
from nvshare.coordinator.units import parse_part, parse_size

app = typer.Typer(no_args_is_help=True, help="Give one user's programs a fixed part of GPUs: a slot.")
_SERVED_WITHIN_S: Final = 10.0

Name = Annotated[str, typer.Argument(help="such as slurm-1234")]
SlotsDir = Annotated[Path, typer.Option(envvar="NVSHARE_SLOTS_DIR", help="the coordinator's --slots-dir")]
_DEFAULT: Final = Path("/run/nvshare/slots")


def _add(
    context: typer.Context,
    name: Name,
    user: Annotated[str, typer.Option(help="the only user whose programs may use it: name or id")],
    gpu: Annotated[str, typer.Option(help="indices or UUIDs, separated by commas")] = "0",
    slots_dir: SlotsDir = _DEFAULT,
    as_json: Json = False,
    where: Where = None,
    **given: str | None,
) -> None:
    """Make or change a slot, and print its directory, which is NVSHARE_RUNTIME_DIR for the user's nvshare-run."""
    runtime = directory_of(context, where)
    with refusals(as_json):
        gpus = _gpus(call(runtime, api.Status())["gpus"], gpu)
    try:
        policy = {row.word: text for row in profile.of_slots() if (text := given[row.field]) is not None}
        if "memory_limit" in policy:
            size = parse_argument(lambda text: _bytes(text, gpus), policy["memory_limit"], "--memory-limit")
            policy["memory_limit"] = str(size)
        for word, text in policy.items():
            parse_argument(PROFILE[word].read, text, _flag(word))
        uuids, now_s = tuple(each["uuid"] for each in gpus), time.time()
        slot = Slot(
            slot=slots.check_name(name), allocation=uuid.uuid4().hex, allocated_at_s=now_s, gpus=uuids,
            device_ids=uuids, user_id=parse_argument(_user_id, user, "--user"), policy=policy,
        )  # fmt: skip
        place = _put(slots_dir.absolute(), slot, runtime)
    except (SlotError, OSError) as error:
        fail(ControlError("slot", str(error)), as_json)
    typer.echo(json.dumps({"slot": name, "directory": str(place)}) if as_json else str(place))


def _flag(word: str) -> str:
    return "--" + word.replace("_", "-")


def with_profile(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each setting that slots have."""
    own = inspect.signature(command, eval_str=True)
    found = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for row in profile.of_slots():
        option = typer.Option(_flag(row.word), metavar=row.metavar, help=row.help)
        kind = Annotated[str | None, option]
        found.append(inspect.Parameter(row.field, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=None))
    command.__signature__ = own.replace(parameters=found)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in found}
    return command


app.command("add")(with_profile(_add))


@app.command()
def remove(name: Name, slots_dir: SlotsDir = _DEFAULT, as_json: Json = False) -> None:
    """Remove a slot, also without a coordinator.  Programs that run keep their connections and get no other GPU."""
    try:
        slots.remove(slots_dir.absolute(), name)
    except (SlotError, OSError) as error:
        fail(ControlError("slot", str(error)), as_json)


def _put(slots_dir: Path, slot: Slot, runtime: RuntimeDir) -> Path:
    """Writes the slot and returns its directory when the coordinator listens there.  Raises SlotError."""
    slots.prepare(slots_dir)
    place = slots_dir / slot.slot
    before = slots.read(place)
    if before is not None and before.user_id == slot.user_id:  # its programs go on with what is new
        slot = slot.model_copy(update={"allocation": before.allocation})
    else:
        slots.remove(slots_dir, slot.slot)
    slots.write(slots_dir, slot)
    for link in (runtime.control_socket, runtime.events_socket, runtime.daemon_mark):  # as in a runtime directory
        with contextlib.suppress(FileExistsError):
            (place / link.name).symlink_to(link)
    deadline = time.monotonic() + _SERVED_WITHIN_S
    while not (served := place / slots.SOCKET_FILE).exists() or served.stat().st_uid != slot.user_id:
        if time.monotonic() > deadline:
            slots.remove(slots_dir, slot.slot)
            raise SlotError(
                f"{place}: no coordinator listens there for user {slot.user_id}; run it as root with "
                f"--slots-dir {slots_dir}, and see its log"
            )
        time.sleep(0.005)
    return place


def _gpus(known: list[dict[str, Any]], names: str) -> list[dict[str, Any]]:
    """The named GPUs of a status.  Raises ControlError."""
    found = []
    for name in names.split(","):
        matches = [gpu for gpu in known if name in (str(gpu["index"]), gpu["uuid"])]
        if len(matches) != 1:
            there = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in known)
            raise ControlError("gpu", f"there is no GPU {name!r}; this coordinator has {there}")
        found += matches
    return found


def _bytes(text: str, gpus: list[dict[str, Any]]) -> int:
    """A size, or a part of the smallest GPU's capacity.  Raises ValueError."""
    if not text.endswith("%"):
        return parse_size(text)
    return int(parse_part(text) * min(gpu["capacity_bytes"] for gpu in gpus))


def _user_id(user: str) -> int:
    """Raises ValueError."""
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ValueError(f"no user {user!r} on this machine") from None
