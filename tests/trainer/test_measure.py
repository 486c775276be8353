"""`nolocod create --plan --measure`: what a real trainer process did takes the place of what was estimated."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nolocod import cli
from nolocod.disk import USUAL_RATE
from nolocod.run import presets
from tests.support.trainer_parts import sealed_run, write_text

if TYPE_CHECKING:
    from pathlib import Path


def test_a_machine_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    """In a process of its own: what libraries take is seen as they are imported."""
    (tmp_path / "run.toml").write_text(presets.to_toml(sealed_run().manifest))
    home, data = tmp_path / "none" / "home", write_text(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    asked = ["--plan", "--measure", "--json", "--device", "cpu", "--data", str(data), "--data-dir", str(home)]
    command = [sys.executable, "-m", "nolocod", "create", str(tmp_path / "run.toml"), *asked]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    measured, run = told["measured"], told["run"]
    assert told["machine"]["step"] == measured["step"] > 0
    assert told["machine"]["disk"] == measured["checkpoint"] / measured["saving"] != USUAL_RATE
    assert run["checkpoint"] < measured["checkpoint"] < run["checkpoint"] + 50_000, "with its head and the random state"
    assert 0.7 < told["needs"]["trainer_memory"] / measured["memory"] < 1.3, "libraries, as good as alone"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_machine_without_text_says_so_in_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(presets.to_toml(sealed_run().manifest))
    with pytest.raises(SystemExit):
        cli.main(["create", str(tmp_path / "run.toml"), "--plan", "--measure", "--device", "cpu", "--data-dir", str(tmp_path)])
    err = capsys.readouterr().err
    assert "NLC-" in err
    assert "--data" in err
