"""One frame of `top`: for each GPU what runs and why, then one line for each program."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.text import Text

from nvshare.coordinator.cli.top.choice import CLASSES, SORTS, Choice, Row, place_of, rows
from nvshare.coordinator.cli.top.history import History
from nvshare.coordinator.cli.views.explain import class_name, explanation, notes, percent
from nvshare.coordinator.cli.views.slots import pod_of
from nvshare.coordinator.cli.views.table import Column, cut, layout, number, text, word
from nvshare.coordinator.cli.views.words import card_words, duration, programs, quantum, size, size_of, state
from nvshare.coordinator.system.users import user_name
from nvshare.coordinator.units import count, format_duration

BARS: Final = {True: ("█", "▒", "░"), False: ("#", "=", ".")}
"""Resident, evicted, free: with and without Unicode."""
_SIZES_FROM: Final = 88
"""From this width on, programs have a figure of their memory."""
_BARS_FROM: Final = 112
"""From this width on, programs have a bar and their limit."""
_COLOURS: Final = {"running": "green", "waiting": "yellow", "no room": "red", "paused": "magenta", "overdue": "red"}


@dataclass(frozen=True, slots=True)
class Screen:
    """The terminal of a frame.  No `height`: all rows are shown."""

    width: int = 80
    height: int | None = None
    clock: str = ""
    unicode: bool = True
    live: bool = True
    """There are keys, so one program is selected."""


HELP: Final = (
    ("up, down, k, j", "select a program"),
    ("/", "show only programs whose name or user has these letters; Enter keeps them, Escape shows all again"),
    ("s", f"sort by the next of: {', '.join(SORTS)}"),
    ("p, Space", "pause the selected program, or resume it"),
    ("c", f"change its class: {', '.join(CLASSES).replace('_', '-')}"),
    ("x", "end it (SIGTERM), after a question"),
    ("+, -, a", "a longer or shorter quantum of its GPU, or an automatic one"),
    ("q", "quit"),
)


def frame(
    status: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    choice: Choice,
    screen: Screen,
    history: History | None = None,
) -> list[Text]:
    """The lines.  `before` is an earlier reply, for rates; None: none are shown."""
    if choice.help:
        lines = [Text("Keys of nvshare-ctl top", style="bold"), Text()]
        lines += [Text(cut(f"  {key:<16}{what}", screen.width)) for key, what in HELP]
        return [*lines, Text(), Text("any key: back", style="dim")]
    gpus = count(len(status["gpus"]), "simulated GPU" if status["simulated"] else "GPU")
    head = f"nvshare top  {screen.clock}  {gpus}, {count(len(status['clients']), 'program')}"
    top = Text(cut(head, screen.width), style="bold")
    names = programs(status)
    above = [line for gpu in _gpus(status, before) for line in gpu.lines(names, screen, history)]
    if screen.height is not None and len(above) > screen.height // 2 + 3:
        above = [Text(), *(gpu.one_line(names, screen) for gpu in _gpus(status, before))][: screen.height // 2]
    found = rows(status, choice)
    table = _table(found, status, screen)
    place = place_of(found, choice) if screen.live else -1
    body = [_program(line, index == place) for index, line in enumerate(table[1:])]
    if screen.height is not None:
        body = _window(body, place, max(1, screen.height - len(above) - 4))
    below = [Text(cut(_bottom(choice, names), screen.width), style="dim")] if screen.live else []
    return [top, *above, Text(), Text(table[0], style="bold"), *body, *below]


def _bottom(choice: Choice, names: Mapping[int, str]) -> str:
    if choice.ending is not None:
        return f"end {names.get(choice.ending, 'it')}? y: yes, any other key: no"
    if choice.typing:
        return f"show only: {choice.filter}_"
    if choice.said:
        return choice.said
    only = f"  only {choice.filter!r}" if choice.filter else ""
    return f"? help  q quit  / filter{only}  s sort ({choice.sort})  p pause  c class  x end  + - a quantum"


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU of a reply."""

    gpu: Mapping[str, Any]
    reasons: list[str]
    rates: list[str]
    queue: list[tuple[int, int]]
    """(client, time for which it waits), in their order."""

    def _title(self) -> str:
        gpu = self.gpu
        return f"GPU {gpu['index']}  {gpu['name']}  policy {gpu['policy']}, sharing {gpu['sharing']}, {quantum(gpu)}"

    def _running(self, names: Mapping[int, str], width: int) -> str:
        if self.gpu["recovering"]:
            return "recovering leases of an earlier coordinator"
        moving, listed = self.gpu["preparing"], [names.get(each, f"client c{each}") for each in self.gpu["holders"]]
        if moving is not None:
            listed.append(names.get(moving, f"client c{moving}") + ", for which memory moves")
        return _listed(listed, width)

    def _memory(self, cells: int, screen: Screen) -> str:
        gpu = self.gpu
        shown = bar(gpu["resident_bytes"], 0, gpu["capacity_bytes"], cells, unicode=screen.unicode)
        return f"{shown} {size_of(gpu['resident_bytes'], gpu['capacity_bytes'])}"

    def _card(self, width: int, screen: Screen, history: History | None) -> str:
        """How busy the card is, its sensors, and a graph of the last minutes."""
        told = card_words(self.gpu["sensors"])
        cells = min(60, width - cell_len(told) - 12)
        graph, seconds = ("", 0) if history is None else history.graph(self.gpu["uuid"], cells, unicode=screen.unicode)
        return "  ".join(filter(None, (told, f"{graph} {seconds} s" if graph else ""))) or "-"

    def lines(self, names: Mapping[int, str], screen: Screen, history: History | None) -> list[Text]:
        """One GPU: its running set with the reason, its queue, its memory and the cost of switching."""
        found = [Text(), Text(cut(self._title(), screen.width), style="bold")]
        for reason in self.reasons:
            found += [Text(f"  {line}", style="italic") for line in textwrap.wrap(reason, max(20, screen.width - 2))]
        evicted = self.gpu["allocated_bytes"] - self.gpu["resident_bytes"]
        width = screen.width - 12
        lines = (
            ("running", self._running(names, width)),
            ("queue", _listed([f"{names[client]} {duration(waited)}" for client, waited in self.queue], width)),
            ("memory", f"{self._memory(20, screen)} resident{f', {size(evicted)} evicted' if evicted else ''}"),
            ("card", self._card(width, screen, history)),
            ("switching", ", ".join(self.rates) or "-"),
        )
        return [*found, *(Text.assemble((f"  {name:<10}", "dim"), cut(told, width)) for name, told in lines)]

    def one_line(self, names: Mapping[int, str], screen: Screen) -> Text:
        """The GPU in one line, for screens with many GPUs."""
        head = f"GPU {self.gpu['index']:<2} {self._memory(10, screen):<30} {len(self.queue)} wait  "
        return Text(head + self._running(names, screen.width - len(head)))


def _gpus(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[_Gpu]:
    earlier = {gpu["uuid"]: gpu for gpu in before["gpus"]} if before is not None else {}
    elapsed_ns = 0 if before is None else status["now_ns"] - before["now_ns"]
    found = []
    for gpu, reasons in zip(status["gpus"], explanation(status), strict=True):
        waits = {
            client["client"]: max(0, status["now_ns"] - seat["waiting_since_ns"])
            for client in status["clients"]
            for seat in client["seats"]
            if seat["uuid"] == gpu["uuid"] and seat["waiting_since_ns"] is not None
        }
        queue = [(client, waits[client]) for client in gpu["queue"] if client in waits]
        rates = _rates(gpu, earlier.get(gpu["uuid"]), elapsed_ns)
        found.append(_Gpu(gpu, [reasons["why"], *notes(reasons)], rates, queue))
    return found


def _listed(names: list[str], width: int) -> str:
    """The names that fit on the line."""
    for most in range(len(names), 0, -1):
        more = f" and {len(names) - most} more" if most < len(names) else ""
        listed = ", ".join(names[:most]) + more
        if cell_len(listed) <= width:
            return listed
    return cut(names[0], width) if names else "-"


def _rates(gpu: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_ns: int) -> list[str]:
    """The cost of a switch, and the cost of switches since the earlier reply."""
    found = []
    if gpu["handovers_us"]:
        found.append(f"hand-over {format_duration(int(gpu['handovers_us']['p50'] * 1000))}")
    if gpu["switch_cost_ns"]:
        found.append(f"switch {format_duration(gpu['switch_cost_ns'])}")
    if before is not None and elapsed_ns > 0:
        found.append(f"{max(0, gpu['handovers'] - before['handovers']) * 1e9 / elapsed_ns:.1f} hand-overs/s")
        moved_ns = max(0, gpu["moved_ns"] - before["moved_ns"])
        if moved_ns:
            found.append(f"{min(1.0, moved_ns / elapsed_ns):.1%} of the time for memory")
    return found


def bar(resident: int, evicted: int, whole: int, cells: int, *, unicode: bool = True) -> str:
    """Resident and evicted parts of a whole; a part that is not 0 has a cell."""
    full, away, free = BARS[unicode]
    first = min(cells, max(round(cells * resident / whole), resident > 0)) if whole else 0
    second = min(cells - first, max(round(cells * evicted / whole), evicted > 0)) if whole else 0
    return full * first + away * second + free * (cells - first - second)


def _table(found: list[Row], status: Mapping[str, Any], screen: Screen) -> list[str]:
    """The titles, and a line for each program, two columns short of the screen."""
    several, sizes, bars = len(status["gpus"]) > 1, screen.width >= _SIZES_FROM, screen.width >= _BARS_FROM
    slots = {slot["slot"]: pod_of(slot) if slot["pod"] else slot["slot"] for slot in status.get("slots", ())}
    columns: list[Column] = [number("ID"), text("PROGRAM"), text("USER")]
    columns += [text("SLOT")] if slots else []
    columns += [number("GPU")] if several else []
    columns += [word("CLASS"), word("MODE"), word("STATE"), number("SHARE"), number("PROGRESS")]
    columns += [number("MEMORY")] if sizes else []
    columns += [word("OF LIMIT"), number("LIMIT")] if bars else []
    cells = []
    for client, seat, gpu in found:
        row = [f"c{client['client']}", client["name"], user_name(client["user_id"])]
        row += [slots.get(client["group"], "-")] if slots else []
        row += [str(gpu["index"]) if gpu is not None else "-"] if several else []
        shown = state(client, seat, status["now_ns"] if bars else None)
        row += [class_name(client), client["memory_mode"], shown]
        row += ["-", "-"] if seat is None else [f"{seat['recent_share']:.0%}", percent(seat["progress_normalised"])]
        if seat is None or gpu is None:
            row += ["-", "", "-"]
        else:
            whole = seat["limit_bytes"] or gpu["capacity_bytes"]
            shown = bar(seat["resident_bytes"], seat["evicted_bytes"], whole, 10, unicode=screen.unicode)
            row += [size(seat["allocated_bytes"]), shown, size(seat["limit_bytes"])]
        cells.append(row)
    return [f"  {line}" for line in layout(columns, cells, screen.width - 2)]


def _program(line: str, selected: bool) -> Text:
    shown = Text(f"> {line[2:]}" if selected else line, style="reverse" if selected else "")
    for name, colour in _COLOURS.items():
        shown.highlight_words([f" {name}"], style=colour)
    return shown


def _window(body: list[Text], place: int, most: int) -> list[Text]:
    """The lines around the selected one, if there are too many."""
    if len(body) <= most:
        return body
    first = min(max(0, place - most // 2), len(body) - most)
    return body[first : first + most]
