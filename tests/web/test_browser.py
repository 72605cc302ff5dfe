"""The page in a headless browser, with three programs on a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, browser, find
from tests.conftest import Built
from tests.end_to_end.conftest import Node
from tests.waiting import eventually
from tests.web import picture
from tests.web.picture import TOKEN, await_programs

EXECUTABLE = find()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium-headless-shell")


@pytest.fixture(scope="module")
def shared(built: Built) -> Iterator[tuple[Node, str]]:
    """The node and the page's address."""
    del built  # the programs need the hook
    with picture.three_programs() as made:
        yield made


@pytest.fixture
def page(shared: tuple[Node, str]) -> Iterator[Browser]:
    """A browser that shows the three programs, without a complaint from beginning to end."""
    assert EXECUTABLE is not None
    with browser(EXECUTABLE) as made:
        made.size(1000, 800)
        made.open(shared[1])
        await_programs(made)
        yield made
        assert made.complaints == []


def inked(page: Browser) -> int:
    """Pixels of the time line's bars: right of the names, not of the axis."""
    return int(
        page.evaluate(
            "(() => { const canvas = document.querySelector('.timeline');"
            "const pen = canvas.getContext('2d', {willReadFrequently: true});"
            "const data = pen.getImageData(140, 0, canvas.width - 140, canvas.height - 24).data;"
            "let sum = 0; for (let at = 3; at < data.length; at += 4) sum += data[at] > 0; return sum; })()"
        )
    )


def test_it_is_live(page: Browser) -> None:
    """Broken if the page showed a first picture and then stood still, or an empty time line."""
    first = page.evaluate("picture.now_ms")
    eventually(lambda: page.evaluate("picture.now_ms") > first + 1000, "a later picture")
    assert page.evaluate("document.getElementById('connection').textContent") == "live"
    assert page.evaluate("document.querySelector('.why').textContent") != ""
    assert "256 MiB in use" in page.evaluate("document.querySelector('.memory .text').textContent")
    eventually(lambda: inked(page) > 100, "bars in the time line")
    cells: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('tbody tr')].map((row) => ['class', 'mode', 'sizes'].map("
        "(name) => row.querySelector('.' + name).textContent))"
    )
    assert sorted(cell[0] for cell in cells) == ["batch", "best-effort", "interactive"]
    assert {cell[1] for cell in cells} == {"swap"}
    assert any("limit 200 MiB" in cell[2] for cell in cells)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1000])
def test_it_fits_and_has_contrast(page: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    """Broken if a telephone had to scroll sideways, or one of the colour schemes was unreadable."""
    page.size(width, 800, dark=dark)
    eventually(lambda: page.evaluate("innerWidth") == width, "the new width")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate(
        "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name].match(/\\d+/g)"
        ".slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"
    )
    assert light[0] > light[1] + 0.5 if dark else light[1] > light[0] + 0.5
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"


def test_a_screen_reader_can_read_it(page: Browser) -> None:
    """Broken if a table, a bar or the time line had no name, or the narrow layout was no table any more."""
    page.size(400, 800)
    eventually(lambda: page.evaluate("innerWidth") == 400, "the new width")

    def held() -> bool:
        return any(name.startswith("Time line of GPU 0") and "held it" in name for _, name in page.spoken())

    eventually(held, "a time line that says who held the GPU")
    spoken = page.spoken()
    roles = [role for role, _ in spoken]
    assert roles.count("row") >= 3
    assert {"table", "rowheader", "heading", "status"} <= set(roles)
    images = [name for role, name in spoken if role == "image"]
    assert any(name.startswith("Memory: ") for name in images), images
    nameless = [
        role for role, name in spoken if role in {"button", "combobox", "image", "textbox", "table"} and not name
    ]
    assert nameless == []


def client_of(node: Node, name: str) -> dict[str, Any]:
    return next(each for each in node.control("clients")["clients"] if each["name"] == name)


def test_keys_alone_can_pause_a_program(page: Browser, shared: tuple[Node, str]) -> None:
    """Broken if a change needed a mouse, worked without the token, or put the token where it is logged."""
    node, _ = shared
    assert page.evaluate("getComputedStyle(document.querySelector('td.change')).display") == "none"
    focused = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || ''"

    def tab_to(wanted: str) -> None:
        for _ in range(40):
            if page.evaluate(focused).startswith(wanted):
                return
            page.press("Tab", 9)
        raise AssertionError(f"the keyboard does not reach {wanted!r}")

    tab_to("unlock")
    page.press("Enter", 13)
    eventually(lambda: page.evaluate(focused) == "token", "the dialog")
    page.type("the wrong token")
    page.press("Enter", 13)
    eventually(lambda: page.evaluate("document.getElementById('token-refusal').textContent"), "a refusal")
    page.evaluate("document.getElementById('token').value = ''")
    page.type(TOKEN)
    page.press("Enter", 13)
    eventually(lambda: not page.evaluate("document.getElementById('token-dialog').open"), "the end of the dialog")
    tab_to("Pause train.py")
    page.press("Enter", 13)
    eventually(lambda: client_of(node, "train.py")["paused"], "the pause")
    resume = "document.querySelector('[aria-label^=\"Resume train.py\"]') !== null"
    eventually(lambda: page.evaluate(resume), "a page that shows the pause")
    tab_to("Resume train.py")
    page.press("Enter", 13)
    eventually(lambda: not client_of(node, "train.py")["paused"], "the end of the pause")
    page.evaluate(
        "(() => { const select = document.querySelector('tbody select'); select.value = 'interactive';"
        "select.dispatchEvent(new Event('change')); })()"
    )
    first = int(page.evaluate("document.querySelector('tbody tr').dataset.client"))
    eventually(
        lambda: (
            {each["client"]: each["job_class"] for each in node.control("clients")["clients"]}[first] == "interactive"
        ),
        "the class",
    )
    page.evaluate(
        "(() => { const form = document.querySelector('form.quantum'); form.querySelector('input').value = 250;"
        "form.requestSubmit(); })()"
    )
    eventually(lambda: node.control("status")["gpus"][0]["quantum_ns"] == 250_000_000, "the quantum")
    assert page.evaluate("document.getElementById('refusal').textContent") == ""
    urls = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name).join(' ')")
    assert TOKEN not in urls
    assert TOKEN not in node.log()


def test_a_filter_and_the_end_of_a_program(page: Browser, shared: tuple[Node, str]) -> None:
    """Broken if a crowded server's page could not be searched, or one click ended a program."""
    node, _ = shared
    names = "[...document.querySelectorAll('tbody .name')].map((each) => each.textContent)"
    assert len(page.evaluate(names)) == 3
    page.evaluate(
        "(() => { const only = document.getElementById('filter'); only.value = 'TRAIN';"
        "only.dispatchEvent(new Event('input')); })()"
    )
    assert page.evaluate(names) == ["train.py"]
    eventually(lambda: "in use" in page.evaluate("document.querySelector('.card .text').textContent"), "the sensors")
    page.evaluate(f"token = {TOKEN!r}")
    page.evaluate("window.confirm = (asked) => { window.asked = asked; return false; }")
    page.evaluate("document.querySelector('.end').click()")
    assert page.evaluate("window.asked").startswith("End train.py (process ")
    before = page.evaluate("picture.now_ms")
    eventually(lambda: page.evaluate("picture.now_ms") > before, "a later picture")
    assert page.evaluate(names) == ["train.py"]
    page.evaluate("window.confirm = () => true")
    page.evaluate("document.querySelector('.end').click()")
    eventually(lambda: "train.py" not in {each["name"] for each in node.control("clients")["clients"]}, "its end")
    eventually(lambda: page.evaluate(names) == [], "a page without it")
