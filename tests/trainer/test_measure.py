"""`nolocod create --plan --measure`: what a real trainer process did takes the place of what was estimated."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nolocod import cli
from nolocod.commands import terminal
from nolocod.disk import USUAL_RATE
from nolocod.observe.events import DevicesChosen, MemoryTaken
from nolocod.observe.words import amount
from nolocod.run import presets
from nolocod.trainer import measure
from nolocod.trainer.estimate import Machine, estimate, needs_on
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


def test_of_a_gpu_its_own_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    taken = MemoryTaken(weights=1, gradients=1, optimizer=1, outer=1, exchange=1, peak=7 << 30)
    for device, wanted in (("cpu", None), ("cuda:0 (compiled)", 7 << 30)):
        watch = measure._Watch()
        watch.emit(DevicesChosen((device,), "cpu"))
        watch.emit(taken)
        assert watch.device_memory == wanted
    manifest = sealed_run().manifest
    run, machine = estimate(manifest), Machine(1.0, 1e6, 1e6, on_cpu=False)
    needs = needs_on(run, machine, 30.0)
    for found, text in (
        (7 << 30, f"{amount(7 << 30)} of memory, measured here"),
        (None, f"{amount(needs.device_memory)} of memory"),
    ):
        measured = measure.Measured(1.0, 1, 1, 1.0, 1, 0.0, found)
        terminal.show(terminal.plan_table(manifest, run, machine, needs, measured))
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("each device"))
        assert row.removeprefix("each device").strip() == text


@pytest.mark.parametrize(("disk", "told"), [(1e9, ""), (20e3, ": the checkpoint needs --stop-within ")])
def test_a_stop_that_outlasts_what_sigterm_leaves_is_told(capsys: pytest.CaptureFixture[str], disk: float, told: str) -> None:
    manifest = sealed_run().manifest
    run, machine = estimate(manifest), Machine(0.1, 1e6, 1e6, disk)
    needs = needs_on(run, machine, 1.0)
    terminal.show(terminal.plan_table(manifest, run, machine, needs, None))
    text = " ".join(capsys.readouterr().out.split())
    assert (told in text) if told else (": the checkpoint needs" not in text)
    assert not told or f"{told}{math.ceil(needs.stop + 3)}" in text


def test_a_machine_without_text_says_so_in_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(presets.to_toml(sealed_run().manifest))
    with pytest.raises(SystemExit):
        cli.main(["create", str(tmp_path / "run.toml"), "--plan", "--measure", "--device", "cpu", "--data-dir", str(tmp_path)])
    err = capsys.readouterr().err
    assert "NLC-" in err
    assert "--data" in err
