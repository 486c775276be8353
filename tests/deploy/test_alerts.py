"""The rules for Prometheus: each alert is whole, with its runbook entry and cases, and asks for metrics that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from nolocod.observe.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules" / "nolocod.yml"
CASES = ROOT / "deploy" / "prometheus" / "tests" / "nolocod.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"

rules: list[dict[str, Any]] = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
cases: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]


def test_no_alert_is_there_twice() -> None:
    assert len(alerts) == sum("alert" in rule for rule in rules) > 15


@pytest.mark.parametrize("name", alerts)
def test_an_alert_tells_how_bad_it_is_what_it_means_and_where_to_read_on(name: str) -> None:
    alert = alerts[name]
    assert re.fullmatch(r"Nolocod([A-Z][a-z]+)+", name)
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert "{{ $labels." in alert["annotations"]["summary"], "the summary names the node or the run"
    assert alert["annotations"]["description"].endswith(".")


def test_every_alert_has_its_entry_in_the_runbook_and_every_entry_its_alert() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    entries = {section.splitlines()[0]: section for section in sections}
    assert list(entries) == list(alerts), "in the order of the rules"
    for name, text in entries.items():
        assert re.findall(r"^- \*\*([^*]+)\*\*:", text, re.MULTILINE) == ["Means", "Look at", "Do"], name


@pytest.mark.parametrize("name", alerts)
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    query = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
    expected = [one["exp_samples"] for case in cases for one in case["promql_expr_test"] if one["expr"] == query]
    assert [] in expected
    firing = [samples for samples in expected if samples]
    assert firing
    # Beside the node that is ill stands one that is well, and none of these may fire: a case lists all that do.
    assert all("ill" in sample["labels"] for samples in firing for sample in samples)


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    registry = CollectorRegistry()
    Metrics(lambda: 0, registry)
    suffixes = {"counter": ["_total"], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}
    known = {family.name + suffix for family in registry.collect() for suffix in suffixes.get(family.type, [""])}
    known |= {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules for name in re.findall(r"[\w:]*nolocod_[\w:]+", rule["expr"])}
    assert len(asked) > 15
    assert asked <= known, f"no such metric: {sorted(asked - known)}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed")
@pytest.mark.parametrize(("verb", "path"), [("check", RULES), ("test", CASES)], ids=["check", "test"])
def test_promtool_agrees(verb: str, path: Path) -> None:
    done = subprocess.run(["promtool", verb, "rules", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
