"""`nolocod doctor` as its users run it, beside a running node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support.swarm import ENOUGH

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.swarm import Swarm


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and findings by code."""
    line = [sys.executable, "-m", "nolocod", "doctor", "--json", "--no-upnp", "--device", "cpu", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode == 0) == report["ok"]
    return done.returncode, {one["code"]: one for one in report["checks"]}


def facts(root: Path) -> dict[str, int]:
    """The directory's files that a node does not write all the time, and when they changed."""
    busy = {"checkpoints", "serving", "incoming", "receipts", "usage.json", "peers.json"}
    return {name: os.stat(root / name).st_mtime_ns for name in sorted(os.listdir(root)) if name not in busy}


def test_beside_a_running_node_and_before_one(swarm: Swarm) -> None:
    first = swarm.found()
    swarm.wait("the first node trains", lambda: first.report is not None and first.report.state == "training")
    assert first.report is not None
    before, run_id = facts(first.paths.root), first.report.run_id

    status, found = doctor("--data-dir", str(first.paths.root), "--data", str(swarm.data), "--bootstrap", first.address)
    failures = {code for code, one in found.items() if one["status"] == "fail"}
    assert failures <= {"D02"}, found  # a torch that takes more than half a minute to import, on a machine full of tests
    assert status == bool(failures)
    assert "runs here: training" in found["D08"]["found"]
    assert found["D21"]["status"] == "skipped", "the node's own address"
    assert found["D04"]["status"] in ("skipped", "warn"), "the node has the model in memory"
    assert "its own" in found["D20"]["found"]
    assert facts(first.paths.root) == before, "nothing was written"
    assert first.report is not None, "and the node goes on"

    newcomer = swarm.root / "newcomer"
    _, found = doctor("--data-dir", str(newcomer), "--data", str(swarm.data), "--bootstrap", first.address)
    assert run_id[:12] in found["D23"]["found"]
    assert [found[code]["status"] for code in ("D21", "D22", "D23", "D24", "D25")] == ["ok"] * 5, found
    assert found["D30"]["status"] in ("ok", "skipped"), found["D30"]
    assert not newcomer.exists()

    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{first.report.peer_id}"
    status, found = doctor("--data-dir", str(newcomer), "--bootstrap", dead)
    assert (status, found["D21"]["status"]) == (1, "fail")
