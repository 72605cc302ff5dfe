"""Pictures of the documentation: those of the terminal are whole and of this build (`python -m tests.docs.pictures`),
those of policies current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvshare.scheduler_policies.registry import BUILT_IN
from tests.docs import pictures, policies
from tests.docs.shell_blocks import PAGES


def test_pictures_of_the_pages() -> None:
    """Broken: a picture is in no page, is large, or asks another host for a font."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file, _ in pictures.PICTURES:
        assert f"pictures/{file})" in pages
        text = (pictures.FOLDER / file).read_text(encoding="utf-8")
        assert len(text) < 20_000
        assert not re.search(r"url\(\W*https?:", text)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_pictures_are_those_of_the_policies(policy: str) -> None:
    """Broken: the documentation would show another policy than the one that runs."""
    drawn = (policies.FOLDER / f"{policy}.svg").read_text(encoding="utf-8")
    assert drawn == policies.picture(policy), "run python -m tests.docs.policies"


def titles(picture: Path) -> set[str]:
    """The titles of columns."""
    lines = re.sub(r"<[^>]*>", "\n", picture.read_text(encoding="utf-8")).replace("&#160;", " ").split("\n")
    return {title for line in lines if line.isupper() for title in line.split()}


def test_pictures_are_of_this_build(tmp_path: Path) -> None:
    """Broken: a page shows columns that the command no longer has, or lacks new ones."""
    pictures.make(tmp_path)
    made = {file: titles(tmp_path / file) for file, _ in pictures.PICTURES}
    assert any(made.values())
    assert {file: titles(pictures.FOLDER / file) for file in made} == made, "run python -m tests.docs.pictures"
