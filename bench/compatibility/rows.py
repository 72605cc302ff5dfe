"""Rows of the matrix: a case in a mode, what was measured of it, and the verdict.

Non-goals: which groups run, and their processes (run.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nvshare.bench.compatibility.cases.catalog import EVERYWHERE, Case, Group
from nvshare.bench.compatibility.cases.program import SIZE_VARIABLE
from nvshare.bench.harness.fixture import Fixture
from nvshare.bench.harness.worker_group import Member, slowdown

IMPORT_PAIRS = 9
"""The fewest whose interval leaves out an extreme at either end."""
GOOD = frozenset({"identical", "within tolerance"})


@dataclass(slots=True)
class Verdicts:
    """Comparisons of results with those without the hook.  `repeatable`: the same program without the hook, again."""

    alone: str | None = None
    two: list[str] = field(default_factory=list)
    repeatable: bool = True


@dataclass(slots=True)
class Row:
    """Results of one case in one mode."""

    group: str
    case: Case
    mode: str
    result: str = "unfinished"
    reason: str = ""
    baseline: dict[str, Any] | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)
    cost: dict[str, Any] | None = None
    handovers: int | None = None
    moved_gib: float | None = None
    """Evicted and restored, of all programs, while the case ran under the hook."""
    versions: dict[str, str] = field(default_factory=dict)
    at_work: bool = False

    @property
    def timed(self) -> bool:
        """Whether the hook's cost is measured: not beside a rival."""
        return self.mode != "beyond" and bool((self.baseline or {}).get("timed", True))

    @property
    def open(self) -> bool:
        """Whether something is left to be done."""
        return self.result == "unfinished"

    def close(self, result: str, reason: str = "") -> None:
        """Nothing more is to be done."""
        self.result, self.reason = result, reason

    def finished(self, phase: Callable[[Row], bool]) -> bool:
        """One phase of it, written down; False when an error may have spoilt the programs for the other cases."""
        self.at_work = True
        sound = phase(self)
        self.at_work = False
        if self.verdicts.alone is not None or not self.open:
            emit(self.as_json())
        return sound and self.result != "failed"

    def settle(self) -> None:
        """All verdicts are in."""
        if all(verdict in GOOD for verdict in (self.verdicts.alone, *self.verdicts.two)):
            self.close("ok")
        elif self.verdicts.repeatable:
            self.close("differs")
        else:
            self.close("unrepeatable", "the program gives other results each time without the hook, too")

    def as_json(self) -> dict[str, Any]:
        """The row as values for JSON."""
        return {
            "case": self.case.row, "group": self.group, "mode": self.mode, "result": self.result,
            "reason": self.reason, **asdict(self.verdicts), "cost": self.cost,
            "tolerance": (self.baseline or {}).get("tolerance", 0.0), "handovers": self.handovers,
            "moved_gib": self.moved_gib, "versions": self.versions,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters of the whole run."""

    simulate: str | None
    seconds: float
    """The time in which the processes of a case are compared."""
    core: int | None
    """The processor on which they are compared."""
    processes: int
    deadline: float
    scratch: Path
    programs: Mapping[str, Path | str]
    """Compiled programs by `Group.build`, or the reason why there is none."""
    import_pairs: int = IMPORT_PAIRS
    size_bytes: int = 64 << 20
    """Device memory of each program of programs/."""
    capacity: str | None = None
    """Of each card, in mode `swap`; `beyond` follows from the size."""

    def environment(self, group: Group) -> dict[str, str]:
        """Environment of a group's programs, hooked or not."""
        own = {SIZE_VARIABLE: str(self.size_bytes)}
        own["NVSHARE_BENCH_MODELS"] = os.environ.get("NVSHARE_BENCH_MODELS", str(self.scratch))
        caches = {name: str(self.scratch / "cache") for name in ("TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR")}
        caches |= {name: str(self.scratch / name.lower()) for name in ("TRITON_CACHE_DIR", "CUPY_CACHE_DIR")}
        return {**EVERYWHERE, **caches, **own, **group.environment}

    def left_s(self) -> float:
        """Seconds until everything has to be over."""
        return self.deadline - time.monotonic()


def emit(told: Mapping[str, Any]) -> None:
    """One line, at once."""
    print(json.dumps(told), flush=True)


def verdict(baseline: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """The comparison of a result with the one without the hook."""
    if "digest" not in told:
        return f"failed: {told.get('error') or told.get('skipped') or 'no result'}"
    if told["digest"] == baseline["digest"]:
        return "identical"
    ours, theirs, limit = told.get("values", []), baseline.get("values", []), baseline.get("tolerance", 0.0)
    if (
        limit
        and len(ours) == len(theirs)
        and all(abs(a - b) <= limit * max(abs(a), abs(b), 1.0) for a, b in zip(ours, theirs, strict=True))
    ):
        return "within tolerance"
    return "differs"


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The programs of a group in one mode: `plain` and `hooked` are compared, `second` joins the first hooked one."""

    stand: Fixture
    plain: Sequence[Member]
    hooked: Sequence[Member]
    second: Member

    def before(self, row: Row) -> bool:
        """The baseline."""
        name, limit = row.case.name, row.case.limit_s
        if row.baseline is not None:
            return True
        baseline = self.plain[0].ask(f"check {name}", limit)
        if "digest" not in baseline:
            why = baseline.get("skipped") or f"fails without the hook too: {baseline.get('error')}"
            row.close("skipped", why)
            return "error" not in baseline
        row.versions = row.versions | baseline.get("versions", {})
        row.baseline = baseline
        if not row.timed:
            row.verdicts.repeatable = verdict(baseline, self.plain[0].ask(f"check {name}", limit)) in GOOD
        return True

    def alone(self, run: Run, row: Row) -> bool:
        """The hooked one, beside nobody or the rival, and what the hook costs."""
        assert row.baseline is not None
        name, limit = row.case.name, row.case.limit_s
        row.verdicts.alone = verdict(row.baseline, self.hooked[0].ask(f"check {name}", limit))
        if row.verdicts.alone.startswith("failed"):
            row.close("failed", f"alone {row.verdicts.alone}")
            return False
        if row.timed:
            row.cost = slowdown(self.plain, self.hooked, name, seconds=run.seconds, core=run.core, timeout_s=limit)
            row.verdicts.repeatable = verdict(row.baseline, self.plain[0].ask(f"check {name}", limit)) in GOOD
        return True

    def total(self, *names: str) -> int:
        """The sum of these counters over all GPUs, so far."""
        return sum(gpu.get(name) or 0 for gpu in self.stand.control("status")["gpus"] for name in names)

    def two(self, row: Row) -> bool:
        """Both hooked ones at once."""
        assert row.baseline is not None
        pair = (self.hooked[0], self.second)
        before = self.total("handovers")
        for member in pair:
            member.tell(f"check {row.case.name}")
        row.verdicts.two = [verdict(row.baseline, member.answer(2 * row.case.limit_s)) for member in pair]
        row.handovers = self.total("handovers") - before
        row.moved_gib = round(self.total("evicted_bytes", "restored_bytes") / 2**30, 1)
        if failures := [one for one in row.verdicts.two if one.startswith("failed")]:
            row.close("failed", f"two at a time {failures[0]}")
        else:
            row.settle()
        return True
