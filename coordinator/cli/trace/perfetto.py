"""A recording in Chrome's trace event format, which Perfetto opens: a process for each GPU, a lane for each program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from nvshare.coordinator.cli.trace.recording import Instant, Recording
from nvshare.coordinator.cli.trace.spans import Span

_TITLES: Final = {"hold": "lease", "wait": "wait", "out": "evicting", "in": "restoring"}

LANES = 1000
"""A GPU's lanes begin at its process times this: Perfetto calls a lane with its process's number the main thread."""


def trace(recording: Recording) -> dict[str, Any]:
    """The whole file.  Times are microseconds since the start."""
    events = [event for number, uuid in enumerate(recording.gpus, 1) for event in _gpu(recording, uuid, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"lost_events": recording.lost}}


def _gpu(recording: Recording, uuid: str, process: int) -> Iterator[dict[str, Any]]:
    lanes = _lanes(recording, uuid, process * LANES + 1)
    yield _name("process_name", process, 0, recording.gpus[uuid])
    yield _place("process_sort_index", process, 0, process)
    titles = {process * LANES: "plan"}
    for (client, memory), lane in lanes.items():
        name = recording.names.get(client, f"client {client}")
        titles[lane] = f"{name}, memory" if memory else name
    for lane, title in titles.items():
        yield _name("thread_name", process, lane, title)
        yield _place("thread_sort_index", process, lane, lane)
    plans = [plan for plan in recording.plans if plan.uuid == uuid]
    ends = (*(plan.at_ns for plan in plans[1:]), recording.end_ns)
    for plan, end_ns in zip(plans, ends, strict=False):
        yield _plan(recording, plan, end_ns, process)
    for span in recording.spans:
        if span.uuid == uuid:
            yield _span(recording, span, process, lanes[span.client, span.kind in ("out", "in")])
    for each in recording.decisions:
        lane = process * LANES if each.client is None else lanes.get((each.client, False), 0)
        if lane and each.uuid in (uuid, None):
            yield _instant(recording, each, process, lane)


def _lanes(recording: Recording, uuid: str, first: int) -> dict[tuple[int, bool], int]:
    """Lanes by client and whether they are for its memory, in the order of the clients."""
    used = {(span.client, False) for span in (*recording.leases, *recording.waits) if span.uuid == uuid}
    used |= {(span.client, memory) for span in recording.moves if span.uuid == uuid for memory in (False, True)}
    return {key: lane for lane, key in enumerate(sorted(used), first)}


def _name(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _place(kind: str, process: int, lane: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"sort_index": index}}


def _us(recording: Recording, at_ns: int) -> float:
    return max(0, at_ns - recording.start_ns) / 1_000


def _span(recording: Recording, span: Span, process: int, lane: int) -> dict[str, Any]:
    title = _TITLES[span.kind]
    times = {"ts": _us(recording, span.start_ns), "dur": ((span.end_ns or 0) - span.start_ns) / 1_000}
    return {"ph": "X", "name": title, "cat": title, "pid": process, "tid": lane, **times, "args": dict(span.values)}


def _plan(recording: Recording, plan: Instant, end_ns: int, process: int) -> dict[str, Any]:
    running = [int(client) for client in str(plan.values["running"]).split(",") if client]
    names = ", ".join(recording.names.get(client, f"client {client}") for client in running)
    times = {"ts": _us(recording, plan.at_ns), "dur": max(0, end_ns - plan.at_ns) / 1_000}
    place = {"pid": process, "tid": process * LANES}
    why = {"why": plan.values.get("why", "")}
    return {"ph": "X", "name": names or "idle", "cat": "plan", **place, **times, "args": why}


def _instant(recording: Recording, each: Instant, process: int, lane: int) -> dict[str, Any]:
    values = {name: value for name, value in each.values.items() if name not in ("seq", "at_ns", "kind", "uuid")}
    head = {"ph": "i", "s": "t", "name": each.kind, "cat": "decision", "pid": process, "tid": lane}
    return {**head, "ts": _us(recording, each.at_ns), "args": values}
