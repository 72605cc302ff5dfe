"""`nvshare-ctl explain`: why the programs of each GPU share it as they do, from one `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import format_duration, format_share

OVERRIDES: Final = {
    "exclusive": "the operator allows one program at a time",
    "concurrent": "the operator wants all programs side by side, as far as their memory fits",
}
_FIGURES: Final = (
    *("client", "name", "process_id", "user_id", "job_class", "share_request", "share_limit"),
    *("phase", "waiting_since_ns", "progress_normalised", "progress_busy_alone", "moved_from", "moved_why"),
)
_RULES: Final = (
    *("index", "uuid", "name", "policy", "sharing", "quantum_ns", "quantum_automatic", "switch_share"),
    *("switch_cost_ns", "held_back", "crowded", "slot_of_gang"),
)


def percent(part: float) -> str:
    """`97%`; "-" for an unknown figure, which is 0."""
    return f"{part:.0%}" if part else "-"


def class_name(client: Mapping[str, Any]) -> str:
    """The class as the command line spells it."""
    return str(client["job_class"]).replace("_", "-")


def explanation(status: Mapping[str, Any], gpu: str | None = None) -> list[dict[str, Any]]:
    """A record for each GPU: the reason, the settings, the running set and who waits.  Raises ControlError."""
    found = []
    index = {each["uuid"]: f"GPU {each['index']}" for each in status["gpus"]}
    for each in status["gpus"]:
        if gpu not in (None, str(each["index"])) and not each["uuid"].startswith(gpu):
            continue
        seats = [
            {name: {**client, **seat}[name] for name in _FIGURES}
            for client in status["clients"]
            for seat in client["seats"]
            if seat["uuid"] == each["uuid"]
        ]
        for seat in seats:
            seat["moved_from"] = index.get(seat["moved_from"], seat["moved_from"])
        place = {client: number for number, client in enumerate(each["members"])}
        running = sorted((s for s in seats if s["client"] in place), key=lambda s: place[s["client"]])
        waiting = [s for s in seats if s["client"] not in place and s["waiting_since_ns"] is not None]
        why = each["why"] if running else "no program wants the GPU"
        found.append({**{name: each[name] for name in _RULES}, "why": why, "running": running, "waiting": waiting})
    if gpu is not None and len(found) != 1:
        raise ControlError("gpu", f"{gpu!r} is not one GPU of this coordinator; see `nvshare-ctl status`")
    return found


def lines(gpus: Iterable[Mapping[str, Any]], now_ns: int) -> list[str]:
    """The records for people."""
    text = []
    for gpu in gpus:
        text.append(f"GPU {gpu['index']} ({gpu['name']}): {gpu['why']}")
        automatic = f" (auto, {format_share(gpu['switch_share'])})" if gpu["quantum_automatic"] else ""
        quantum = f"quantum {format_duration(gpu['quantum_ns'])}{automatic}"
        text.append(f"  policy {gpu['policy']}, sharing {gpu['sharing']}, {quantum}")
        text += [f"  {sentence}" for sentence in notes(gpu)]
        text += [f"  running: {_program(each)}" for each in gpu["running"]]
        for each in gpu["waiting"]:
            waited_ns = max(0, now_ns - each["waiting_since_ns"])
            text.append(f"  waiting for {format_duration(waited_ns)}: {_program(each)}")
    return text


def notes(gpu: Mapping[str, Any]) -> list[str]:
    """Conditions that change the policy's plan."""
    found = []
    if gpu["sharing"] in OVERRIDES:
        found.append(f"{OVERRIDES[gpu['sharing']]} (`nvshare-ctl set sharing`)")
    if gpu["slot_of_gang"]:
        found.append(f"gang {gpu['slot_of_gang']} has the GPU for its turn")
    if gpu["crowded"]:
        found.append("a program was left out: its memory does not fit beside the others'")
    if gpu["held_back"]:
        cost = format_duration(gpu["switch_cost_ns"])
        found.append(f"the next switch is held back: switches cost {cost} on average, too much of the time")
    return found


def _program(each: Mapping[str, Any]) -> str:
    who = f"{each['name']} ({user_name(each['user_id'])}, {each['process_id']})"
    known = f"{who}, {class_name(each)}, progress {percent(each['progress_normalised'])}"
    if each["progress_busy_alone"]:
        known += f", keeps the GPU busy {percent(each['progress_busy_alone'])} of the time alone"
    if each["share_request"]:
        known += f", share request {percent(each['share_request'])}"
    if each["share_limit"] < 1:
        known += f", share limit {percent(each['share_limit'])}"
    if each["moved_from"]:
        known += f", moved here from {each['moved_from']}: {each['moved_why']}"
    return known
