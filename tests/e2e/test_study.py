"""The study of methods, in its reduced form, as its user runs it: a tiny model, one seed, the product's own outer step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.swarm import ENOUGH

if TYPE_CHECKING:
    from pathlib import Path

HOLDS = (
    "data parallel is below DiLoCo, with our alpha, as often",
    "data parallel is below ours",
    "DiLoCo, with our alpha, as often is below none",
    "ours is below none",
)
"""What is far enough from the bound to hold on whatever processor: the others are told by docs/evidence.md."""


def test_methods_are_in_the_order_that_the_paper_tells(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.compare", "--reduced", "--workers", "2"]
    line = [*command, "--kept", str(tmp_path / "kept.jsonl")]
    first = subprocess.run(line, capture_output=True, text=True, timeout=3 * ENOUGH, check=True)
    assert "4 of 4: " in first.stderr, "progress is shown"
    for text in HOLDS:
        assert f"| {text} | yes | " in first.stdout, first.stdout
    again = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=True)
    assert (again.stdout, again.stderr) == (first.stdout, ""), "what was done is not done again"


def test_without_a_gpu_the_study_that_needs_one_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.compare", "--gpu", "--kept", str(tmp_path / "kept.jsonl")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Leave out --gpu" in done.stderr
    assert not (tmp_path / "kept.jsonl").exists()
