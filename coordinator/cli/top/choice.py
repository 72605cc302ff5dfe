"""The choices of the user of `top`.  A key changes a choice, or makes a request to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.users import user_name

CLASSES: Final = ("batch", "interactive", "best_effort")
_QUANTA_MS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000),
)


class Row(NamedTuple):
    """A program on a GPU; `seat` and `gpu` are None for a program that uses no GPU."""

    client: Mapping[str, Any]
    seat: Mapping[str, Any] | None
    gpu: Mapping[str, Any] | None


def _of_seat(name: str) -> Callable[[Row], float]:
    return lambda row: -float(row.seat[name]) if row.seat is not None else 1.0


def _since(row: Row) -> float:
    since_ns = None if row.seat is None else row.seat["waiting_since_ns"]
    return float("inf") if since_ns is None else float(since_ns)


SORTS: Final[dict[str, Callable[[Row], Any]]] = {
    "share": _of_seat("recent_share"),
    "progress": _of_seat("progress_normalised"),
    "memory": _of_seat("allocated_bytes"),
    "wait": _since,
    "user": lambda row: row.client["user_id"],
    "name": lambda row: row.client["name"],
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The order of the programs and the selected one."""

    sort: str = "share"
    selected: tuple[int, str | None] | None = None
    """Client and GPU; None: the first row."""
    said: str = ""
    """Result of the last key."""
    ended: bool = False
    filter: str = ""
    """Only programs with it in their name or user are shown."""
    typing: bool = False
    """Keys change the filter."""
    ending: int | None = None
    """The client that `y` ends."""
    help: bool = False


def rows(status: Mapping[str, Any], choice: Choice) -> list[Row]:
    """The programs in the chosen order."""
    gpus = {gpu["uuid"]: gpu for gpu in status["gpus"]}
    found = [
        Row(client, seat, None if seat is None else gpus[seat["uuid"]])
        for client in status["clients"]
        for seat in client["seats"] or (None,)
        if any(choice.filter.casefold() in text.casefold() for text in (client["name"], user_name(client["user_id"])))
    ]
    return sorted(found, key=lambda row: (SORTS[choice.sort](row), row.client["client"]))


def key_of(row: Row) -> tuple[int, str | None]:
    """The key of a row."""
    return (row.client["client"], None if row.gpu is None else row.gpu["uuid"])


def place_of(found: list[Row], choice: Choice) -> int:
    """The selected row; 0 once it is gone."""
    return next((place for place, row in enumerate(found) if key_of(row) == choice.selected), 0)


def press(key: str, choice: Choice, status: Mapping[str, Any]) -> tuple[Choice, api.Request | None]:
    """The choice after a key, and the request that the key means."""
    choice = replace(choice, said="")
    if choice.typing:
        return _typed(key, choice), None
    if choice.ending is not None:
        sure = api.EndClient(client=f"c{choice.ending}") if key in ("y", "Y") else None
        return replace(choice, ending=None), sure
    if choice.help:
        return replace(choice, help=False), None
    match key:
        case "q" | "Q":
            return replace(choice, ended=True), None
        case "?" | "h":
            return replace(choice, help=True), None
        case "/":
            return replace(choice, typing=True), None
        case "escape":
            return replace(choice, filter=""), None
        case "s":
            names = list(SORTS)
            return replace(choice, sort=names[(names.index(choice.sort) + 1) % len(names)]), None
    found = rows(status, choice)
    place = place_of(found, choice)
    if key in ("up", "down", "k", "j") and found:
        place += 1 if key in ("down", "j") else -1
        return replace(choice, selected=key_of(found[min(max(0, place), len(found) - 1)])), None
    row = found[place] if found else None
    if row is not None:  # the request's row stays selected, wherever its order puts it
        choice = replace(choice, selected=key_of(row))
        if key == "x":
            return replace(choice, ending=row.client["client"]), None
    return choice, _request(key, row, status)


def _typed(key: str, choice: Choice) -> Choice:
    match key:
        case "\n" | "\r":
            return replace(choice, typing=False)
        case "escape":
            return replace(choice, typing=False, filter="")
        case "\x7f" | "\b":
            return replace(choice, filter=choice.filter[:-1])
    shown = len(key) == 1 and key.isprintable() and len(choice.filter) < 63
    return replace(choice, filter=choice.filter + key) if shown else choice


def _request(key: str, row: Row | None, status: Mapping[str, Any]) -> api.Request | None:
    if key in "+-a" and status["gpus"]:
        gpu = status["gpus"][0] if row is None or row.gpu is None else row.gpu
        quantum_ns = None if key == "a" else _next_quantum(gpu["quantum_ns"], key)
        return api.Set(setting="quantum", value=quantum_ns, gpu=gpu["uuid"])
    if row is None:
        return None
    client = f"c{row.client['client']}"
    if key in ("p", " "):
        return api.Resume(client=client) if row.client["paused"] else api.Pause(client=client)
    if key == "c":
        now = CLASSES.index(row.client["job_class"])
        return api.Set(setting="class", client=client, value=CLASSES[(now + 1) % len(CLASSES)])
    return None


def _next_quantum(quantum_ns: int, key: str) -> int:
    quanta = [quantum_ms * 1_000_000 for quantum_ms in _QUANTA_MS]
    if key == "+":
        return next((each for each in quanta if each > quantum_ns), quanta[-1])
    return next((each for each in reversed(quanta) if each < quantum_ns), quanta[0])


def answer(request: api.Request, result: Mapping[str, Any]) -> str:
    """The result of a request, in one line."""
    match request:
        case api.Set(setting="quantum", value=quantum_ns):
            done = f"the quantum is {f'{quantum_ns / 1e6:g} ms' if isinstance(quantum_ns, int) else 'automatic'}"
        case api.Set(value=job_class):
            done = f"{result['name']} is {str(job_class).replace('_', '-')}"
        case api.Pause():
            done = f"{result['name']} is paused"
        case api.EndClient():
            done = f"{result['name']} got SIGTERM"
        case _:
            done = f"{result['name']} is resumed"
    return f"{done}; it ends {result['ends']}" if "ends" in result else done
