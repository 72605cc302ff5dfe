"""The tables and lines of `nvshare-ctl`.  They show nothing that --json lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nvshare.coordinator.cli.ctl_explain import class_name, percent
from nvshare.coordinator.cli.ctl_mps import mps_line
from nvshare.coordinator.cli.ctl_slots import pod_of
from nvshare.coordinator.units import format_duration, format_share, format_size


def show_status(status: Mapping[str, Any]) -> None:
    """Prints one line for each GPU, then problems, memory, live settings and gangs."""
    names = {client["client"]: f"{client['name']} ({client['process_id']})" for client in status["clients"]}
    table = _table("GPU", "name", "policy", "sharing", "quantum", "capacity", "resident", "clients", "waiting")
    for title in ("running", "leases", "hand-over", "switch", "overdue"):
        table.add_column(title)
    for gpu in status["gpus"]:
        automatic = f" (auto, {format_share(gpu['switch_share'])})" if gpu["quantum_automatic"] else ""
        quantum = format_duration(gpu["quantum_ns"]) + automatic
        handover = gpu["handovers_us"]
        running = [names.get(client, str(client)) for client in dict.fromkeys((*gpu["members"], *gpu["holders"]))]
        shown = ", ".join(running[:3]) + (f" and {len(running) - 3} more" if len(running) > 3 else "")
        table.add_row(
            str(gpu["index"]),
            escape(gpu["name"]),
            escape(gpu["policy"]),
            gpu["sharing"],
            quantum,
            format_size(gpu["capacity_bytes"]),
            format_size(gpu["resident_bytes"]),
            str(gpu["clients"]),
            str(gpu["waiting"]),
            "recovering" if gpu["recovering"] else escape(shown) or "-",
            str(gpu["grants"]),
            f"{handover['p50']:.0f}us" if handover else "-",
            format_duration(gpu["switch_cost_ns"]) if gpu["switch_cost_ns"] else "-",
            str(gpu["overdue"]),
        )
    console = console_for_people()
    kind = "simulated " if status["simulated"] else ""
    console.print(f"coordinator {status['pid']} in {escape(status['runtime_dir'])}, {len(status['gpus'])} {kind}GPU(s)")
    console.print(table)
    for problem in status.get("problems", ()):
        console.print(escape(f"problem: {problem}"))
    for line in (mps_line(status["mps"]), *host_lines(status), *room_lines(status)):
        console.print(escape(line))
    for gpu in status["gpus"]:
        if gpu.get("expected_stopped"):
            console.print(
                f"GPU {gpu['index']} is not granted: process {gpu['expected_process']} held it before the restart "
                "and is stopped; continue it (kill -CONT) or end it"
            )
    for line in live_lines(status.get("live", ()), status):
        console.print(escape(f"live setting: {line}"))
    for line in _gang_lines(status, names):
        console.print(escape(line))


def _gang_lines(status: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    lines = []
    indices = {gpu["uuid"]: str(gpu["index"]) for gpu in status["gpus"]}
    for gang in status.get("gangs", ()):
        members = ", ".join(names.get(client, str(client)) for client in gang["clients"])
        where = ", ".join(indices[uuid] for uuid in gang["gpus"])
        turns = f"{gang['turns']} turns together"
        if gang["turns"]:
            turns += f", its GPUs free after {format_duration(gang['gathered_ns'] // gang['turns'])} on average"
        lines.append(f"gang {gang['name']}: {members} on GPU {where}, {gang['state']}, {turns}")
    return lines


_SHOWN: Final[dict[str, Callable[[Any], str]]] = {
    "quantum": lambda value: "auto" if value is None else format_duration(value),
    "switch_share": format_share,
    "host_budget": format_size,
    "class": lambda value: value.replace("_", "-"),
    "share_request": format_share,
    "share_limit": format_share,
    "limit": lambda value: format_size(value) if value else "none",
    "paused": lambda value: "yes",
}


def live_lines(settings: Iterable[Mapping[str, Any]], status: Mapping[str, Any] | None = None) -> list[str]:
    """One line for each live setting and owner; equal values on several GPUs share a line."""
    gpus = {gpu["uuid"]: str(gpu["index"]) for gpu in (status or {}).get("gpus", ())}
    names = {client["process_id"]: client["name"] for client in (status or {}).get("clients", ())}
    together: dict[tuple[str, ...], list[str]] = {}
    for each in settings:
        value = _SHOWN.get(each["setting"], str)(each["value"])
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
    """Clients that lack memory beside immovable memory of others, with the remedy."""
    lines = []
    for client in status["clients"]:
        for seat in client["seats"]:
            if seat.get("shut_out") and not seat["lacking_bytes"]:
                lines.append(
                    f"{client['name']} ({client['process_id']}) has no room on GPU {_index(status, seat)}: the memory "
                    "of other clients there could not be moved; the coordinator retries every few seconds"
                )
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


def _index(status: Mapping[str, Any], seat: Mapping[str, Any]) -> int:
    return next(int(gpu["index"]) for gpu in status["gpus"] if gpu["uuid"] == seat["uuid"])


def host_lines(status: Mapping[str, Any]) -> list[str]:
    """The host budget; with several owners, or after a refusal, also each owner's part."""
    shared, budget = format_size(status["host_shared_bytes"]), format_size(status["host_budget_bytes"])
    lines = [f"host budget: {shared} of {budget} pinned for clients"]
    owners = status.get("host_owners", ())
    for owner in owners if len(owners) > 1 or any(each["refused"] for each in owners) else ():
        number = f"{owner['clients']} program{'s' if owner['clients'] != 1 else ''}"
        spare = format_size(owner["spare_bytes"]) if owner["spare_bytes"] else "no"
        times = "once" if owner["refused"] == 1 else f"{owner['refused']} times"
        refused = f"; refused {times}" if owner["refused"] else ""
        lines.append(
            f"  {owner['owner']}: {number} with {format_size(owner['shared_bytes'])}, {spare} more available{refused}"
        )
    return lines


def show_memory(status: Mapping[str, Any]) -> None:
    """Prints one line for each GPU, one for each of its clients, and the host memory."""
    table = _table("GPU", "client", "allocated", "resident", "evicted", "pinned", "host", "limit")
    for title in ("moved out", "moved in", "hidden", "exposed", "waited", "late", "failed", "order"):
        table.add_column(title)
    for gpu in status["gpus"]:
        evicted = gpu["allocated_bytes"] - gpu["resident_bytes"]
        table.add_row(
            str(gpu["index"]),
            f"all {gpu['clients']}",
            *_sizes({**gpu, "evicted_bytes": evicted}),
            format_size(gpu["capacity_bytes"]),
            format_size(gpu["evicted_bytes"]),
            format_size(gpu["restored_bytes"]),
            format_duration(gpu["hidden_move_ns"]),
            format_duration(gpu["exposed_move_ns"]),
            format_duration(gpu["moved_ns"]),
            str(gpu["late_switches"]),
            str(gpu["failed_orders"]),
            f"{gpu['moving']} open" if gpu["moving"] else "-",
        )
        for client in status["clients"]:
            for seat in client["seats"]:
                if seat["uuid"] == gpu["uuid"]:
                    table.add_row("", f"{client['client']} {escape(client['name'])}", *_memory_row(seat))
    console = console_for_people()
    console.print(table)
    for line in (*host_lines(status), *room_lines(status)):
        console.print(escape(line))
    for client in status["clients"]:
        if client["host_share_bytes"]:
            share = format_size(client["host_share_bytes"])
            console.print(f"  {client['client']} {escape(client['name'])} ({client['process_id']}): {share}")


def _sizes(values: Mapping[str, Any]) -> list[str]:
    return [format_size(values[f"{kind}_bytes"]) for kind in ("allocated", "resident", "evicted", "pinned", "host")]


def _memory_row(seat: Mapping[str, Any]) -> list[str]:
    return [
        *_sizes(seat),
        format_size(seat["limit_bytes"]) if seat["limit_bytes"] else "-",
        format_size(seat["moved_out_bytes"]),
        format_size(seat["moved_in_bytes"]),
        format_duration(seat["hidden_move_ns"]),
        format_duration(seat["exposed_move_ns"]),
        "",
        "",
        str(seat["failed_orders"]),
        seat["moving"] or "-",
    ]


def show_clients(status: Mapping[str, Any]) -> None:
    """Prints one line for each client on each GPU."""
    if not status["clients"]:
        console_for_people().print("no clients")
        return
    indices = {gpu["uuid"]: gpu["index"] for gpu in status["gpus"]}
    table = _table("id", "pid", "name", "GPU", "state", "class", "prio", "weight", "progress")
    for title in ("leases", "held", "max wait", "allocated"):
        table.add_column(title)
    pods = {slot["slot"]: pod_of(slot) for slot in status.get("slots", ())}
    gangs = any(client["gang"] for client in status["clients"])
    for title in (*(("gang",) if gangs else ()), *(("slot", "pod") if pods else ())):
        table.add_column(title)
    for client in status["clients"]:
        tail = [escape(client["gang"]) or "-"] if gangs else []
        tail += [escape(client["group"]) or "-", escape(pods.get(client["group"], "-"))] if pods else []
        head = (str(client["client"]), str(client["process_id"]), escape(client["name"]))
        rank = (class_name(client), str(client["priority"]), str(client["weight"]))
        for seat in client["seats"]:
            state = "running" if seat["phase"] == "holding" else seat["phase"]
            state = "paused" if client["paused"] else "no room" if seat["shut_out"] else state
            if seat["waiting_since_ns"] is not None and not client["paused"]:
                state += " " + format_duration(max(0, status["now_ns"] - seat["waiting_since_ns"]))
            table.add_row(
                *head,
                str(indices[seat["uuid"]]),
                state,
                *rank,
                percent(seat["progress_normalised"]),
                str(seat["leases"]),
                format_duration(seat["used_ns"]),
                format_duration(seat["max_wait_ns"]),
                format_size(seat["allocated_bytes"]),
                *tail,
            )
        if not client["seats"]:
            state = "paused" if client["paused"] else "idle"
            table.add_row(*head, "-", state, *rank)
    console_for_people().print(table)


def event_line(event: Mapping[str, Any]) -> str:
    """`seconds kind key=value ...`; seconds of the node's monotonic clock."""
    values = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("seq", "at_ns", "kind"))
    return f"{event['at_ns'] / 1e9:.6f} {event['kind']} {values}"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title)
    return table


def console_for_people() -> Console:
    """A console of the terminal's width; wide without a terminal, so that scripts get whole lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=240)
