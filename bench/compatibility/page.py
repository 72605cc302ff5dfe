"""docs/reference/compatibility.md from the lines of a run of bench.compatibility (`--from LINES --markdown FILE`).

Invariant: every figure and verdict on the page comes from a line; without a run on a card the page says so.  A
line with a `note` was written by hand, where lines of several runs were put together, and is shown as it is.

Non-goals: measuring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HEAD = """# Compatibility

Each program ran without the hook, alone under it, and two at a time under it with a quantum of 20 ms.

- *alone*, *two at a time*: **identical**, every byte of the results is as without the hook; **within tolerance**, the
  results are, within the tolerance that is named; **unrepeatable**, they differ without the hook too.
- mode `beyond`: in `swap` on a card of 12 GiB, beside a program of 7 GiB that works all the time; each program of
  gigabytes takes about 6 GiB, and two at a time they are three. In brackets: GiB that were evicted and restored.
- *cost*: time that the hook adds to a step, with its 95 % interval. Processes without the hook and under it run their
  steps in turns. Two identical processes differ by 1 to 20 % for as long as they live, so several of each are compared.

The benchmark writes this page:

    python -m nvshare.bench.compatibility --json --processes 3 >lines.json
    python -m nvshare.bench.compatibility --from lines.json --markdown docs/reference/compatibility.md

`--case "NAME"` runs one case, with a name of the first column; `--case programs` the programs of gigabytes, with
`--mode swap --capacity 24GiB` or `--mode beyond`. In `managed` mode each has a limit of 96 MiB. *Imitated*: not the
program itself, but its use of memory as its documentation tells it.

Not gated and not counted: functions from before CUDA 3.2, whose pointers and sizes have 32 bits (`cuMemAlloc` without
`_v2`). `cuda.h` leads to their successors, so compiled programs do not call them.
"""

NOT_RUN = "\nIt has not been run on a card yet: there are no results.\n"

SIMULATED = (
    "\n**This run was on simulated GPUs**, which compute nothing: it shows that the programs run, and nothing "
    "about a card.\n"
)

START_UP_SHARE, START_UP_MS = 0.02, 5.0
"""The hook may add this, or the share of a start-up, whichever is more."""

START_UP = """\
Starts with and without the hook take turns. *Added*: the median of their differences, with its 95 % interval.
*Processors' time*: of all threads; other work on the machine disturbs it less.
"""

WORDS = {"unfinished": "unfinished: the run ended before two at a time"}


def final_rows(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of each case and mode, in the order of the first."""
    rows: dict[tuple[str, str], Mapping[str, Any]] = {}
    for line in lines:
        if "case" in line:
            rows[line["case"], line["mode"]] = line
    return list(rows.values())


def percent(value: float) -> str:
    """A percentage with its sign."""
    return f"{100 * value:+.2f} %"


def cell(text: object) -> str:
    """The text with the characters that a table can hold."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def cost_cell(row: Mapping[str, Any]) -> str:
    """The hook's cost, with its interval."""
    cost = row.get("cost")
    if not cost:
        return ""
    least, most = percent(cost["slowdown_min"]), percent(cost["slowdown_max"])
    return f"{percent(cost['slowdown'])} ({least} to {most})"


def case_line(row: Mapping[str, Any]) -> str:
    """One row of the table of cases."""
    result = WORDS.get(row["result"], row["result"])
    if row.get("moved_gib"):
        result += f" [{row['moved_gib']:g} GiB]"
    if row.get("reason"):
        result += f" ({row['reason']})"
    speed = f"{row['cost']['plain_steps_per_s']:g}" if row.get("cost") else ""
    two = ", ".join(dict.fromkeys(row.get("two") or ()))
    if "within tolerance" in (row.get("alone"), *(row.get("two") or ())):
        result += f", tolerance {row['tolerance']:g}"
    cells = (row["case"], row["mode"], result, row.get("alone") or "", two, cost_cell(row), speed)
    return "| " + " | ".join(cell(one) for one in cells) + " |"


def startup_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Rows of the table of start-up times."""
    told = row.get("startup", {})
    if "pairs" not in told:
        yield f"| {cell(row['case'])} | {cell(row['result'])} ({cell(row.get('reason'))}) | | | | | |"
        return
    for stage, found in told.items():
        if stage == "pairs":
            continue
        most_ms = max(START_UP_SHARE * found["plain_wall_ms"], START_UP_MS)
        cells = [f"{row['case']}, {told['pairs']} pairs", stage]
        for what in ("wall", "cpu"):
            added = (found[f"added_{what}_ms{end}"] for end in ("", "_min", "_max"))
            cells += [f"{found[f'plain_{what}_ms']:g} ms", "{:+g} ms ({:+g} to {:+g})".format(*added)]
            quickest = found.get(f"quickest_{what}_ms")  # earlier lines have none
            cells[-1] += "" if quickest is None else f", quickest {quickest:+g}"
        yield "| " + " | ".join(cell(one) for one in [*cells, f"{most_ms:.0f} ms"]) + " |"


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
    text = [HEAD]
    if about.get("simulated", True):
        text.append(SIMULATED)
    facts = about.get("machine", {})
    text.append(
        f"\nMachine: {facts.get('gpu', 'unknown')}; {facts.get('cpu', 'unknown')}, {facts.get('cores', '?')} cores. "
        f"Python {about.get('python', '?')}"
        + "".join(f", {name} {version}" for name, version in sorted(versions.items()))
        + ".\n"
    )
    text += [f"\n{line['note']}\n" for line in lines if "note" in line]
    cases = [row for row in rows if row["group"] != "start-up"]
    starts = [row for row in rows if row["group"] == "start-up"]
    if cases:
        text.append(
            "\n| case | mode | result | alone | two at a time | cost | steps/s without the hook |"
            "\n|---|---|---|---|---|---|---|\n" + "\n".join(case_line(row) for row in cases) + "\n"
        )
    if starts:
        text.append(
            "\n## Start-up\n\n" + START_UP + "\n| | stage | wall time | added | processors' time | added | allowed |"
            "\n|---|---|---|---|---|---|---|\n"
            + "\n".join(line for row in starts for line in startup_lines(row))
            + "\n"
        )
    return "".join(text)
