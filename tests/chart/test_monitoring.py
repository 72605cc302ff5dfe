"""Alert rules, dashboard and monitors: Prometheus' own tool reads them, and every metric in them is exported.

Non-goals: how metrics are made (tests/unit/daemon/test_metrics.py).
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import exporter
from tests.chart.conftest import CHART, Rendered, own_schema, render
from tests.conftest import ROOT

DASHBOARD = json.loads((CHART / "dashboards" / "nvshare.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text(encoding="utf-8"))
RECORDED = yaml.safe_load((CHART / "rules" / "usage.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
TARGET_LABELS = {"node", "job", "instance"}
"""Labels that scraping adds."""
FOREIGN = {"up"}


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Prometheus' own checker; skips where it is not installed."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: install Debian's prometheus package")
    return subprocess.run([found, *words], capture_output=True, text=True, check=False)


def alerts() -> list[dict[str, Any]]:
    """Every alert rule of the file."""
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Every panel that shows something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Every expression of the dashboard, with Grafana's variables as Prometheus would get them."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    values = {"$__rate_interval": "5m", "$node": "node-1|node-2", "$gpu": ".*"}
    for name, value in values.items():
        found = [expression.replace(name, value) for expression in found]
    return found


@functools.cache
def exported() -> dict[str, set[str]]:
    """Metrics of a coordinator with two busy pods, and of its device plugin."""
    texts = (exporter.scrape(1, 2), exporter.scrape_plugin())
    return {name: labels for text in texts for name, labels in exporter.series(text).items()}


def test_rules_are_valid(tmp_path: Path) -> None:
    """A rule that Prometheus cannot read takes all rules of its file with it."""
    done = promtool("check", "rules", str(CHART / "rules" / "alerts.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = render({"metrics": {"prometheusRule": {"enabled": True, "disabled": ["NvshareLongWaits"]}}})
    rule = rendered.one("PrometheusRule")["spec"]
    names = [each.get("alert") or each["record"] for group in rule["groups"] for each in group["rules"]]
    kept = [each["alert"] for each in alerts() if each["alert"] != "NvshareLongWaits"]
    assert names == [*kept, *(each["record"] for each in RECORDED)]
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump(rule), encoding="utf-8")
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_expressions_are_valid(tmp_path: Path) -> None:
    """An expression with a mistake is an empty panel that nobody notices until it is needed."""
    rules = [{"record": f"panel:{index}", "expr": text} for index, text in enumerate(expressions())]
    assert len(rules) > 20
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should() -> None:
    """An alert that never fires is worse than none: somebody relies on it."""
    done = promtool("test", "rules", str(ROOT / "tests" / "chart" / "alerts_test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (ROOT / "tests" / "chart" / "alerts_test.yaml").read_text(encoding="utf-8")
    untested = [rule["alert"] for rule in alerts() if f"alertname: {rule['alert']}\n" not in tested]
    assert untested == []


def test_use_is_recorded_as_bills_need_it() -> None:
    """Broken: a team is billed for more GPUs than a node has, or its cost has no price."""
    done = promtool("test", "rules", str(ROOT / "tests" / "chart" / "usage_test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", [*expressions(), *[rule["expr"] for rule in [*alerts(), *RECORDED[:2]]]])
def test_every_metric_is_exported(expression: str) -> None:
    """A renamed metric leaves dashboards and alerts silent."""
    text = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(r"\b(nvshare_\w+|up)\b", text))
    assert names
    assert names - FOREIGN <= set(exported())
    for name, matchers in re.findall(r"\b(nvshare_\w+)\{([^}]*)\}", text):
        labels = set(re.findall(r"(\w+)\s*[=!]~?", matchers))
        assert labels <= exported()[name] | TARGET_LABELS, name
    known = set().union(*(exported()[name] for name in names - FOREIGN)) | TARGET_LABELS
    for grouping in re.findall(r"\bby \(([^)]*)\)", text):
        assert {label.strip() for label in grouping.split(",")} <= known, grouping


def test_labels_in_texts_exist() -> None:
    """`{{ $labels.gpu }}` of a label that is not there is an alert about nothing."""
    for rule in alerts():
        names = set(re.findall(r"\b(nvshare_\w+)\b", rule["expr"]))
        known = set().union(*(exported()[name] for name in names)) | TARGET_LABELS
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= known, rule["alert"]
    for panel in panels():
        for target in panel["targets"]:
            names = set(re.findall(r"\b(nvshare_\w+)\b", target["expr"]))
            known = set().union(*(exported()[name] for name in names), TARGET_LABELS)
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_dashboard_is_well_formed() -> None:
    """Grafana drops a panel that lies on another, and one without a data source shows nothing."""
    assert list(own_schema("dashboard").iter_errors(DASHBOARD)) == []
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & own, panel["title"]
        cells |= own
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))


def test_the_config_map_is_the_dashboard() -> None:
    """Grafana's sidecar reads the file out of the ConfigMap: indentation must not have broken it."""
    rendered = render({"metrics": {"dashboard": {"enabled": True}}})
    (found,) = [
        document for document in rendered.all("ConfigMap") if document["metadata"]["name"].endswith("dashboard")
    ]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["nvshare.json"]) == DASHBOARD


def matched(rendered: Rendered, monitor: dict[str, Any]) -> dict[str, Any]:
    """The template of the pods that a monitor scrapes, by way of the service if it is a ServiceMonitor."""
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    if monitor["kind"] == "ServiceMonitor":
        (service,) = [each for each in rendered.all("Service") if wanted <= each["metadata"]["labels"].items()]
        targets = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
        assert all(name == target for name, target in targets.items())
        wanted = service["spec"]["selector"].items()
    template = rendered.one("DaemonSet")["spec"]["template"]
    assert wanted <= template["metadata"]["labels"].items()
    return dict(template)


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
@pytest.mark.parametrize("mode", ["plugin", "external"])
def test_monitors_find_what_serves_metrics(kind: str, mode: str) -> None:
    """A monitor whose labels or ports match nothing scrapes nothing, and nobody is told."""
    key = kind[0].lower() + kind[1:]
    rendered = render({"metrics": {key: {"enabled": True}}, "advertise": {"mode": mode}})
    monitor = rendered.one(kind)
    pod = matched(rendered, monitor)["spec"]
    ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
    endpoints = monitor["spec"]["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} == ports
    assert all(each["honorLabels"] for each in endpoints), "else pod and namespace are the coordinator's own"


def test_the_job_of_the_alert_is_the_monitors() -> None:
    """`up{job=...}` of another job than the monitor's never fires."""
    values = {
        "nameOverride": "slices",
        "metrics": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    }
    rendered = render(values)
    label = rendered.one("PodMonitor")["spec"]["jobLabel"]
    job = rendered.one("DaemonSet")["spec"]["template"]["metadata"]["labels"][label]
    (down,) = [
        rule
        for group in rendered.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "NvshareDown"
    ]
    assert f'job="{job}"' in down["expr"]
    assert job == "slices"
