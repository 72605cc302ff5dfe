"""The table of the chart's values, from the comments of values.yaml: docs/reference/kubernetes-values.md.

`python -m tests.chart.values_table` writes the page.

Non-goals: what values are allowed (values.schema.json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.conftest import ROOT

CHART: Final = ROOT / "charts" / "nvshare"
PAGE: Final = ROOT / "docs" / "reference" / "kubernetes-values.md"
LONGEST_DEFAULT: Final = 80
_HEAD: Final = """# Kubernetes: values of the chart

Every value of `charts/nvshare` with its default, from the comments of its `values.yaml`. `helm install` refuses other
names and wrong types. [Share GPUs in Kubernetes](../how-to/kubernetes.md) explains those that matter first.

| value | default | |
|---|---|---|
"""


def rows() -> Iterator[tuple[str, str, str]]:
    """(name, default, comment) of every value.  A group's comment stands with its first value."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    yield from _rows(yaml.compose(text), schema, text.splitlines(), "", "")


def _rows(node: Any, schema: dict[str, Any], lines: list[str], path: str, group: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        inner = schema["properties"][key.value]
        said = " ".join(filter(None, (group, _above(lines, key.start_mark.line))))
        group = ""
        if isinstance(value, yaml.MappingNode) and value.value and "properties" in inner:
            yield from _rows(value, inner, lines, f"{path}{key.value}.", said)
        else:
            yield path + key.value, _default(value), said


def _above(lines: list[str], line: int) -> str:
    """The comment directly above a line."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, " ".join(lines[line].lstrip(" #").split()))
    return " ".join(found)


def _default(node: Any) -> str:
    text = json.dumps(yaml.safe_load(yaml.serialize(node)))
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see `values.yaml`"


def page() -> str:
    """The whole page."""
    table = [f"| `{name}` | {default} | {said.replace('|', '/')} |" for name, default, said in rows()]
    return _HEAD + "\n".join(table) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
