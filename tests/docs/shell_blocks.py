"""The commands of the documentation: fenced shell blocks, and the command lines of our tools in any text."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS: Final[dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]
"""Our tools, and the functions behind them."""

_BLOCK: Final = re.compile(r"^( *)```(?:sh|bash|console)\n(.*?)\n\1```$", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    lines: tuple[str, ...]


def name(page: Path) -> str:
    """The path of a page in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The shell blocks of a page, in order, without indentation and prompts."""
    found = []
    for indent, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = (line.removeprefix(indent).removeprefix("$ ") for line in body.split("\n"))
        found.append(Block(name(page), tuple(lines)))
    return found


def tool_lines(page: Path) -> Iterator[str]:
    """Every command line of an `nvshare-` tool: in shell blocks, and in code within the text."""
    text = page.read_text(encoding="utf-8")
    spans = [line for block in blocks(page) for line in block.lines]
    spans += _CODE.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))
    for span in spans:
        for part in re.split(r"&&|\|\||;|\s\|\s|&$", span.replace("\\|", "|")):
            begin = re.search(r"(?:^|\s|/)(nvshare-[a-z-]+(?:\s|$).*)", part)
            if begin and begin[1].split()[0] in SCRIPTS:
                yield begin[1].strip()


def words(line: str) -> list[str]:
    """The words of a command line; marks of optional parts (`[`, `]`) are left out."""
    return shlex.split(re.sub(r"(?<![A-Z\w])\[|\](?!\w)", " ", line), comments=True)
