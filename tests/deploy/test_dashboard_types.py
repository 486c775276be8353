"""The dashboards against Grafana's own definitions, of the release that the SDK is made for: its types, its units.

Needs npm, which fetches three packages (25 MB); what is checked is the JSON as a literal, so that a misspelt key is an error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

DASHBOARDS = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"
GRAFANA = "11.6.0"
HEAD = """import { type AnnotationQuery, type Dashboard, type DataQuery, ThresholdsMode } from "@grafana/schema";
type Note = AnnotationQuery<DataQuery & { expr: string }>;
type Board = Omit<Dashboard, "annotations"> & { annotations: { list: Note[] } };
export const board: Board = """
TSC = ["--strict", "--noEmit", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext", "--target", "es2022"]

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm, which brings Grafana's types, is not installed")


def npm(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["npm", *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot bring Grafana's packages: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "package.json").write_text('{"private": true}')
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    npm(folder, "install", *quiet, f"@grafana/schema@{GRAFANA}", "typescript@5.9.3")
    return folder


def compile_boards(folder: Path, boards: dict[str, str]) -> str:
    for name, text in boards.items():
        text = text.replace('"mode": "absolute"', '"mode": ThresholdsMode.Absolute')  # an enum takes no literal
        (folder / f"{name}.ts").write_text(f"{HEAD}{text};\n", encoding="utf-8")
    command = ["node_modules/.bin/tsc", *TSC, *(f"{name}.ts" for name in boards)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False).stdout


def test_the_dashboards_are_of_grafanas_type(folder: Path) -> None:
    boards = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DASHBOARDS.glob("*.json"))}
    assert len(boards) == 2
    assert compile_boards(folder, boards) == ""


def test_a_misspelt_key_is_found(folder: Path) -> None:
    text = (DASHBOARDS / "swarm.json").read_text(encoding="utf-8")
    assert '"refrehs"\' does not exist' in compile_boards(
        folder, {"wrong": text.replace('"refresh": "10s"', '"refrehs": "10s"')}
    )


def test_the_units_are_grafanas(folder: Path) -> None:
    npm(folder, "pack", f"@grafana/data@{GRAFANA}")
    with tarfile.open(folder / f"grafana-data-{GRAFANA}.tgz") as packed:
        member = packed.extractfile("package/dist/esm/valueFormats/categories.mjs")
        assert member is not None
        legal = set(re.findall(r'\bid: "([^"]+)"', member.read().decode()))
    assert len(legal) > 100
    used = {unit for path in DASHBOARDS.glob("*.json") for unit in units(json.loads(path.read_text(encoding="utf-8")))}
    assert {"s", "bytes"} < used <= legal, f"not Grafana's: {sorted(used - legal)}"


def units(board: dict[str, Any]) -> set[str]:
    """All unit ids of one dashboard."""
    found = set()
    for panel in board["panels"]:
        config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
        found.add(config["defaults"].get("unit"))
        properties = [one for override in config["overrides"] for one in override["properties"]]
        found |= {one["value"] for one in properties if one["id"] == "unit"}
    return found - {None}
