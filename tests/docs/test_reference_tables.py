"""The reference pages agree with the code that they describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import generated


@pytest.mark.parametrize("page", sorted({page for page, _ in generated.TABLES.values()}))
def test_tables_are_current(page: str) -> None:
    """Broken: a setting or metric was changed, and its reference page describes the earlier one."""
    text = (generated.REFERENCE / page).read_text(encoding="utf-8")
    assert text == generated.generate(page), "run python -m tests.docs.generated"


@pytest.mark.parametrize("path", generated.FILES, ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    """Broken: the chart refuses a setting that the coordinator has, or the hook does not forward a variable."""
    assert path.read_text(encoding="utf-8") == generated.FILES[path](), "run python -m tests.docs.generated"
