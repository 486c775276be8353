"""`nolocod testnet` as its users run it: to its end, interrupted, terminated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from tests.support.swarm import ENOUGH

if TYPE_CHECKING:
    from pathlib import Path


def test_a_testnet_reports_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    line = [sys.executable, "-m", "nolocod", "testnet", "--nodes", "2", "--model", "tiny", "--outer-steps", "12"]
    done = subprocess.run(
        [*line, "--report", str(report), "--keep", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=2 * ENOUGH,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "no terminal codes where there is no terminal"
    assert "2 nodes, 24 outer steps each" in done.stdout, "as nodes count them: of half the model each"
    told = json.loads(report.read_text())
    assert all(node["outer_paired"] >= 1 and node["val_loss_last"] < node["val_loss_first"] for node in told["nodes"])
    for number, node in enumerate(told["nodes"]):
        measured = re.findall(r"validation loss (\S+)", (tmp_path / "kept" / f"node-{number}.log").read_text())
        assert f"{node['val_loss_last']:.4g}" == measured[-1], "of its last weights, not of some rounds before"
    assert told["averaged_val_loss"] > 0
    assert told["alone_val_loss"] > 0
    assert told["weight_std"] > 0
    assert sum(node["bytes_sent"] for node in told["nodes"]) == sum(node["bytes_received"] for node in told["nodes"]) > 0

    line = [*line[:-1], "100000"]
    with subprocess.Popen([*line, "--keep", str(tmp_path / "more")], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for text in running.stdout:
            if "node-1: training" in text:
                break
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
        assert running.wait(ENOUGH) == 0
    assert "interrupted" in rest
    assert "val. before" in rest
    assert not any(str(tmp_path / "more") in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    assert os.listdir(tmp_path / "more" / "node-1" / "checkpoints")


def test_a_testnet_that_is_terminated_takes_its_nodes_along(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "nolocod", "testnet", "--nodes", "2", "--model", "tiny", "--keep", str(tmp_path / "kept")]
    line += ["--log-format", "json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for text in running.stdout:
            if "node-1: " in text:
                break
        running.send_signal(signal.SIGTERM)
        assert "interrupted" in running.stdout.read()
        assert running.wait(ENOUGH) == 0
    assert not any(str(tmp_path / "kept") in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    logs = [json.loads(text) for log in (tmp_path / "kept").glob("*.log") for text in log.read_text().splitlines()]
    assert {"started", "state_changed"} <= {one["event"] for one in logs}, "and every line is an object"
