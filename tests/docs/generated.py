"""The tables of settings and metrics in the reference pages, and the settings in the chart's schema, from the code:
`python -m tests.docs.generated`.

A page keeps its prose; a table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import Metric

from nvshare.coordinator.daemon import metrics
from nvshare.coordinator.engine.scheduler import Scheduler
from nvshare.coordinator.kubernetes.cluster.pods import Counts as WatchCounts
from nvshare.coordinator.kubernetes.node import plugin_metrics
from nvshare.coordinator.model.settings import CONFIGURED, Setting, Settings
from nvshare.scheduler_policies import registry

ROOT: Final = Path(__file__).resolve().parents[2]
REFERENCE: Final = ROOT / "docs" / "reference"
SCHEMA: Final = ROOT / "charts" / "nvshare" / "values.schema.json"


def settings_table() -> list[str]:
    """One row a setting."""
    rows = ["| setting | default | of one GPU | meaning |", "|---|---|---|---|"]
    for key, each in CONFIGURED.items():
        default = f"`{each.default_shown}`" if each.default is not None or each.kind.none else each.default_text
        rows.append(f"| `{key}` | {default} | {'yes' if each.by_gpu else ''} | {each.help} |")
    return rows


def chart_schema() -> str:
    """The schema of the chart's values, with the properties of the settings made anew."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))

    def properties(wanted: Callable[[Setting], bool]) -> dict[str, Any]:
        return {key: each.kind.schema for key, each in CONFIGURED.items() if each.in_chart and wanted(each)}

    settings = schema["properties"]["settings"]
    settings["properties"] = properties(lambda each: True) | {"gpu": settings["properties"]["gpu"]}
    schema["definitions"]["gpuOverride"]["properties"] = properties(lambda each: each.by_gpu)
    return json.dumps(schema, indent=2) + "\n"


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
    SCHEMA.write_text(chart_schema(), encoding="utf-8")
