"""Sentences of `nvshare-ctl status`: gangs, live settings, programs that may not run, host memory, MPS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.words import why
from nvshare.coordinator.model.settings import SETTINGS
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import count, format_duration, format_size


def gang_lines(status: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """One line for each gang."""
    lines = []
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    for gang in status.get("gangs", ()):
        members = ", ".join(names.get(client, f"c{client}") for client in gang["clients"])
        where = ", ".join(indices[uuid] for uuid in gang["gpus"])
        turns = f"{gang['turns']} turns together"
        if gang["turns"]:
            turns += f", its GPUs free after {format_duration(gang['gathered_ns'] // gang['turns'])} on average"
        lines.append(f"gang {gang['name']}: {members} on GPU {where}, {gang['state']}, {turns}")
    return lines


def live_lines(settings: Iterable[Mapping[str, Any]], status: Mapping[str, Any] | None = None) -> list[str]:
    """One line for each live setting and owner; equal values on several GPUs share a line."""
    gpus = {gpu["uuid"]: str(gpu["index"]) for gpu in (status or {}).get("gpus", ())}
    names = {client["process_id"]: client["name"] for client in (status or {}).get("clients", ())}
    together: dict[tuple[str, ...], list[str]] = {}
    for each in settings:
        value = SETTINGS[each["setting"]].kind.show(each["value"])
        pid, owner = each["process_id"], ""
        if pid:
            owner = f" of {names[pid]} (pid {pid})" if pid in names else f" of pid {pid}"
        elif each["slot"]:
            owner = f" of slot {each['slot']}"
        where = together.setdefault((each["setting"].replace("_", "-"), owner, value), [])
        if each["gpu"] is not None:
            where.append(gpus.get(each["gpu"], each["gpu"]))
    return [
        f"{setting}{owner}: {value}" + (f" on GPU {', '.join(where)}" if where else "")
        for (setting, owner, value), where in together.items()
    ]


def room_lines(status: Mapping[str, Any]) -> list[str]:
    """Clients that may not run, with the reason, and with the remedy where it is immovable memory of others."""
    lines = []
    for client in status["clients"]:
        for seat in client["seats"]:
            if seat["reason"] in ("paused", "stopped", "debt", "stuck", "refused"):
                on = f"{client['name']} ({client['process_id']}), {seat['state']} on GPU {_index(status, seat)}"
                lines.append(f"{on}: {why(client, seat, status)}")
            if not seat.get("lacking_bytes"):
                continue
            others = [
                f"{other['name']} ({other['process_id']}) {format_size(its['immovable_bytes'])}"
                for other in status["clients"]
                for its in other["seats"]
                if other is not client and its["uuid"] == seat["uuid"] and its["immovable_bytes"]
            ]
            needs, room = seat["allocated_bytes"], seat["room_bytes"]
            lines.append(
                f"{client['name']} ({client['process_id']}) needs {format_size(needs)} of GPU {_index(status, seat)} "
                f"and has room for {format_size(room)}: it waits.  Immovable: {', '.join(others)}.  "
                "End or shrink one of these"
            )
    return lines


WHY_NOT_SWAP: Final = {
    "managed": "not every GPU has virtual memory management, which swap needs",
    "device": "not every GPU has virtual memory management, and none moves managed memory while it is in use",
    "integrated": "a GPU has no memory but the host's, within which swap would move nothing",
}
"""Why the hook chose this memory mode for a program that was started with `auto`."""


def mode_lines(status: Mapping[str, Any]) -> list[str]:
    """Clients for which `--memory auto` is not `swap`, with the reason."""
    integrated = any(gpu.get("integrated") for gpu in status["gpus"])
    return [
        f"{client['name']} ({client['process_id']}) has memory mode {client['memory_mode']}: "
        f"{WHY_NOT_SWAP['integrated' if integrated else client['memory_mode']]}"
        for client in status["clients"]
        if client.get("memory_auto") and client["memory_mode"] in WHY_NOT_SWAP
    ]


def integrated_lines(status: Mapping[str, Any]) -> list[str]:
    """One line for each GPU that shares its memory with the host: what programs may have there, and what is left."""
    return [
        f"GPU {gpu['index']} has no memory but the host's: programs may have {format_size(gpu['capacity_bytes'])} of "
        f"{format_size(gpu['total_bytes'])} (capacity); {format_size(gpu['available_bytes'])} are free now, of which "
        f"the host keeps {format_size(gpu['kept_bytes'])}"
        for gpu in status["gpus"]
        if gpu.get("integrated")
    ]


def _index(status: Mapping[str, Any], seat: Mapping[str, Any]) -> int:
    return next(int(gpu["index"]) for gpu in status["gpus"] if gpu["uuid"] == seat["uuid"])


def host_lines(status: Mapping[str, Any]) -> list[str]:
    """The host budget; with several owners, or after a refusal, also each owner's part."""
    shared, budget = format_size(status["host_shared_bytes"]), format_size(status["host_budget_bytes"])
    lines = [f"host budget: {shared} of {budget} pinned for clients"]
    owners = status.get("host_owners", ())
    for owner in owners if len(owners) > 1 or any(each["refused"] for each in owners) else ():
        number = count(owner["clients"], "program")
        spare = format_size(owner["spare_bytes"]) if owner["spare_bytes"] else "no"
        times = "once" if owner["refused"] == 1 else f"{owner['refused']} times"
        refused = f"; refused {times}" if owner["refused"] else ""
        lines.append(
            f"  {owner['owner']}: {number} with {format_size(owner['shared_bytes'])}, {spare} more available{refused}"
        )
    return lines


def mps_line(mps: Mapping[str, Any]) -> str:
    """State of MPS; for a refusal its reason."""
    if mps["mode"] == "off":
        return "MPS: off"
    state, programs = mps["state"], count(mps["programs"], "program")
    if state == "refused":
        return f"MPS: refused, programs run without it: {mps['reason']}"
    if state == "idle":
        return "MPS: on, starts for the first user whose program asks"
    return f"MPS: {state} for user {user_name(mps['user'])}, {programs}"
