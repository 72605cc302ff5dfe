"""The reference pages agree with the code that they describe."""

from __future__ import annotations

import pytest

from tests.docs import generated


@pytest.mark.parametrize("page", sorted({page for page, _ in generated.TABLES.values()}))
def test_tables_are_current(page: str) -> None:
    """Broken: a setting or metric was changed, and its reference page describes the earlier one."""
    text = (generated.REFERENCE / page).read_text(encoding="utf-8")
    assert text == generated.generate(page), "run python -m tests.docs.generated"


def test_the_charts_schema_is_current() -> None:
    """Broken: the chart refuses a setting that the coordinator has, or takes a value that it refuses."""
    text = generated.SCHEMA.read_text(encoding="utf-8")
    assert text == generated.chart_schema(), "run python -m tests.docs.generated"
