"""`nvshare-ctl top`: what a frame shows, what fits, and what keys do."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from nvshare.coordinator.cli.top.choice import Choice, press, rows
from nvshare.coordinator.cli.top.frame import Screen, bar, frame
from nvshare.coordinator.cli.top.history import History
from nvshare.coordinator.cli.top.keyboard import keys
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.system.sensors import CardSensors
from tests.harness import Harness, play_turn
from tests.unit.cli import replies


def shown(harness: Harness, screen: Screen, choice: Choice | None = None) -> list[str]:
    reply = replies.status(harness)
    return [line.plain for line in frame(reply, None, choice or Choice(), screen)]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_frame_fits_and_says_who_runs_and_why(width: int) -> None:
    """Broken if a terminal over ssh broke the lines, or the reason, the queue or a program were missing."""
    harness = replies.three_programs()
    before = replies.status(harness)
    harness.milliseconds(50)
    reply = replies.status(harness)
    lines = [line.plain for line in frame(reply, before, Choice(), Screen(width, 24, "12:34:56"))]
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) <= 24
    whole = "\n".join(lines)
    assert "12:34:56  1 simulated GPU, 3 programs" in whole
    assert reply["gpus"][0]["why"].partition(" ")[0] in whole
    assert "  running   train.py (root)" in whole
    assert "  queue     package.with_a_long_name" in whole
    assert "2.794/4GiB resident, 572.2MiB evicted" in whole
    assert "/s" in whole
    assert "batch" in whole
    assert "managed" in whole
    assert "4123456789" in whole or width == 80
    assert ("1.118GiB" in whole) == (width >= 100)
    assert sum(line.startswith("> ") for line in lines) == 1
    play_turn(harness)
    coming = "\n".join(shown(harness, Screen(160)))
    assert f"running   {replies.LONG} (4123456789), for which memory moves" in coming


def test_an_ascii_terminal_and_a_single_frame() -> None:
    """Broken if a terminal without Unicode got garbage, or a printed frame offered keys."""
    harness = replies.three_programs()
    whole = "\n".join(shown(harness, Screen(120, unicode=False, live=False)))
    assert whole.replace("…", "").isascii()
    assert "q quit" not in whole
    assert "\n> " not in whole
    assert bar(1, 2, 4, 8, unicode=False) == "##====.."
    assert bar(1, 0, 1000, 4, unicode=False) == "#..."
    assert bar(9, 9, 4, 4, unicode=False) == "####"
    assert bar(0, 0, 0, 2, unicode=False) == ".."


def test_many_programs_and_gpus_leave_the_selected_one_in_sight() -> None:
    """Broken if a server with more programs than lines hid the one that a key would stop."""
    harness = replies.three_programs()
    for number in range(1, 8):
        harness.gpu(f"GPU-{number}")
    for _ in range(40):
        harness.client(wanted=True)
    reply = replies.status(harness)
    last = rows(reply, Choice("name"))[-1]
    choice = Choice("name", (last.client["client"], last.gpu["uuid"] if last.gpu is not None else None))
    lines = [line.plain for line in frame(reply, None, choice, Screen(80, 24))]
    assert len(lines) <= 24
    assert [line for line in lines if line.startswith("> ")]
    assert sum(line.startswith("GPU ") for line in lines) == 8


def test_keys_select_sort_and_ask() -> None:
    """Broken if a key stopped another program than the selected one."""
    reply = replies.status(replies.three_programs())
    first, second = (row.client["client"] for row in rows(reply, Choice("name"))[:2])
    choice, request = press("p", Choice("name"), reply)
    assert request == api.Pause(client=f"c{first}")
    choice, request = press("down", choice, reply)
    assert (choice.selected, request) == ((second, "GPU-0"), None)
    assert press("p", choice, reply)[1] == api.Pause(client=f"c{second}")
    assert press("c", choice, reply)[1] == api.Set(setting="class", client=f"c{second}", value="interactive")
    assert press("+", choice, reply)[1] == api.Set(setting="quantum", value=200_000_000, gpu="GPU-0")
    assert press("-", choice, reply)[1] == api.Set(setting="quantum", value=50_000_000, gpu="GPU-0")
    assert press("a", choice, reply)[1] == api.Set(setting="quantum", value=None, gpu="GPU-0")
    assert press("x", choice, reply)[1] is None
    assert press("s", Choice("name"), reply)[0].sort == "share"
    assert press("q", choice, reply)[0].ended
    assert press("up", choice, reply)[0].selected == (first, "GPU-0")
    reply["clients"][second - 1]["paused"] = True
    assert press("p", choice, reply)[1] == api.Resume(client=f"c{second}")
    empty = {**reply, "clients": [], "gpus": []}
    assert [press(key, Choice(), empty)[1] for key in ("p", "c", "+", "down")] == [None] * 4


def test_a_program_is_ended_after_a_question() -> None:
    """Broken if one key ended a program, or the answer concerned another one."""
    reply = replies.status(replies.three_programs())
    first = rows(reply, Choice())[0].client
    asking, request = press("x", Choice(), reply)
    assert request is None
    assert f"end {first['name']}" in frame(reply, None, asking, Screen())[-1].plain
    for key in ("n", "x", "escape", "q"):
        kept, request = press(key, asking, reply)
        assert (kept.ending, kept.ended, request) == (None, False, None)
    assert press("y", asking, reply)[1] == api.EndClient(client=f"c{first['client']}")


def test_a_filter_shows_some_programs_only() -> None:
    """Broken if nobody could find their programs on a crowded server, or a typed letter did what a key does."""
    reply = replies.status(replies.three_programs())
    choice = Choice()
    for key in ("/", "S", "t", "x", "\x7f", "u", "\n"):
        choice, request = press(key, choice, reply)
        assert request is None
    assert [row.client["name"] for row in rows(reply, choice)] == ["study.ipynb"]
    assert "only 'Stu'" in frame(reply, None, choice, Screen(120))[-1].plain
    assert len(rows(reply, press("escape", choice, reply)[0])) == 3
    assert len(rows(reply, Choice(filter="root"))) == 2  # a user's name


def test_help_names_each_key() -> None:
    """Broken if a key were found by accident only."""
    reply = replies.status(replies.three_programs())
    choice, _ = press("?", Choice(), reply)
    shown = "\n".join(line.plain for line in frame(reply, None, choice, Screen(80, 24)))
    assert all(key in shown for key in ("/", "x ", "p, Space", "+, -, a", "q "))
    assert not press("q", choice, reply)[0].ended, "any key: back"


def test_sensors_and_a_graph_of_the_last_minutes() -> None:
    """Broken if people had to open nvidia-smi beside it, or a card without sensors broke the frame."""
    harness, history = replies.three_programs(), History()
    for percent in (0, 50, 100):
        reply = replies.status(harness)
        reply["gpus"][0]["sensors"] = CardSensors(percent / 100, 63, 312.4, 700.0, 41 << 30).plain()
        history.add(reply)
        harness.milliseconds(20_000)
    shown = [line.plain for line in frame(reply, None, Choice(), Screen(120), history)]
    card = next(line for line in shown if line.startswith("  card"))
    assert "100% busy, 63 C, 312 of 700 W, 41GiB of memory in use" in card
    graph = history.graph("GPU-0", 6, unicode=False)
    assert graph == ("  . =@", 60)
    assert max(map(cell_len, shown)) <= 120
    assert "  card      -" in [line.plain for line in frame(replies.status(harness), None, Choice(), Screen())]


def test_keys_of_a_terminal() -> None:
    """Broken if an arrow were taken for letters, which pause programs or change classes."""
    assert keys("\x1b") == ["escape"]
    assert keys("p\x1b[A\x1bOBq") == ["p", "up", "down", "q"]
    assert keys("\x1b[15~") == []
