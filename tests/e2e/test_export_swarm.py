"""The mean of two real daemons' weights, exported beside them; a stranger who asks for more than there are is told."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from nolocod.run.manifest import stored_manifest
from nolocod.trainer.offline import last_tensor
from tests.support.swarm import ENOUGH, Daemon, Swarm

if TYPE_CHECKING:
    from pathlib import Path


def export(into: Path, count: int, home: Path, *more: str) -> tuple[int, str]:
    """`nolocod export --swarm`: its exit status, and what it printed."""
    line = [sys.executable, "-m", "nolocod", "export", str(into), "--swarm", str(count), "--data-dir", str(home), *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=False)
    return done.returncode, done.stdout + done.stderr


def done(node: Daemon) -> bool:
    report = node.report
    return report is not None and report.state == "finished" and report.checkpoint_round == 10


def test_the_mean_of_two_nodes_is_exported_beside_them_and_a_third_is_missed(swarm: Swarm, tmp_path: Path) -> None:
    # so slow a rate that they are near each other after as few rounds, whoever was alone in how many; and steps enough that the
    # second is there before the first has finished, of whose weights it would have no more than a copy
    first = swarm.found("bfloat16", rounds=10, steps=12, rate=2e-5)
    nodes = swarm.joined_by(first, 1)
    swarm.wait("all have finished, and written their last checkpoints", lambda: all(map(done, nodes)))
    status, said = export(tmp_path / "mean", 2, first.paths.root, "--data", str(swarm.data))
    assert status == 0, said
    assert "held-out loss of the mean of 2" in said
    written = load_file(tmp_path / "mean" / "model.safetensors")
    assert json.loads((tmp_path / "mean" / "config.json").read_text())["model_type"] == "llama"
    card = (tmp_path / "mean" / "README.md").read_text()
    assert all(node.report and node.report.peer_id in card for node in nodes)

    status, said = export(tmp_path / "none", 3, tmp_path / "stranger", "--bootstrap", first.address)
    assert (status, "NLC-111" in said, "2 of 3 members" in said) == (1, True, True), said

    swarm.stop(*nodes)
    sealed = stored_manifest(first.paths)
    assert sealed is not None
    replicas = torch.stack([last_tensor(node.paths.checkpoints, sealed, "phi") for node in nodes])
    assert replicas.std(0).max() > 0, "they differ"
    sizes = [written[name].numel() for name in sorted(written)]
    for name, given in zip(sorted(written), replicas.split(sizes, dim=1), strict=True):  # as newcomers get them
        fetched = given.bfloat16().float() if written[name].dim() > 1 else given
        torch.testing.assert_close(written[name].reshape(-1), fetched.mean(0))
