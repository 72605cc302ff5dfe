"""A Markdown extension for the site, so that one source serves the site and a forge.

Links from `docs/` to other files of the repository: a forge opens the file; the site does not have it, so the link
becomes its text, or leads to `repository`, such as `https://forge.example/nvshare/blob/main`.
Code in tables: forges want `a\\|b`; the site would show the backslash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

ROOT = Path(__file__).resolve().parents[2]


def outside_docs(target: str) -> str | None:
    """The path in the repository, with its anchor, of a link that leaves `docs/`."""
    path = target
    while path.startswith("../"):
        path = path[3:]
    return path if path != target and (ROOT / path.partition("#")[0]).exists() else None


class _Adapter(Treeprocessor):
    def __init__(self, markdown: Markdown, repository: str) -> None:
        super().__init__(markdown)
        self._repository = repository.rstrip("/")

    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            path = outside_docs(link.get("href", ""))
            if path is None:
                continue
            if self._repository:
                link.set("href", f"{self._repository}/{path}")
            else:
                link.tag, link.attrib = "span", {"title": path}
        for cell in root.iter("td"):
            for code in cell.iter("code"):
                code.text = AtomicString((code.text or "").replace("\\|", "|"))


class ForgeMarkdown(Extension):
    """The extension; mkdocs.yml names it."""

    def __init__(self, **settings: Any) -> None:
        self.config = {"repository": ["", "address of the repository's files on a forge"]}
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers after inline patterns have made links and code."""
        md.treeprocessors.register(_Adapter(md, self.getConfig("repository")), "forge_markdown", 15)


def makeExtension(**settings: Any) -> ForgeMarkdown:
    """Entry point that Markdown calls."""
    return ForgeMarkdown(**settings)
