"""`nolocod create --plan`, and the run files that docs/runs gives as a start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nolocod import cli
from nolocod.run import presets
from nolocod.run.run_file import read_run_file
from nolocod.trainer.estimate import EFFICIENCY, Estimate, estimate
from tests.support.trainer_parts import make_replica, sealed_run

RUNS = Path(__file__).resolve().parents[2] / "docs" / "runs"


@pytest.mark.parametrize(("name", "least", "most"), [("10m", 9e6, 12e6), ("125m", 1e8, 1.4e8), ("1.3b", 1.1e9, 1.4e9)])
def test_the_run_files_are_good_and_as_large_as_they_say(name: str, least: float, most: float) -> None:
    needs = estimate(read_run_file(RUNS / f"{name}.toml"))
    assert least < needs.parameters < most
    assert 12 * needs.parameters < needs.on_device < 13.5 * needs.parameters, "a moment instead of two, where Muon trains"


def test_what_is_estimated_is_what_a_replica_has(tmp_path: Path) -> None:
    sealed = sealed_run()
    needs, replica = estimate(sealed.manifest), make_replica(sealed, tmp_path)
    assert needs.parameters == replica.layout.size == replica.theta.numel()
    assert needs.message == replica.plan.box_size


def test_times_follow_from_operations_and_rates() -> None:
    needs = Estimate(1000, 1000, 50, 0, 0, 0, 4_000_000, operations=8e9)
    assert needs.step_seconds(1e10) == pytest.approx(0.8 / EFFICIENCY)
    assert needs.round_seconds(1e10) == pytest.approx(40 / EFFICIENCY)
    assert needs.exchange_seconds(1_000_000) == pytest.approx(4.0)
    fewest = needs.fewest_steps(1e10, 1_000_000)
    assert (fewest - 1) * needs.step_seconds(1e10) < 8.0 <= fewest * needs.step_seconds(1e10), "busy for half of them"


def test_operations_are_those_of_the_formula_by_hand() -> None:
    manifest = presets.local_run(presets.MODELS["tiny"], rounds=1, inner_steps=1, seed=1, own_text=False)
    needs = estimate(manifest)
    tokens, layers, hidden, sequence = 4 * 128, 2, 64, 128
    alone = tokens * (6 * needs.parameters + 12 * layers * hidden * sequence)
    square, wide = (5 * (4 * 64**2 * width + 2 * 64**3) for width in (64, 176))
    assert needs.operations == alone + layers * (4 * square + 3 * wide)
    inner = msgspec.structs.replace(manifest.inner, optimizer="adamw")
    needs = estimate(msgspec.structs.replace(manifest, inner=inner))
    assert (needs.operations, needs.on_device) == (alone, 16 * needs.parameters)


def test_a_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["create", str(RUNS / "10m.toml"), "--plan", "--device", "cpu", "--data-dir", str(tmp_path / "home")])
    out = capsys.readouterr().out
    assert "10,720,128 parameters" in out
    assert "100 inner steps" not in out
    assert "every 25 inner steps" in out
    assert not (tmp_path / "home").exists()


def test_a_plan_for_a_line_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["create", str(RUNS / "10m.toml"), "--plan", "--line", "fast"])
    assert "--line 'fast'" in capsys.readouterr().err
