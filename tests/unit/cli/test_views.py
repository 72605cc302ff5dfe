"""The views of `nvshare-ctl`: what fits, what is cut, and that every form shows the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.cells import cell_len

from nvshare.coordinator.cli.views import clients, explain, memory, slots, status
from nvshare.coordinator.cli.views.output import View, with_period, written
from nvshare.coordinator.model import events
from nvshare.coordinator.model.settings import Sharing
from nvshare.coordinator.protocol.messages import MemoryMode
from tests.harness import contended, one_gpu
from tests.unit.cli import replies

VIEWS: Mapping[str, View] = {
    "status": status.lines,
    "clients": clients.lines,
    "memory": memory.lines,
    "slots": lambda reply, width=None, *, wide=False: slots.lines(
        {**reply, "slots": [replies.SLOT, {**replies.SLOT, "pod": "", "registered": False}]}, width, wide=wide
    ),
}


def figures(line: str) -> list[str]:
    """Everything in a line that has a digit."""
    return [each for each in re.split(r"\s{2,}", line.strip()) if re.match(r"[0-9]", each)]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", VIEWS)
def test_a_table_fits_and_no_figure_is_cut(name: str, width: int) -> None:
    """Broken if a terminal of usual width broke the rows of a table, or a number lost digits."""
    harness = replies.three_programs()
    harness.milliseconds(12_345)
    reply = replies.status(harness)
    shown, whole = VIEWS[name](reply, width), VIEWS[name](reply)
    assert len(shown) == len(whole)
    table = [index for index, line in enumerate(whole) if line.startswith(" ") or index < 2]
    for index in table:
        assert cell_len(shown[index]) <= width
        assert figures(shown[index]) == figures(whole[index])
    titles = next(line for line in whole if line.isupper())
    assert 6 <= len(re.split(r"\s{2,}", titles)) <= 7
    assert "…" not in "".join(whole)


@pytest.mark.parametrize("name", VIEWS)
def test_wide_shows_every_column_uncut(name: str) -> None:
    """Broken if a figure could be seen in no table."""
    reply = replies.status(replies.three_programs())
    wide = written(reply, VIEWS[name], "wide", 80)
    assert "…" not in wide
    assert (replies.LONG in wide) == (name in ("clients", "memory"))
    narrow = VIEWS[name](reply)
    titles = {title for line in narrow if line.isupper() for title in re.split(r"\s{2,}", line)}
    assert titles < {title for line in wide.splitlines() if line.isupper() for title in re.split(r"\s{2,}", line)}


def test_programs_have_names_users_and_shares() -> None:
    """Broken if nobody could tell whose program has the GPU."""
    harness = replies.three_programs()
    harness.milliseconds(3_000)
    lines = clients.lines(replies.status(harness))
    assert re.search(r"train\.py +root +batch +managed +revoking +100%", lines[1])
    assert re.search(r"study\.ipynb +root +batch +managed +waiting 3\.0s +0%", lines[2])
    assert "4123456789" in lines[3]
    assert "train.py (root)" in status.lines(replies.status(harness))[2]


def test_json_has_the_whole_reply() -> None:
    """Broken if a script read something else than the coordinator said."""
    reply = replies.status(replies.three_programs())
    assert json.loads(written(reply, status.lines, "json", None)) == json.loads(json.dumps(reply))


def test_watch_takes_a_period_or_none() -> None:
    """Broken if `--watch` needed a number, or swallowed the next option."""
    assert with_period(["status", "--watch", "-o", "wide"]) == ["status", "--watch=2.0", "-o", "wide"]
    assert with_period(["status", "-w", "0.5"]) == ["status", "-w", "0.5"]
    assert with_period(["status", "--watch=3"]) == ["status", "--watch=3"]


def test_a_reply_of_any_kind_is_shown() -> None:
    """Broken if a view failed without clients, or with a client that uses no GPU."""
    harness = one_gpu(replies.GIB)
    empty: dict[str, Any] = replies.status(harness)
    assert clients.lines(empty) == ["no clients"]
    harness.client()
    for view in VIEWS.values():
        assert view(replies.status(harness), 80)


def test_every_view_says_that_a_program_is_paused() -> None:
    """Broken: `explain` says that the other one is alone, `status` that one waits, and nobody says why."""
    harness, holder, other = contended(sharing=Sharing.EXCLUSIVE)
    harness.handle(events.Set("paused", True, client=other.client))
    reply = replies.status(harness)
    (row,) = (line for line in clients.lines(reply) if line.startswith("c2 "))
    assert " paused " in row
    why = "this program is paused; `nvshare-ctl resume c2` continues it"
    assert f"c2 (1002), paused on GPU 0: {why}" in status.lines(reply)
    shown = explain.lines(explain.explanation(reply), reply["now_ns"])
    assert shown[0].endswith("; c2 is paused")
    assert [line for line in shown if line.startswith("  paused: c2 ") and line.endswith(f": {why}")]
    assert [line for line in shown if line.startswith("  running: c1 ")]
    assert reply["gpus"][0]["waiting"] == 0
    harness.handle(events.Set("paused", True, client=holder.client))
    holder.release()
    assert "no program may run now" in explain.lines(explain.explanation(replies.status(harness)), 0)[0]


def test_host_memory_that_is_ready_for_an_eviction_is_shown() -> None:
    """Broken: nobody sees why the first eviction of a program is slow."""
    gib = 1 << 30
    harness = one_gpu(capacity=4 * gib)
    for client in [harness.client(mode=MemoryMode.SWAP) for _ in range(2)]:
        client.report(allocated=3 * gib, resident=2 * gib)
        client.request()
    reply = replies.status(harness)
    reply["clients"][0]["seats"][0]["prepared_bytes"] += gib
    shown = [line.partition(": ")[2] for line in memory.lines(reply) if "ready to evict" in line]
    assert shown == ["1GiB of host memory ready to evict 2GiB", "0B of host memory ready to evict 2GiB"]


def test_the_one_whose_memory_moves_does_not_run() -> None:
    """Broken: `explain` and `status` take the plan for what is."""
    harness = one_gpu(100, sharing=Sharing.EXCLUSIVE)
    following, other = (harness.client(mode=MemoryMode.SWAP, resident=0, host=60) for _ in range(2))
    following.request()
    other.request()
    reply = replies.status(harness)
    shown = explain.lines(explain.explanation(reply), reply["now_ns"])
    assert not [line for line in shown if line.startswith("  running")]
    assert [line for line in shown if line.startswith("  next") and "memory is being moved for it" in line]
    assert [line for line in shown if "memory is being moved for c1 (" in line and line.endswith("; next in line")]
