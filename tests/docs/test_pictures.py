"""Pictures of the terminal can be made anew, and the documentation's ones are whole."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs import pictures
from tests.docs.shell_blocks import PAGES


def test_pictures_can_be_made(tmp_path: Path) -> None:
    """Broken: a command whose output a page shows fails beside running programs, or does not show them."""
    pictures.make(tmp_path)
    for file, command in pictures.PICTURES:
        made = (tmp_path / file).read_text(encoding="utf-8")
        assert command.replace(" ", "&#160;") in made
        assert any(program in made for program in pictures.PROGRAMS), command


def test_pictures_of_the_pages() -> None:
    """Broken: a picture is in no page, is large, or asks another host for a font."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file, _ in pictures.PICTURES:
        assert f"pictures/{file})" in pages
        text = (pictures.FOLDER / file).read_text(encoding="utf-8")
        assert len(text) < 20_000
        assert not re.search(r"url\(\W*https?:", text)
