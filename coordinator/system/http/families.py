"""Families of metrics from tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
Row = tuple[Kind, str, str, Callable[[Any], float]]
"""Kind, name without the prefix, help, and how the value is read; of a name in seconds, in nanoseconds."""


def family(
    kind: Kind, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """One family with its samples."""
    made = kind(name, text, labels=labels)
    for names, value in values:
        made.add_metric(names, value)
    return made


def families(
    prefix: str, rows: Iterable[Row], labels: Sequence[str], things: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """A family for each row, with a sample for each thing by its labels."""
    for kind, name, text, read in rows:
        scale = 1e9 if name.endswith("_seconds") else 1
        yield family(kind, f"{prefix}_{name}", text, labels, ((names, read(thing) / scale) for names, thing in things))
