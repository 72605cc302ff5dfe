"""The compatibility matrix: its verdicts, what becomes of cases that fail, its page; and that start-up runs.

Non-goals: figures; what frameworks do, which needs a card.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nvshare.bench.compatibility import page, startup
from nvshare.bench.compatibility.cases.catalog import FIRST, SMALL, THEN, Case, Group
from nvshare.bench.compatibility.rows import Run, verdict
from nvshare.bench.compatibility.run import run_group
from nvshare.bench.harness.fixture import BenchError, fixture
from tests.bench.test_benches_run import run_until
from tests.conftest import ROOT, Built

CASES = (Case("breaks", "breaks", SMALL, limit_s=20.0), Case("works", "works", SMALL, limit_s=20.0))

PROGRAM = """#!/bin/sh
echo '{"ready": true, "versions": {"sh": "1"}}'
while read -r what name steps; do
  case "$what-$name-$LD_PRELOAD" in
    check-breaks-*nvshare_hook*) echo 'last words' >&2; exit 3 ;;
    check-*) echo 'frameworks talk'; echo '{"digest": "d"}' ;;
    time-*) echo '{"ns": 100000000}' ;;
  esac
done
"""


def settings(tmp_path: Path, *, left_s: float) -> Run:
    """A run whose group `shell` is the program above."""
    program = tmp_path / "program.sh"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    programs: dict[str, Path | str] = {"shell": program, "absent": "no compiler"}
    return Run("1x1GiB", 0.01, None, 2, time.monotonic() + left_s, tmp_path, programs)


def test_verdicts() -> None:
    """A difference that is called equal, or noise within the tolerance that is called a difference, misleads."""
    base = {"digest": "a", "values": [1000.0, 2.0], "tolerance": 1e-3}
    assert verdict(base, {"digest": "a"}) == "identical"
    assert verdict(base, {"digest": "b", "values": [1000.5, 2.001]}) == "within tolerance"
    assert verdict(base, {"digest": "b", "values": [1002.0, 2.0]}) == "differs"
    assert verdict(base, {"digest": "b", "values": [1000.0]}) == "differs"
    assert verdict(base, {"digest": "b", "values": [float("nan"), 2.0]}) == "differs"
    assert verdict(base | {"tolerance": 0.0}, {"digest": "b", "values": base["values"]}) == "differs"
    assert verdict(base, {"error": "boom"}) == "failed: boom"


@pytest.mark.usefixtures("built")
def test_a_case_that_breaks_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One broken framework must not cost the rows of the others, nor hide why it broke."""
    rows = run_group(settings(tmp_path, left_s=100.0), Group("shell", CASES, build="shell"), "device", CASES)
    assert [row.result for row in rows] == ["failed", "ok"]
    assert "exit code 3" in rows[0].reason
    assert "last words" in rows[0].reason
    assert rows[1].versions == {"sh": "1"}
    assert rows[1].cost is not None
    assert rows[1].cost["slowdown"] == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["result"] for line in lines] == ["failed", "unfinished", "ok"], "rows come as they are known"


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    """A row that is silently missing looks like one that was forgotten."""
    now = settings(tmp_path, left_s=100.0)
    absent = run_group(now, Group("x", CASES, modules=("no_such_framework",)), "device", CASES)
    assert {(row.result, row.reason) for row in absent} == {("skipped", "no_such_framework not installed")}
    unbuilt = run_group(now, Group("x", CASES, build="absent"), "device", CASES)
    assert {(row.result, row.reason) for row in unbuilt} == {("skipped", "no compiler")}
    late = run_group(settings(tmp_path, left_s=0.0), Group("shell", CASES, build="shell"), "device", CASES)
    assert {(row.result, row.reason) for row in late} == {("skipped", "no time left")}


def test_matrix_on_the_simulated_gpu(built: Built) -> None:
    """The matrix runs: baseline, alone, two at a time, with a program that really is under the hook."""
    words = ("--simulate", "--case=driver", "--mode=device")

    def met(lines: list[dict[str, Any]]) -> bool:
        """Two at a time were at the same time."""
        return any(row["handovers"] for row in page.final_rows(lines))

    lines = run_until(met, 0.2, "nvshare.bench.compatibility", *words)
    rows = page.final_rows(lines)
    assert [(row["result"], row["alone"], row["two"]) for row in rows] == [("ok", "identical", ["identical"] * 2)] * 3
    assert all(row["cost"]["hooked_steps_per_s"] > 0 for row in rows)
    text = page.page(lines)
    assert "simulated GPUs" in text
    assert all(f"| {row['case']} | device | ok |" in text for row in rows)


def test_rows_are_told_apart() -> None:
    """Two cases of one name would overwrite each other on the page."""
    names = [(case.row, mode) for group in (*FIRST, *THEN) for case in group.cases for mode in case.modes]
    assert len(names) == len(set(names))


def test_the_page_is_made_by_the_script() -> None:
    """A page that was edited by hand says what nobody has measured."""
    text = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert text.startswith(page.HEAD)
    assert text == page.page([]) or "\nMachine: NVIDIA" in text
    assert "simulated" not in text


def row(case: str, **more: Any) -> dict[str, Any]:
    """A line of a run."""
    line = {"case": case, "mode": "device", "group": "driver", "result": "ok", "alone": "identical", "two": []}
    return line | {"tolerance": 0.0, "versions": {}, "reason": ""} | more


def test_costs_on_the_page() -> None:
    """A figure without its interval would claim more than was measured."""
    cost = {"slowdown": 0.002, "slowdown_min": -0.001, "slowdown_max": 0.004, "plain_steps_per_s": 20.0}
    assert "| +0.20 % (-0.10 % to +0.40 %) | 20 |" in page.page([row("good", cost=cost), row("bad")])


def test_what_is_of_several_runs_says_so() -> None:
    """A note beside old lines that gets lost makes them pass for new ones."""
    text = page.page([row("one"), {"note": "Of two builds."}])
    assert text.index("Machine:") < text.index("Of two builds.") < text.index("| one |")


def starts(pairs: int) -> dict[str, Any]:
    """A line of start-up times."""
    found: dict[str, Any] = {"pairs": pairs, "all": startup.paired("wall", [3000.0] * pairs, [3010.0] * pairs)}
    found["all"] |= startup.paired("cpu", [2000.0] * pairs, [2000.0 + number for number in range(pairs)])
    return {"case": "start-up, x", "group": "start-up", "mode": "device", "result": "ok", "startup": found}


def test_starts_on_the_page() -> None:
    """A median without its interval, or without what is allowed, would say nothing."""
    wall, cpu = "+10 ms (+10 to +10), quickest +10", "+4 ms (+1 to +7), quickest +0"
    line = f"| start-up, x, 9 pairs | all | 3000 ms | {wall} | 2000 ms | {cpu} | 60 ms |"
    assert line in page.page([starts(9)])


@pytest.mark.parametrize(("pairs", "outside"), [(6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (30, 9)])
def test_interval_by_ranks(pairs: int, outside: int) -> None:
    """An interval that is too narrow claims more than was measured (the ranks are those of the sign test's tables)."""
    told = startup.paired("wall", [0.0] * pairs, [float(number) for number in range(pairs)])
    assert (told["added_wall_ms_min"], told["added_wall_ms_max"]) == (outside, pairs - 1 - outside)


def test_starts_of_a_framework(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a framework's start is not of a process under the hook and of one without."""
    look = "import sys; sys.exit('hooked' if 'libnvshare_hook' in open('/proc/self/maps').read() else 'plain')"
    with fixture(simulate="1x1GiB") as stand:
        plain, hooked = stand.environment(), startup.hooked_environment(stand)
        for environment, what in ((plain, "plain"), (hooked, "hooked")):
            with pytest.raises(BenchError, match=what):
                startup.one_start([sys.executable, "-c", look], environment, timeout_s=60.0)
        monkeypatch.setitem(startup.FIRST_USE, "json", ("pass", "pass"))
        (row,) = startup.import_rows(stand, ["json"], pairs=6, deadline=time.monotonic() + 100)
        (late,) = startup.import_rows(stand, ["json"], pairs=6, deadline=0.0)
    assert row["startup"]["pairs"] == 6
    assert {*startup.STAGES, "all"} < set(row["startup"])
    whole = row["startup"]["all"]
    assert whole["added_cpu_ms_min"] <= whole["added_cpu_ms"] <= whole["added_cpu_ms_max"]
    assert 0 < row["startup"][startup.STAGES[0]]["plain_cpu_ms"] < whole["plain_cpu_ms"]
    assert late["result"] == "skipped"
