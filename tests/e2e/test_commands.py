"""The commands beside a running daemon, and what becomes of it when parts of it are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from nolocod.identity import Identity
from nolocod.run.paths import DataDir
from tests.support.swarm import ENOUGH, gone, ready, trainer_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.swarm import Swarm


def nolocod(*arguments: str, home: Path, status: int = 0) -> tuple[str, str]:
    """Run a command to its end, check its exit status, return what it printed."""
    line = [sys.executable, "-m", "nolocod", *arguments, "--data-dir", str(home)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.returncode == status, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout, done.stderr


def test_commands_beside_a_running_daemon(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    second = swarm.daemon().run("join", "--bootstrap", nobody, "--bootstrap", first.address)
    swarm.wait_paired([first, second], 2)
    home = first.paths.root

    shown, _ = nolocod("status", home=home)
    assert "training" in shown
    assert second.report is not None
    assert second.report.peer_id[-8:] in shown
    told = json.loads(nolocod("status", "--json", home=home)[0])
    assert told["outer_paired"] >= 2
    assert told["exchanges_by_outcome"]["committed"] >= 2
    assert told["peers"][0]["reach"] in ("direct", "inbound")
    assert nolocod("id", home=home)[0].strip() == told["peer_id"]

    _, said = nolocod("start", home=home, status=1)
    assert "NLC-107" in said  # the directory is in use
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = tmp_path / "free"
        _, said = nolocod("join", "--bootstrap", nobody, home=free, status=1)
        assert "NLC-110" in said
        assert nobody.rpartition("/p2p")[0] in said
        for flag in ("--listen", "--http"):
            _, said = nolocod("join", "--bootstrap", first.address, flag, f"127.0.0.1:{port}", home=free, status=1)
            assert "NLC-109" in said
            assert str(port) in said

    swarm.wait("a checkpoint", lambda: any(DataDir(home).checkpoints.glob("round-*")))
    assert first.signal(signal.SIGTERM) == 0
    loss = float(nolocod("eval", "--data", str(swarm.data), home=home)[0])
    assert told["validation_loss_first"] is not None
    assert 0 < loss < told["validation_loss_first"]
    assert len(nolocod("generate", "line ", "--tokens", "20", home=home)[0]) >= len("line ") + 20
    nolocod("export", str(tmp_path / "model"), home=home)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("héllo", return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == list("héllo".encode())
    assert model(input_ids=tokens).logits.shape[-1] >= 256


def test_a_killed_trainer_costs_a_restart_and_not_the_node(swarm: Swarm) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    second = swarm.daemon().run("join", "--bootstrap", first.address)
    swarm.wait_paired([first, second], 1)
    before = first.report
    assert before is not None
    trainer_of(first).kill()
    swarm.wait("the trainer's death is told", lambda: bool((r := first.report) and r.errors))
    swarm.wait_paired([first, second], 2)
    trainer = trainer_of(first)
    after = first.report
    assert after is not None
    assert after.uptime > before.uptime, "the node itself went on"
    assert "NLC-125" in {error.code for error in after.errors}, "beside the steps since the last checkpoint, if there were any"
    assert first.process is not None
    first.process.kill()
    first.process.wait(ENOUGH)
    swarm.wait("the trainer ends with its daemon", lambda: gone(trainer))


def test_kill_9_at_any_moment_goes_on_from_the_last_checkpoint(swarm: Swarm) -> None:
    first = swarm.found()
    last = 0
    for wait in (0.0, 0.3, 0.7):
        swarm.wait_round(first, last + 3)
        time.sleep(wait)
        assert first.report is not None
        last = first.report.round
        assert first.signal(signal.SIGKILL) == -signal.SIGKILL
        saved = [int(path.name[6:]) for path in first.paths.checkpoints.glob("round-*") if path.name[6:].isdigit()]
        assert 1 <= len(saved) <= 3, "the last two, and the one that was being written"
        first.run("start")
        swarm.wait("it trains again", lambda: bool((r := first.report) and r.inner_steps))
        resumed = first.report
        assert resumed is not None
        assert resumed.round >= max(saved) >= last - 1

    newest = max(first.paths.checkpoints.glob("round-*"), key=lambda path: path.name)
    assert first.signal(signal.SIGTERM) == 0
    newest = max(first.paths.checkpoints.glob("round-*"), key=lambda path: path.name)
    damaged = newest / "tensors.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    first.run("start")
    swarm.wait("the damaged checkpoint is named", lambda: newest.name in first.log.read_text())
    swarm.wait("it trains from the one before", lambda: bool((r := first.report) and r.inner_steps))


def test_a_testnet_reports_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    line = [sys.executable, "-m", "nolocod", "testnet", "--nodes", "2", "--outer-steps", "24"]
    done = subprocess.run(
        [*line, "--report", str(report), "--keep", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=2 * ENOUGH,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "no terminal codes where there is no terminal"
    told = json.loads(report.read_text())
    assert all(node["outer_paired"] >= 1 and node["val_loss_last"] < node["val_loss_first"] for node in told["nodes"])
    assert told["averaged_val_loss"] > 0
    assert told["alone_val_loss"] > 0
    assert told["weight_std"] > 0
    assert sum(node["bytes_sent"] for node in told["nodes"]) == sum(node["bytes_received"] for node in told["nodes"]) > 0

    line[line.index("24")] = "100000"
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
