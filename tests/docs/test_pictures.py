"""Pictures of the terminal in the documentation are whole; `python -m tests.docs.pictures` makes them anew."""

from __future__ import annotations

import re

from tests.docs import pictures
from tests.docs.shell_blocks import PAGES


def test_pictures_of_the_pages() -> None:
    """Broken: a picture is in no page, is large, or asks another host for a font."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file, _ in pictures.PICTURES:
        assert f"pictures/{file})" in pages
        text = (pictures.FOLDER / file).read_text(encoding="utf-8")
        assert len(text) < 20_000
        assert not re.search(r"url\(\W*https?:", text)
