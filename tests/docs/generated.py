"""The tables of settings and metrics in the reference pages, from the code: `python -m tests.docs.generated`.

A page keeps its prose; a table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import typer
from prometheus_client.core import Metric

from nvshare.coordinator.daemon import main, metrics, settings_file
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.cluster.pods import Counts as WatchCounts
from nvshare.coordinator.kubernetes.node import plugin_metrics
from nvshare.coordinator.model.settings import Settings
from nvshare.coordinator.units import format_duration, format_share
from nvshare.scheduler_policies import registry

ROOT: Final = Path(__file__).resolve().parents[2]
REFERENCE: Final = ROOT / "docs" / "reference"
ABSENT: Final = {"quantum": "`auto`", "capacity": "most of the card's", "host_budget": "3/4 of memory"}
"""Texts for None as a default; else "none"."""


def _meanings() -> dict[str, str]:
    """Field of the settings -> the text below it."""
    record = ast.parse(inspect.getsource(settings_file.Settings)).body[0]
    assert isinstance(record, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(record.body, record.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split()).removesuffix(".")
    return found


def _default(key: str, name: str) -> str:
    value: Any = settings_file.Settings.model_fields[name].default
    if value is None:
        return ABSENT.get(key, "none")
    if isinstance(value, enum.Enum):
        return f"`{value.value if isinstance(value.value, str) else value.name.lower()}`"
    if name.endswith("_ns"):
        return f"`{format_duration(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{format_share(value) if isinstance(value, float) else value}`"


def settings_table() -> list[str]:
    """One row a setting."""
    options = {parameter.name for parameter in typer.main.get_command(main.app).params}
    own = {field.alias or name for name, field in settings_file.GpuOverride.model_fields.items()}
    meanings = _meanings()
    rows = ["| setting | default | flag | of one GPU | meaning |", "|---|---|---|---|---|"]
    for key, name in settings_file.KEYS.items():
        if key == "gpu":
            continue
        flag = f"`--{key.replace('_', '-')}`" if key in options else ""
        rows.append(f"| `{key}` | {_default(key, name)} | {flag} | {'yes' if key in own else ''} | {meanings[name]} |")
    return rows


def coordinator_metrics() -> Iterator[Metric]:
    """All families of the coordinator, without samples."""
    picture = metrics.Picture(Scheduler(registry.create, Settings()).snapshot(0), {}, {}, (), {"full": 0})
    return metrics.Collector(lambda: picture).collect()


def plugin_families() -> Iterator[Metric]:
    """All families of the device plugin, without samples."""
    facts = plugin_metrics.Facts((), True, True, None, 0, 0, 0, WatchCounts(0, 0, 0, 0, 0))
    return plugin_metrics.Collector(plugin_metrics.Counts(), lambda: facts).collect()


def _row(family: Metric, labels: Iterable[str], hidden: set[str]) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    shown = ", ".join(f"`{label}`" for label in labels if label not in hidden)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def _metrics_table(families: Iterable[Metric], prefix: str, hidden: Iterable[str] = ()) -> list[str]:
    common = set(hidden)
    rows = [
        _row(family, getattr(family, "_labelnames", ()), common) for family in families if re.match(prefix, family.name)
    ]
    return ["| metric | kind | labels | meaning |", "|---|---|---|---|", *sorted(rows)]


GPU: Final = ("gpu", "uuid")
SLOT: Final = ("slot", "namespace", "pod", "container")
TABLES: Final[dict[str, tuple[str, Callable[[], list[str]]]]] = {
    "settings": ("settings.md", settings_table),
    "node": (
        "metrics.md",
        lambda: _metrics_table(coordinator_metrics(), r"nvshare_(?!gpu_|client_|slot_|wait_|drain_|handover_)"),
    ),
    "gpus": (
        "metrics.md",
        lambda: _metrics_table(coordinator_metrics(), "nvshare_(gpu|wait|drain|handover)_", GPU),
    ),
    "programs": (
        "metrics.md",
        lambda: _metrics_table(coordinator_metrics(), "nvshare_client_", (*GPU, "client", "name", "pid", "user")),
    ),
    "slots": ("metrics.md", lambda: _metrics_table(coordinator_metrics(), "nvshare_slot_", SLOT)),
    "plugin": ("metrics.md", lambda: _metrics_table(plugin_families(), "")),
}
"""Name of the table -> its page, its rows."""


def generate(page: str) -> str:
    """The text of a page with its tables made anew."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    for name, (where, rows) in TABLES.items():
        if where != page:
            continue
        begin, end = f"<!-- generated: {name} -->\n", "\n<!-- end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        assert after, f"{page} has no place for the table {name}"
        text = before + begin + "\n" + "\n".join(rows()) + "\n" + end + after
    return text


if __name__ == "__main__":
    for each in sorted({page for page, _ in TABLES.values()}):
        (REFERENCE / each).write_text(generate(each), encoding="utf-8")
