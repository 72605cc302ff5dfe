"""docs/reference/compatibility.md from the lines of a run of bench.compatibility (`--from LINES --markdown FILE`).

Invariant: every figure and verdict on the page comes from a line; without a run on a card the page says so.  A
line with a `note` was written by hand, where lines of several runs were put together, and is shown as it is.

Non-goals: measuring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HEAD = """# Compatibility

Each program ran without the hook, alone under it, and two at a time under it: with a quantum of 20 ms, those of
gigabytes with default settings.

- *alone*, *two at a time*: **identical**, every byte of the results is as without the hook; **within tolerance**, the
  results are, within the tolerance that is named; **unrepeatable**, they differ without the hook too.
- mode `beside`: in `swap`, beside a PyTorch training of 6 GiB that works all the time.
- mode `beyond`: in `swap` on a card of 12 GiB, beside a program of 7 GiB that works all the time; each program of
  gigabytes takes about 6 GiB, and two at a time they are three. In brackets: GiB that were evicted and restored.
- *cost*: time that the hook adds to a step, with its 95 % interval from six processes of each kind on. Processes
  without the hook and under it run in turns, each by itself; two identical ones differ by 1 to 20 %.

The benchmark writes this page:

    python -m nvshare.bench.compatibility --json --processes 6 >lines.json
    python -m nvshare.bench.compatibility --from lines.json --markdown docs/reference/compatibility.md

`--case "NAME"` runs one case, with a name of the first column; `--case programs` the programs of gigabytes, with
`--mode swap --capacity 24GiB`, `--mode beside` or `--mode beyond`. In `managed` mode each has a limit of 96 MiB.
*Imitated*: not the program itself, but its use of memory as its documentation tells it. *Remote*: under the hook is the
server of [Lupine](../how-to/remote.md), and the program beside it without the hook, on the same machine.

Not gated and not counted: functions from before CUDA 3.2, whose pointers and sizes have 32 bits (`cuMemAlloc` without
`_v2`). `cuda.h` leads to their successors, so compiled programs do not call them.
"""

NOT_RUN = "\nIt has not been run on a card yet: there are no results.\n"

SIMULATED = (
    "\n**This run was on simulated GPUs**, which compute nothing: it shows that the programs run, and nothing "
    "about a card.\n"
)

TABLE = """
| case | mode | result | alone | two at a time | cost | steps/s without the hook |
|---|---|---|---|---|---|---|
"""


def final_rows(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of each case and mode, in the order of the first."""
    return list({(line["case"], line["mode"]): line for line in lines if "case" in line}.values())


def case_line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    result, cost, costs = row["result"], row.get("cost"), ""
    if row.get("moved_gib"):
        result += f" [{row['moved_gib']:g} GiB]"
    if row.get("reason"):
        result += f" ({row['reason']})"
    if "within tolerance" in (row.get("alone"), *(row.get("two") or ())):
        result += f", tolerance {row['tolerance']:g}"
    if cost:
        middle, least, most = (f"{100 * cost[f'slowdown{end}']:+.2f} %" for end in ("", "_min", "_max"))
        costs = f"{middle} ({least} to {most})"
    two = ", ".join(dict.fromkeys(row.get("two") or ()))
    speed = f"{cost['plain_steps_per_s']:g}" if cost else ""
    cells = (row["case"], row["mode"], result, row.get("alone") or "", two, costs, speed)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


def page(lines: Iterable[Mapping[str, Any]]) -> str:
    """All of it."""
    lines = list(lines)
    rows = final_rows(lines)
    if not rows:
        return HEAD + NOT_RUN
    about: Mapping[str, Any] = next((line for line in lines if "machine" in line), {})
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.get("versions") or {}
    facts = about.get("machine", {})
    machine = f"{facts.get('gpu', 'unknown')}; {facts.get('cpu', 'unknown')}, {facts.get('cores', '?')} cores"
    software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return "".join(
        [
            HEAD,
            SIMULATED if about.get("simulated", True) else "",
            f"\nMachine: {machine}. Python {about.get('python', '?')}{', ' if software else ''}{software}.\n",
            *(f"\n{line['note']}\n" for line in lines if "note" in line),
            TABLE,
            *map(case_line, rows),
        ]
    )
