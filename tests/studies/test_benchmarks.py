"""`nolocod bench`: what is concluded from figures, and flags that are refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nolocod import cli
from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.training import TrainingResult, bound_to


def test_what_exchanges_cost_is_told_beside_the_same_daemon_without_them() -> None:
    result = TrainingResult(True, [100.0, 200.0], [90.0, 200.0], [97.0, 188.0], [97.0, 141.0], [1.0, 0.9])
    assert result.over_bare(result.apart) == [0.97, 0.94]
    assert result.kept == [1.0, 0.75]
    assert "0.837 (0.705-0.970)   (an exchange under way 95% of the time)" in result.to_text()
    assert "with exchanges over without: 0.875 (0.750-1.000)" in result.to_text()


def test_what_is_started_in_the_block_is_bound_to_its_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with bound_to(frozenset([core])):
        told = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
    assert told.strip() == f"{{{core}}}"
    assert os.sched_getaffinity(0) == before


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 2.0], digits=1) == "2.0 (1.0-3.0)"


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--codec", "float64"], "float64"), (["--pairs", "0"], "must be positive"), (["--seconds", "nan"], "must be positive")],
)
def test_a_wrong_flag_is_told_before_anything_runs(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "training", *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
