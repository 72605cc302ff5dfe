"""The table of the core's mechanisms in the page on the architecture."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "explanation" / "architecture.md"
CALLERS: Final = ("scheduler", "reconcile", "planning", "snapshot", "standing")
"""Modules of the engine that reach a mechanism by its entrances."""


def entrances() -> dict[str, set[str]]:
    """The functions of the table, by module."""
    table = PAGE.read_text(encoding="utf-8").partition("### The mechanisms of the core")[2].partition("\n#")[0]
    found = {}
    for row in re.findall(r"^\| `([a-z_/]+)` \|(.*)$", table, re.MULTILINE):
        found[row[0]] = set(re.findall("`([a-z_]+)`", row[1]))
    return found


def has(path: str, function: str) -> bool:
    """Whether this module of the coordinator has the function."""
    module = importlib.import_module(f"nvshare.coordinator.{path.replace('/', '.')}")
    return callable(getattr(module, function, None))


def test_each_entrance_exists() -> None:
    """Broken: the table sends a newcomer to a function that is gone."""
    table = entrances()
    assert table
    gone = [f"{path}.{name}" for path, names in table.items() for name in names if not has(path, name)]
    assert not gone, f"{PAGE.name}: remove them"


def test_each_entrance_in_use_is_listed() -> None:
    """Broken: a mechanism has an entrance that the table does not tell of."""
    modules = {Path(path).name: (path, names) for path, names in entrances().items()}
    trees = [
        ast.parse((ROOT / "coordinator" / "engine" / f"{name}.py").read_text(encoding="utf-8")) for name in CALLERS
    ]
    for node in (each for tree in trees for each in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            path, names = modules[node.value.id]
            assert node.attr in names or not has(path, node.attr), f"{PAGE.name}: add {node.attr} to {path}"
