"""Jobs from public traces of GPU clusters.

Formats:
- `philly`: Microsoft Philly's `cluster_job_log`, a JSON array (github.com/msr-fiddle/philly-traces).  A job's work is
  the time of its attempts; its GPUs are those of the last one.
- `pai`: Alibaba PAI's `pai_task_table` of 2020, CSV, with or without its header line
  (github.com/alibaba/clusterdata, cluster-trace-gpu-v2020).  `plan_gpu` is in hundredths of a GPU.  Each task is a job,
  and each job a user: the table has no users.
- `openb`: Alibaba's pod list of 2023, CSV (cluster-trace-gpu-v2023).  `gpu_milli` is in thousandths of a GPU.

A part of a GPU that a job asked for is its busy share and its part of the memory.  The traces do not say what else a
job needs, so a job on whole GPUs has a busy share of 0.5 to 1 and 4 to 48 GiB, drawn from the seed and its name.  Jobs
without GPUs, or without a begin and an end, are left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nvshare.bench.simulate.jobs import GIB
from nvshare.bench.virtual_node.node import Job
from nvshare.coordinator.model.settings import SECOND_NS
from nvshare.scheduler_policies.api import JobClass

CARD_BYTES: Final = 80 * GIB
_PAI_COLUMNS: Final = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
_QOS: Final = {"LS": JobClass.INTERACTIVE, "BE": JobClass.BEST_EFFORT}


def read_trace(path: Path, seed: int) -> list[Job]:
    """The jobs of a file.  Raises ValueError for what is no such trace."""
    text = path.read_text(encoding="utf-8")
    users: dict[str, int] = {}
    jobs = []
    for name, user, at_s, length_s, gpus, job_class in _reader(text)(text):
        if gpus <= 0.0 or not length_s > 0.0:
            continue
        chance = random.Random(f"{seed} {name}")
        whole = gpus >= 1.0
        busy = round(chance.uniform(0.5, 1.0), 3) if whole else gpus
        memory = round(chance.uniform(4.0, 48.0) * GIB) if whole else int(gpus * CARD_BYTES)
        number = users.setdefault(user, len(users))
        at_ns, length_ns = round(at_s * SECOND_NS), round(length_s * SECOND_NS)
        jobs.append(Job(name, at_ns, length_ns, busy, memory, math.ceil(gpus), number, job_class=job_class))
    return jobs


def _reader(text: str) -> Callable[[str], Iterator[_Row]]:
    """The reader of the file's format."""
    if text.lstrip()[:1] in ("[", "{"):
        return _philly
    return _openb if "gpu_milli" in text.partition("\n")[0] else _pai


_Row = tuple[str, str, float, float, float, JobClass]


def _philly(text: str) -> Iterator[_Row]:
    entries: Any = json.loads(text)
    for entry in entries if isinstance(entries, list) else [entries]:
        try:
            attempts = [one for one in entry["attempts"] if one["start_time"] and one["end_time"]]
            if not attempts or not entry["submitted_time"]:
                continue
            spans = [_moment(one["end_time"]) - _moment(one["start_time"]) for one in attempts]
            gpus = sum(len(server["gpus"]) for server in attempts[-1]["detail"])
            at_s = _moment(entry["submitted_time"])
            yield entry["jobid"], entry["user"], at_s, sum(spans), float(gpus), JobClass.BATCH
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a job of cluster_job_log: {error!r}") from None


def _moment(text: str) -> float:
    """Seconds.  The trace has local time; hours of clock changes are not corrected."""
    return (datetime.fromisoformat(text) - datetime(2017, 1, 1)).total_seconds()  # noqa: DTZ001


def _pai(text: str) -> Iterator[_Row]:
    named = text.startswith("job_name")
    for row in _rows(text, None if named else _PAI_COLUMNS):
        begin_s, end_s, part = (_number(row, column) for column in ("start_time", "end_time", "plan_gpu"))
        if begin_s is None or end_s is None or part is None:
            continue
        gpus = part / 100 * max(1.0, _number(row, "inst_num") or 1.0)
        name = f"{row['job_name']}/{row['task_name']}"
        yield name, row["job_name"], begin_s, end_s - begin_s, gpus, JobClass.BATCH


def _openb(text: str) -> Iterator[_Row]:
    for row in _rows(text, None):
        begin_s, end_s = _number(row, "scheduled_time"), _number(row, "deletion_time")
        count, milli = _number(row, "num_gpu"), _number(row, "gpu_milli")
        at_s = _number(row, "creation_time")
        if begin_s is None or end_s is None or at_s is None or not count or not milli:
            continue
        gpus = count if count > 1 else milli / 1000
        yield row["name"], row["name"], at_s, end_s - begin_s, gpus, _QOS.get(row["qos"], JobClass.BATCH)


def _rows(text: str, columns: Sequence[str] | None) -> Iterator[dict[str, str]]:
    for row in csv.DictReader(io.StringIO(text), fieldnames=columns):
        if None in row or None in row.values():
            raise ValueError(f"a line with another number of columns: {row}")
        yield row


def _number(row: dict[str, str], column: str) -> float | None:
    if column not in row:
        raise ValueError(f"no column {column}")
    try:
        value = float(row[column])
    except ValueError:
        return None
    return value if math.isfinite(value) else None
