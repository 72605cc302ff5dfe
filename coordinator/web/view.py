"""The page's content, as values for JSON: made from one `status` reply and the time line.

Invariants: the number of programs in a picture is bounded.  A picture is for everybody who can connect, so
`hide_other_users` hides all names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nvshare.coordinator.cli.trace.spans import Span
from nvshare.coordinator.cli.views import words
from nvshare.coordinator.cli.views.explain import class_name, explanation, notes
from nvshare.coordinator.cli.views.sentences import host_lines, room_lines
from nvshare.coordinator.daemon.control.rights import HIDDEN, hide_names
from nvshare.coordinator.system.users import user_name

MAX_PROGRAMS: Final = 200
NO_USER: Final = -1


def picture(status: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """The present state, without the spans."""
    if status["hides_names"]:
        status = hide_names(dict(status), NO_USER)
        names = {client: f"client c{client}" for client in names}
    programs = [_program(client, seat, status) for client in status["clients"] for seat in client["seats"] or (None,)]
    # First those that run, then those that wait longest: they are shown when there are too many.
    programs.sort(key=lambda each: (not each["running"], -(each["waiting_ms"] or 0), each["client"]))
    return {
        "now_ms": status["now_ns"] / 1e6,
        "simulated": status["simulated"],
        "directory": status["runtime_dir"],
        "notes": [*status["problems"], *room_lines(status), *host_lines(status)[:1]],
        "gpus": [_gpu(gpu, why) for gpu, why in zip(status["gpus"], explanation(status), strict=True)],
        "programs": programs[:MAX_PROGRAMS],
        "left_out": max(0, len(programs) - MAX_PROGRAMS),
        "names": dict(names),
    }


def spans(found: Iterable[Span]) -> list[list[Any]]:
    """[number, GPU, client, kind, start, end] each; milliseconds, end None while it lasts."""
    return [
        [
            span.number,
            span.uuid,
            span.client,
            span.kind,
            round(span.start_ns / 1e6, 1),
            None if span.end_ns is None else round(span.end_ns / 1e6, 1),
        ]
        for span in found
    ]


def _gpu(gpu: Mapping[str, Any], why: Mapping[str, Any]) -> dict[str, Any]:
    copied = ("uuid", "index", "name", "policy", "sharing", "quantum_ns", "quantum_automatic", "switch_cost_ns")
    sizes = ("capacity_bytes", "resident_bytes", "allocated_bytes", "waiting", "members", "recovering")
    return {
        **{name: gpu[name] for name in (*copied, *sizes)},
        "why": "waiting for a program of the earlier coordinator" if gpu["recovering"] else why["why"],
        "notes": notes(why),
        "card": words.card_words(gpu["sensors"]),
        "busy": gpu["sensors"]["busy"],
    }


def _program(client: Mapping[str, Any], seat: Mapping[str, Any] | None, status: Mapping[str, Any]) -> dict[str, Any]:
    """One client on one GPU; `seat` None: it has not attached to one."""
    now_ns = status["now_ns"]
    found = {
        "client": client["client"],
        "pid": client["process_id"],
        "name": f"client c{client['client']}" if client["name"] == HIDDEN else client["name"],
        "user": user_name(client["user_id"]),
        "class": class_name(client),
        "mode": client["memory_mode"],
        "paused": client["paused"],
        "state": words.state(client, seat, now_ns),
        "gpu": None,
        "running": False,
        "waiting_ms": None,
    }
    if seat is None:
        return found
    waiting_ns, holding_ns = seat["waiting_since_ns"], seat["holding_since_ns"]
    return {
        **found,
        "gpu": seat["uuid"],
        "why": words.why(client, seat, status),
        "running": holding_ns is not None,
        "waiting_ms": None if waiting_ns is None else max(0, now_ns - waiting_ns) / 1e6,
        "holding_ms": None if holding_ns is None else max(0, now_ns - holding_ns) / 1e6,
        "moving": seat["moving"],
        "progress": seat["progress_normalised"],
        "share": seat["recent_share"],
        "resident_bytes": seat["resident_bytes"],
        "evicted_bytes": seat["evicted_bytes"],
        "limit_bytes": seat["limit_bytes"] or client["limit_bytes"],
    }
