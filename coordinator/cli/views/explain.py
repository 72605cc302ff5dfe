"""`nvshare-ctl explain`: why the programs of each GPU share it as they do, from one `status`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from nvshare.coordinator.cli.views.words import first_of, state, why
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.model.statistics import RECENT_NS
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import format_duration, format_share, format_size

OVERRIDES: Final = {
    "exclusive": "the operator allows one program at a time",
    "concurrent": "the operator wants all programs side by side, as far as their memory fits",
}
_SIZES: Final = ("allocated_bytes", "recent_moved_bytes")
_FIGURES: Final = (
    *("client", "name", "process_id", "user_id", "job_class", "share_request", "share_limit"),
    *("state", "waiting_since_ns", "progress_normalised", "progress_busy_alone", "moved_from", "moved_why"),
    *("placed_alone", "placed_why"),
    *_SIZES,
)
_MOST_PAIRS: Final = 5
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
            {**{name: {**client, **seat}[name] for name in _FIGURES}, "waits_why": why(client, seat, status)}
            for client in status["clients"]
            for seat in client["seats"]
            if seat["uuid"] == each["uuid"]
        ]
        for seat in seats:
            seat["moved_from"] = index.get(seat["moved_from"], seat["moved_from"])
        running = [seat for seat in seats if seat["client"] in each["holders"]]
        waiting = [seat for seat in seats if seat not in running and seat["waits_why"]]
        shown = {"running": running, "waiting": waiting, "placed": [seat for seat in seats if seat["placed_why"]]}
        why_so = _headline(each, seats, waiting)
        found.append({**{name: each[name] for name in _RULES}, "why": why_so, **shown, "memory": _memory(each, seats)})
    if gpu is not None and len(found) != 1:
        raise ControlError("gpu", f"{gpu!r} is not one GPU of this coordinator; see `nvshare-ctl status`")
    return found


def _headline(gpu: Mapping[str, Any], seats: list[dict[str, Any]], waiting: list[dict[str, Any]]) -> str:
    """The plan's reason, and programs that it leaves out."""
    found = gpu["why"] if gpu["members"] else "no program may run now" if waiting else "no program wants the GPU"
    out = [f"{seat['name']} is {seat['state']}" for seat in seats if seat["state"] in ("paused", "stopped", "in debt")]
    return "; ".join((found, first_of(out, 3))) if out else found


def _memory(gpu: Mapping[str, Any], seats: list[dict[str, Any]]) -> dict[str, Any]:
    """What programs that do not fit together cost: bytes moved out and in, and time that turns waited for them."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(seats, 2)
        if a["allocated_bytes"] + b["allocated_bytes"] > gpu["capacity_bytes"]
        and a["recent_moved_bytes"] + b["recent_moved_bytes"] > 0
    ]
    pairs.sort(key=lambda pair: -pair[0]["recent_moved_bytes"] - pair[1]["recent_moved_bytes"])
    return {
        **{name: gpu[name] for name in ("allocated_bytes", "capacity_bytes")},
        "moved_bytes_per_minute": gpu["recent_moved_bytes"],
        "moving_share": gpu["recent_wait_ns"] / RECENT_NS,
        "pairs": [
            [{name: each[name] for name in ("client", "name", *_SIZES)} for each in pair]
            for pair in pairs[:_MOST_PAIRS]
        ],
    }


def lines(gpus: Iterable[Mapping[str, Any]], now_ns: int) -> list[str]:
    """The records for people."""
    text = []
    for gpu in gpus:
        text.append(f"GPU {gpu['index']} ({gpu['name']}): {gpu['why']}")
        automatic = f" (auto, {format_share(gpu['switch_share'])})" if gpu["quantum_automatic"] else ""
        quantum = f"quantum {format_duration(gpu['quantum_ns'])}{automatic}"
        text.append(f"  policy {gpu['policy']}, sharing {gpu['sharing']}, {quantum}")
        text += [f"  {sentence}" for sentence in (*notes(gpu), *_costs(gpu["memory"]))]
        for each in (*gpu["running"], *gpu["waiting"]):
            text.append(": ".join(filter(None, (f"  {state(each, each, now_ns)}", _program(each), each["waits_why"]))))
        for each in gpu["placed"]:
            alone = " alone" if each["placed_alone"] else ""
            text.append(f"  placed{alone}: {_who(each)}, {each['placed_why']}")
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


def _who(each: Mapping[str, Any]) -> str:
    return f"{each['name']} ({user_name(each['user_id'])}, {each['process_id']})"


def _costs(memory: Mapping[str, Any]) -> Iterator[str]:
    """What moving memory cost during the last minute."""
    if not memory["moved_bytes_per_minute"]:
        return
    moved, share = format_size(memory["moved_bytes_per_minute"]), memory["moving_share"]
    yield (
        f"the programs have {format_size(memory['allocated_bytes'])} of {format_size(memory['capacity_bytes'])}: in "
        f"the last minute {moved} moved, and turns waited for it {share:.1%} of the time"
    )
    for pair in memory["pairs"]:
        a, b = (
            f"{each['name']} ({format_size(each['allocated_bytes'])}, {format_size(each['recent_moved_bytes'])} moved)"
            for each in pair
        )
        yield f"{a} and {b} do not fit together"


def _program(each: Mapping[str, Any]) -> str:
    known = f"{_who(each)}, {class_name(each)}, progress {percent(each['progress_normalised'])}"
    if each["progress_busy_alone"]:
        known += f", keeps the GPU busy {percent(each['progress_busy_alone'])} of the time alone"
    if each["share_request"]:
        known += f", share request {percent(each['share_request'])}"
    if each["share_limit"] < 1:
        known += f", share limit {percent(each['share_limit'])}"
    if each["moved_from"]:
        known += f", moved here from {each['moved_from']}: {each['moved_why']}"
    return known
