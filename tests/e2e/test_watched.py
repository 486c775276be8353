"""Real daemons, a real Prometheus with our rules: every query of every panel, variable, annotation and rule has data.

Needs Prometheus (Debian's package `prometheus`, which has promtool too).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nolocod.node import data_directory
from tests.support.swarm import ENOUGH, ready
from tools.prometheus import prometheus

if TYPE_CHECKING:
    from tests.support.swarm import Swarm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")


def test_every_panel_and_rule_has_data_in_a_healthy_swarm(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.found(steps=20)
    swarm.wait("the first node's address", lambda: ready(first))
    second = swarm.daemon().run("join", "--bootstrap", first.address)
    swarm.wait("the second node's address", lambda: ready(second))
    swarm.wait_paired([first, second], 1)
    targets = [data_directory.find_running(one.paths).http for one in (first, second)]
    with prometheus(tmp_path, 1) as (url, watch):
        watch(targets)
        command = [sys.executable, "-m", "tools.panels", "--prometheus", url, "--wait", str(ENOUGH)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * ENOUGH, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{first.tail()}"
        with urllib.request.urlopen(f"http://{targets[0]}/metrics", timeout=10) as answer:
            page = answer.read()
        said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=ENOUGH, check=False)
        assert (said.returncode, said.stdout, said.stderr) == (0, b"", b""), "promtool has something to say of a live page"
