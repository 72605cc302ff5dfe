"""The site: every link leads somewhere, every page is in the menu, and no page asks another host for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.forge_markdown import ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Targets(HTMLParser):
    """Links of a page, and files that a browser loads for it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.linked.append(str(values["href"]))
        elif values.get(LOADED.get(tag, "")):
            self.loaded.append(str(values[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", folder / "mkdocs.yml"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


def test_links_lead_to_files_of_the_site(site: Path) -> None:
    """Broken: a reader of the site meets "not found"."""
    dead = [
        f"{page.relative_to(site)}: {target}"
        for page in site.rglob("*.html")
        if page.name != "404.html"
        for found in [Targets(page)]
        for target in (*found.linked, *found.loaded)
        if not urlsplit(target).netloc and urlsplit(target).path
        if not (page.parent / unquote(urlsplit(target).path)).exists()
    ]
    assert not dead, dead


def test_nothing_comes_from_other_hosts(site: Path) -> None:
    """Broken: the documentation is blank on a machine without the internet, or tells others who reads it."""
    outside = {target for page in site.rglob("*.html") for target in Targets(page).loaded if urlsplit(target).netloc}
    assert not outside, outside
    assert not list(site.rglob("*.woff2"))


def test_every_page_is_in_the_menu() -> None:
    """Broken: a page that no menu names is not found.  The index of decisions names the decisions."""
    menu = re.findall(
        r"^ +- (?:.*: )?(\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    records = {page for page in pages if page.startswith("decisions/") and page != "decisions/README.md"}
    assert pages - records <= set(menu), pages - records - set(menu)


def test_extension_keeps_forge_links() -> None:
    """Broken: a site that knows its forge loses the links to the repository's other files."""
    import markdown

    text = "[charts](../../charts)\n\n| a |\n|---|\n| `b\\|c` |\n"
    plain = markdown.markdown(text, extensions=["tables", "tests.docs.forge_markdown"])
    assert '<span title="charts">charts</span>' in plain
    assert "<code>b|c</code>" in plain
    settings = {"tests.docs.forge_markdown": {"repository": "https://forge.example/blob/main/"}}
    linked = markdown.markdown(text, extensions=["tests.docs.forge_markdown"], extension_configs=settings)
    assert 'href="https://forge.example/blob/main/charts"' in linked
