"""From an announcement to the first paired step: a run is announced, listed, found by its name and joined by its link."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.swarm import ENOUGH, Swarm, ready

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.studies import daemons


def nolocod(*arguments: str, data_dir: Path) -> str:
    """What the command prints; it must succeed."""
    command = [sys.executable, "-m", "nolocod", *arguments, "--data-dir", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_announced_listed_and_joined(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    home = first.paths.root
    told = json.loads(
        nolocod("announce", "--description", "for a test", "--licence", "MIT", "--contact", "me", "--json", data_dir=home)
    )
    assert told["not_told"] == {}

    def listed(*more: str) -> list[dict[str, object]]:
        lines = nolocod("runs", "--json", "--bootstrap", first.address, *more, data_dir=tmp_path / "nobody").splitlines()
        return [json.loads(line) for line in lines]

    swarm.wait("the node has heard of the announcement", lambda: bool(listed()))
    (found,) = listed("--fits")
    assert {name: found[name] for name in ("name", "run_id", "description", "licence", "contact", "model", "nodes")} == {
        "name": "e2e", "run_id": told["run_id"], "description": "for a test", "licence": "MIT", "contact": "me",
        "model": "llama", "nodes": 1,
    }  # fmt: skip
    assert "1 nodes or more" in nolocod("runs", data_dir=home), "the node that runs there is asked"

    second = swarm.daemon().run("join", "e2e", "--bootstrap", first.address, "--name", "Ann's box")
    swarm.wait_paired([first, second], 1)
    third = swarm.daemon().run("join", told["links"][0])
    swarm.wait_paired([third], 1)
    swarm.wait(
        "the second node has the announcement from the first", lambda: "e2e" in nolocod_runs(second, tmp_path / "nobody")
    )

    def given() -> dict[str, dict[str, object]]:
        told = json.loads(nolocod("contributions", "--json", data_dir=home))
        return {one["peer_id"]: one for one in told["contributors"]}

    swarm.wait("receipts of both show what all three gave", lambda: len(given()) == 3)
    assert sorted(str(one["name"]) for one in given().values()) == ["", "", "Ann's box"]
    assert "verified" in nolocod("contributions", "--export", str(tmp_path / "mine"), data_dir=second.paths.root)
    assert "called Ann's box" in nolocod("contributions", "--verify", str(tmp_path / "mine"), data_dir=tmp_path / "nobody")

    seen = json.loads(nolocod("watch", "e2e", "--bootstrap", first.address, "--json", data_dir=tmp_path / "watch"))
    assert (seen["known"], seen["states"]["training"], seen["run_id"]) == (3, 3, told["run_id"])
    assert all(member["answered"] for member in seen["members"])
    assert seen["tokens_per_second"] > 0
    assert {peer for edge in seen["exchanges"] for peer in edge[:2]} == {member["peer_id"] for member in seen["members"]}

    nolocod("announce", "--withdraw", data_dir=home)
    swarm.wait("the announcement is taken back everywhere", lambda: nolocod_runs(third, tmp_path / "nobody") == "")
    swarm.stop(first, second, third)


def nolocod_runs(daemon: daemons.Daemon, folder: Path) -> str:
    return nolocod("runs", "--bootstrap", daemon.address, data_dir=folder)
