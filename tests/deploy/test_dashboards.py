"""Grafana's dashboards as checked in: made by the code, whole, and asking for metrics that there are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from nolocod.observe.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
BOARDS: dict[str, Any] = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in FILES}

sys.path.insert(0, str(ROOT))
panels = importlib.import_module("tools.panels")

CHARTS = [
    pytest.param(panel, id=f"{name}-{panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]


@pytest.mark.skipif(importlib.util.find_spec("grafana_foundation_sdk") is None, reason="needs the extra nolocod[dashboards]")
@pytest.mark.parametrize("name", ["swarm.json", "node.json"])
def test_they_are_what_the_code_makes(name: str) -> None:
    made = importlib.import_module("tools.dashboards")
    assert (made.FOLDER / name).read_text(encoding="utf-8") == made.text(made.BOARDS[name]), "Run: python -m tools.dashboards"


def test_there_are_two_with_variables_and_annotations() -> None:
    assert {board["uid"] for board in BOARDS.values()} == {"nolocod-swarm", "nolocod-node"}
    variables = {board["uid"]: [one["name"] for one in board["templating"]["list"]] for board in BOARDS.values()}
    assert variables == {"nolocod-swarm": ["datasource", "run"], "nolocod-node": ["datasource", "run", "node"]}
    for board in BOARDS.values():
        assert [note["name"] for note in board["annotations"]["list"]] == ["Joins", "Bans", "Restarts"]


@pytest.mark.parametrize("panel", CHARTS)
def test_a_panel_says_what_it_shows_and_fits_a_laptop(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["targets"]
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    assert place["w"] >= 4, "narrower cannot be read at 1280 pixels"
    assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] != "stat" or panel["fieldConfig"]["defaults"]["thresholds"], "Grafana's own turn red at 80"


@pytest.mark.parametrize("name", BOARDS)
def test_no_two_panels_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_they_ask_for_metrics_that_there_are_and_show_all_that_count() -> None:
    registry = CollectorRegistry()
    Metrics(lambda: 0, registry)
    suffixes = {"counter": ["_total"], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "nolocod.yml").read_text())["groups"]
    known = {family.name + suffix for family in registry.collect() for suffix in suffixes.get(family.type, [""])}
    known |= {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    questions = [question for board in BOARDS.values() for question in panels.of_board(board)]
    asked = {name for one in questions for name in re.findall(r"[\w:]*nolocod_[\w:]+", one.query)}
    assert asked <= known, f"no such metric: {sorted(asked - known)}"
    assert len(asked) > 30


class Answers:
    """A Prometheus that has what it is told to have."""

    def __init__(self, without: str = "", health: str = "ok") -> None:
        self.without, self.health = without, health

    def __call__(self, path: str, parameters: dict[str, str]) -> Any:  # noqa: ANN401  # JSON
        if path == "rules":
            recorded = {"name": "run:x", "type": "recording", "health": self.health, "lastError": "bad"}
            alert = {
                "name": "Down",
                "type": "alerting",
                "health": "ok",
                "query": 'up{job="nolocod"} == 0 and nolocod_round > 3',
            }
            return {"groups": [{"rules": [recorded, alert]}]}
        if path.startswith("label/"):
            return [] if self.without == "values" else ["demo"]
        missing = self.without and self.without in parameters["query"]
        return {"result": [{"value": [0, "NaN" if missing else "1"]}]}


def test_the_checker_finds_all_is_well() -> None:
    total, failed = panels.check(Answers())
    assert failed == []
    assert total > 70


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (Answers("nolocod_learning_rate"), "nolocod: node, panel Learning rate: nothing for nolocod_learning_rate"),
        (Answers("values"), "nolocod: swarm, variable run: nothing for label_values(nolocod_build_info, run_name)"),
        (Answers("peer_bans"), "annotation Bans: nothing for"),
        (Answers("run:x"), "rule run:x: nothing for run:x"),
        (Answers("up{job"), 'alert Down: nothing for up{job="nolocod"}'),
        (Answers(health="err"), "rule run:x: bad"),
    ],
)
def test_the_checker_names_what_has_no_data(answers: Answers, line: str) -> None:
    _, failed = panels.check(answers)
    assert any(line in one for one in failed), failed


def test_the_checker_refuses_a_prometheus_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert panels.main(["--prometheus", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().out
