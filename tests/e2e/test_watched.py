"""Real daemons, a real Prometheus with our rules: every query of every panel, variable, annotation and rule has data.

Needs Prometheus (Debian's package `prometheus`, which has promtool too).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from swarm import ENOUGH, ready

from nolocod import datadir

if TYPE_CHECKING:
    from swarm import Swarm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: nolocod
    static_configs: [{{targets: {targets}}}]
"""

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")


def test_every_panel_and_rule_has_data_in_a_healthy_swarm(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.found(steps=20)
    swarm.wait("the first node's address", lambda: ready(first))
    second = swarm.daemon().run("join", "--bootstrap", first.address)
    swarm.wait("the second node's address", lambda: ready(second))
    swarm.wait_paired([first, second], 1)
    targets = [datadir.find_running(one.paths).http for one in (first, second)]
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(rules=ROOT / "deploy" / "prometheus" / "rules", targets=targets))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    line = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen([*line, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        command = [sys.executable, "-m", "tools.panels", "--prometheus", f"http://{address}", "--wait", str(ENOUGH)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * ENOUGH, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{first.tail()}"
        with urllib.request.urlopen(f"http://{targets[0]}/metrics", timeout=10) as answer:
            page = answer.read()
        said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=ENOUGH, check=False)
        assert (said.returncode, said.stdout, said.stderr) == (0, b"", b""), "promtool has something to say of a live page"
    finally:
        prometheus.kill()
        prometheus.wait(ENOUGH)
