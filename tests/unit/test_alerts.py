"""The alert rules, their tests, the dashboard and the runbook fit the metrics that there are, and one another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from relay import metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
#: How a query spells a metric of ours.
_NAME = re.compile(r"\brelay_[a-z0-9_]+")


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _rules() -> list[dict[str, Any]]:
    return [rule for group in _load(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


def _dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "relay.json").read_text())
    return board


def _queries() -> list[str]:
    panels = _dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_rules_and_dashboard_name_metrics_that_there_are() -> None:
    """A metric that is renamed takes no alert and no panel with it unnoticed."""
    known = metrics.names()
    asked = {name for text in [rule["expr"] for rule in _rules()] + _queries() for name in _NAME.findall(text)}
    assert asked
    assert asked <= known, asked - known
    tested = set(_NAME.findall((PROMETHEUS / "rules_test.yml").read_text()))
    assert tested <= known, tested - known


def test_labels_that_rules_ask_for_are_of_their_metrics() -> None:
    """A reason, outcome or state that a query names is one that there is."""
    samples = [sample for family in metrics.REGISTRY.collect() for sample in family.samples]
    values = {value for sample in samples for value in sample.labels.values()}
    values |= {value for one in vars(metrics).values() if isinstance(one, metrics.Described) for value in one.values}
    # Sweeps are named by relay/sweeps, targets by prometheus.yml.
    named = {"reap", "partitions", "retention", "relay.*"}
    for text in [rule["expr"] for rule in _rules()] + _queries():
        for wanted in re.findall(r'[a-z]+(?:=|=~|!=)"([^"]+)"', text):
            assert wanted in named or set(wanted.split("|")) <= values, (wanted, text)


def test_each_alert_has_its_page_and_its_test() -> None:
    """Whoever is woken finds a section of the alert's name that says what to look at and what to do, and each alert is
    shown to fire."""
    runbook = (ROOT / "docs" / "operations.md").read_text()
    tested = (PROMETHEUS / "rules_test.yml").read_text()
    sections = dict(re.findall(r"^### (Relay\w+)\n(.*?)(?=^##|\Z)", runbook, re.MULTILINE | re.DOTALL))
    names = [rule["alert"] for rule in _rules()]
    assert len(set(names)) == len(names)
    assert set(sections) == set(names)
    for rule in _rules():
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert name in tested, f"{name} is not tested"
        for part in ("**Means**", "**Look**", "**Do**"):
            assert part in sections[name], f"{name} lacks {part}"


def test_the_dashboard_is_for_looking() -> None:
    """It is provisioned, read-only, opened without a login as a viewer, and grouped by failure."""
    board = _dashboard()
    assert board["editable"] is False
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert len(rows) == 5
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    source = _load(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"][0]
    used = {target["datasource"]["uid"] for panel in board["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"]}
    assert source["editable"] is False
    provider = _load(GRAFANA / "provisioning" / "dashboards" / "relay.yml")["providers"][0]
    assert provider["allowUiUpdates"] is False
    settings = (GRAFANA / "grafana.ini").read_text()
    assert "org_role = Viewer" in settings
    assert f"default_home_dashboard_path = {provider['options']['path']}/relay.json" in settings


def test_promtool_agrees() -> None:
    """Where Prometheus's own tool is installed it runs the rules' tests; everywhere the rules have the shape that it
    asks for."""
    for group in _load(PROMETHEUS / "rules.yml")["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["expr"].count("(") == rule["expr"].count(")")
    assert _load(PROMETHEUS / "prometheus.yml")["rule_files"] == ["rules.yml"]
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "test", "rules", "rules_test.yml"],
            cwd=PROMETHEUS,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
