"""The matrix under the bypass detector: did every kernel and copy of its cases pass the gate?

One process a group, in `device` mode under `nvshare-run --verify`, checks every case once.  What it tells is one line a
group: kernels and copies that ran and that passed, what escaped by name, and why that cannot be told where it cannot.

Non-goals: how escapes are found (client_hook/verify.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvshare.bench.compatibility.cases.catalog import MODES, Case, Group
from nvshare.bench.harness.fixture import BenchError, Fixture
from nvshare.bench.harness.worker_group import Member

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0
SLOWER = 3
"""Factor of a case's time limit under the detector."""


def verify(
    stand: Fixture,
    group: Group,
    command: Sequence[str],
    cases: Sequence[Case],
    extra: Mapping[str, str],
    deadline: float,
) -> dict[str, Any]:
    """A group's line.  Raises BenchError."""
    report = stand.directory / f"verify-{group.name}.json"
    options = (*MODES["device"], f"--verify={report}")
    member = Member(
        stand, command, hooked=True, name=f"{group.name}-verify", options=options, extra=extra, deadline=deadline
    )
    checked, left_out = [], {}
    try:
        member.answer(START_TIMEOUT_S)
        for case in cases:
            told = member.ask(f"check {case.name}", SLOWER * case.limit_s)
            if "digest" in told:
                checked.append(case.row)
            else:
                left_out[case.row] = told.get("skipped") or told.get("error") or "no result"
    except BenchError:
        member.kill()
        raise
    code = member.close(END_TIMEOUT_S)
    return {"verify": group.name, "exit_code": code, "checked": checked, "left_out": left_out, **totals(report)}


def totals(report: Path) -> dict[str, Any]:
    """Over the processes of one command; without a report nothing is claimed."""
    try:
        processes: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"result": "unknown", "problems": [f"no report: {error}"]}
    found: dict[str, Any] = {
        key: sum(process[key] for process in processes)
        for key in ("kernels", "kernels_gated", "copies", "copies_gated")
    }
    found["escapes"] = [escape for process in processes for escape in process["escapes"]]
    found["problems"] = [process["problem"] for process in processes if process["problem"] is not None]
    if found["escapes"]:
        found["result"] = "escaped"
    else:
        found["result"] = "unknown" if found["problems"] or not found["kernels"] else "clean"
    return found
