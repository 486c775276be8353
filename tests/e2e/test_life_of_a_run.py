"""One run's life on two real daemons: the commands, the doctor, Prometheus and a browser beside them; then what kills them.

The tests share the daemons and go from what only looks to what kills. Prometheus and Chromium are Debian's packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import trio

from nolocod.errors import LostStepsError, RemoteError
from nolocod.identity import Identity, short
from nolocod.node import data_directory
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.host import open_host
from nolocod.p2p.transport.multiaddrs import split
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.paths import DataDir
from nolocod.units import Address
from tests.support.swarm import ENOUGH, Daemon, Swarm, gone, ready, trainer_of
from tools.prometheus import prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
LIVE = "document.getElementById('link').textContent === 'live'"


class Pair(Swarm):
    """Two daemons of one run; a third that nobody starts has only a directory."""

    first: Daemon
    second: Daemon
    first_loss: float
    """Held out, of the seed's weights."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("life"))
    try:
        pair.first = pair.found()
        pair.wait("the first node tells its address", lambda: ready(pair.first))
        bootstraps = ("--bootstrap", NOBODY, "--bootstrap", pair.first.address)
        pair.second = pair.daemon().run("join", *bootstraps, "--http", "0.0.0.0:0")
        pair.wait_paired([pair.first, pair.second], 2)
        pair.wait("a first held-out loss", lambda: bool((r := pair.first.report) and r.validation_loss_first))
        assert pair.first.report is not None
        pair.first_loss = pair.first.report.validation_loss_first or 0.0
        yield pair
    finally:
        pair.end()


def nolocod(*arguments: str, home: Path, status: int = 0) -> tuple[str, str]:
    """Run a command to its end, check its exit status, return what it printed."""
    line = [sys.executable, "-m", "nolocod", *arguments, "--data-dir", str(home)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.returncode == status, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout, done.stderr


# --- commands ------------------------------------------------------------------------------------------------


def test_commands_beside_a_running_daemon(pair: Pair) -> None:
    home = pair.first.paths.root
    shown, _ = nolocod("status", home=home)
    assert "training" in shown
    assert pair.second.report is not None
    assert pair.second.report.peer_id[-8:] in shown
    report = json.loads(nolocod("status", "--json", home=home)[0])
    assert report["outer_paired"] >= 2
    assert report["exchanges_by_outcome"]["committed"] >= 2
    assert report["peers"][0]["reach"] in ("direct", "inbound")
    assert nolocod("id", home=home)[0].strip() == report["peer_id"]
    assert trainer_of(pair.first).nice() == 10, "as --nice says"


def test_what_keeps_a_second_daemon_from_starting_is_named(pair: Pair, tmp_path: Path) -> None:
    _, said = nolocod("start", home=pair.first.paths.root, status=1)
    assert "NLC-107" in said  # the directory is in use
    _, said = nolocod("join", "--bootstrap", NOBODY, home=tmp_path / "free", status=1)
    assert "NLC-110" in said
    assert NOBODY.rpartition("/p2p")[0] in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("--listen", "--http"):
            line = ("join", "--bootstrap", pair.first.address, flag, f"127.0.0.1:{port}")
            _, said = nolocod(*line, home=tmp_path / "free", status=1)
            assert "NLC-109" in said
            assert str(port) in said


# --- doctor --------------------------------------------------------------------------------------------------


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and findings by code."""
    line = [sys.executable, "-m", "nolocod", "doctor", "--json", "--no-upnp", "--device", "cpu", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode == 0) == report["ok"]
    return done.returncode, {one["code"]: one for one in report["checks"]}


def quiet_files(root: Path) -> dict[str, int]:
    """The directory's files that a node does not write all the time, and when they changed; NAME.PID.partial: about to."""
    busy = {"checkpoints", "serving", "incoming", "receipts", "receipts.doubts", "usage.json", "peers.json", "reputation.json"}
    stable = {name for name in os.listdir(root) if re.sub(r"\.\d+\.partial$", "", name) not in busy}
    return {name: os.stat(root / name).st_mtime_ns for name in sorted(stable)}


def test_the_doctor_beside_a_running_node(pair: Pair) -> None:
    root = pair.first.paths.root
    before = quiet_files(root)
    status, found = doctor("--data-dir", str(root), "--data", str(pair.data), "--bootstrap", pair.first.address)
    failures = {code for code, one in found.items() if one["status"] == "fail"}
    assert failures <= {"D02"}, found  # a torch that takes more than half a minute to import, on a machine full of tests
    assert status == bool(failures)
    assert "runs here: training" in found["D08"]["found"]
    assert found["D21"]["status"] == "skipped", "the node's own address"
    assert found["D04"]["status"] in ("skipped", "warn"), "the node has the model in memory"
    assert "its own" in found["D20"]["found"]
    assert quiet_files(root) == before, "nothing was written"
    assert pair.first.report is not None, "and the node goes on"


async def serves(daemon: Daemon) -> bool:
    """Whether it answers in the DHT: to ask a doctor instead takes a process with torch in it."""
    peer, address = split(daemon.address)
    assert daemon.report is not None
    async with open_host(Identity.generate(), (Address("127.0.0.97", 0),), (), lambda _: None) as host:
        try:
            await (await host.open_stream(peer, GOSSIP, (address,))).reset()
            await look_up(host, peer, daemon.report.run_id)
        except RemoteError:
            return False
    return True


def test_the_doctor_before_a_node_and_without_a_peer(pair: Pair) -> None:
    newcomer = pair.root / "newcomer"
    pair.wait("the first node serves the DHT, some time after it knows that it is public", lambda: trio.run(serves, pair.first))
    found = doctor("--data-dir", str(newcomer), "--data", str(pair.data), "--bootstrap", pair.first.address)[1]
    assert pair.first.report is not None
    assert pair.first.report.run_id[:12] in found["D23"]["found"]
    assert [found[code]["status"] for code in ("D21", "D22", "D23", "D24", "D25")] == ["ok"] * 5, found
    assert not newcomer.exists()
    status, found = doctor("--data-dir", str(newcomer), "--bootstrap", NOBODY)
    assert (status, found["D21"]["status"]) == (1, "fail")


# --- Prometheus ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
def test_every_panel_and_rule_has_data_in_a_healthy_swarm(pair: Pair, tmp_path: Path) -> None:
    """Every query of every panel, variable, annotation and rule, asked of a real Prometheus with our rules."""
    http = data_directory.find_running(pair.first.paths).http
    with prometheus(tmp_path, 1) as (url, watch):
        watch([http])
        command = [sys.executable, "-m", "tools.panels", "--prometheus", url, "--wait", str(ENOUGH)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * ENOUGH, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{pair.first.tail()}"
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=ENOUGH) as answer:
        page = answer.read()
    said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=ENOUGH, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b""), "promtool has something to say of a live page"


# --- the page ------------------------------------------------------------------------------------------------


def row(daemon: Daemon, text: str) -> str:
    """A script: whether the table of peers says `text` of `daemon`."""
    name = short(data_directory.find_running(daemon.paths).peer_id)
    rows = "[...document.querySelectorAll('#peers tbody tr')]"
    return f"{rows}.some(row => row.innerText.includes('{name}') && row.innerText.includes('{text}'))"


def figure(name: str) -> str:
    """A script: the number at the head of a figure."""
    figures = "[...document.querySelectorAll('#figures div')]"
    return f"parseFloat({figures}.find(one => one.firstChild.innerText === '{name}').lastChild.innerText)"


def test_the_page_follows_real_nodes_through_faults(pair: Pair, chromium: Browser) -> None:
    """It shows a partner's death and return, and the trainer's, without being loaded again."""
    first, second = pair.first, pair.second
    http = data_directory.find_running(first.paths).http
    page = chromium.page(1280, 800)
    page.open(f"http://{http}/")
    page.wait(LIVE, ENOUGH)
    page.run("document.body.dataset.same = 'page'")
    page.wait(row(second, "training"), ENOUGH)
    page.wait(f"{figure('Paired / solo')} > 1 && document.querySelectorAll('.arc.done').length === 1", ENOUGH)

    # whoever holds the token sees the page of an open address, and the token stays in no history
    port = data_directory.find_running(second.paths).http.rpartition(":")[2]
    other = chromium.page(390, 844)
    other.open(f"http://127.0.0.1:{port}/")
    assert "needs a token" in other.text("body")
    other.open(f"http://127.0.0.1:{port}/?token={(second.paths.root / 'http.token').read_text().strip()}")
    other.wait(f"{LIVE} && {row(first, 'training')}", ENOUGH)
    assert other.run("location.href") == f"http://127.0.0.1:{port}/"

    connected = f"{row(second, 'by us')} || {row(second, 'by the peer')}"
    page.wait(connected, ENOUGH)
    here = row(second, "training")
    second.signal(signal.SIGKILL)
    page.wait(f"!({connected})", ENOUGH)
    other.wait("document.getElementById('link').textContent.startsWith('no answer')", ENOUGH)
    before = page.run(figure("Paired / solo"))
    second.run("join", "--bootstrap", first.address)
    page.wait(f"{here} && {figure('Paired / solo')} > {before}", ENOUGH)

    before, started = page.run(figure("Inner steps")), first.report
    assert page.run("document.getElementById('warnings').hidden")
    trainer_of(first).kill()
    page.wait("document.getElementById('warnings').innerText.includes('NLC-125')", ENOUGH)
    assert "What to do: " in page.text("#warnings")
    page.wait(f"document.querySelector('#state strong').innerText === 'training' && {figure('Inner steps')} > {before}", ENOUGH)
    assert started is not None
    assert first.report is not None
    assert first.report.uptime > started.uptime, "the node itself went on"

    assert page.complaints == []
    assert all(one.startswith(f"http://{http}/") for one in page.asked_for), page.asked_for
    assert page.run("document.body.dataset.same") == "page", "all that without loading the page again"
    for one in (page, other):  # or they are drawn for as long as the browser is there
        one.close()


# --- what kills ----------------------------------------------------------------------------------------------


def test_a_pause_by_the_owner_ends_the_trainer_and_nothing_is_lost(pair: Pair) -> None:
    first, home, trainer = pair.first, pair.first.paths.root, trainer_of(pair.first)
    assert json.loads(nolocod("set", "pause=yes", "duty=90%", "--json", home=home)[0])["pause"] == "yes"
    pair.wait("its trainer has ended", lambda: gone(trainer))
    before = first.report
    assert before is not None
    assert (before.allowance.paused, before.checkpoint_round) == ("owner", before.round)
    assert "its owner wants it so" in nolocod("status", home=home)[0]
    assert "no setting 'dutty'" in nolocod("set", "dutty=1", home=home, status=2)[1]
    assert "pause" not in json.loads(nolocod("set", "pause=", "duty=", "--json", home=home)[0])
    pair.wait_paired([first, pair.second], 2)
    after = first.report
    assert after is not None
    assert after.round > before.round
    assert after.uptime > before.uptime, "the node itself went on"
    lost = [sum(error.code == LostStepsError.entry.code for error in report.errors) for report in (before, after)]
    assert lost[0] == lost[1], "each step that a partner proves is there"


def test_a_killed_trainer_costs_a_restart_and_not_the_node(pair: Pair) -> None:
    first, before, trainer = pair.first, pair.first.report, trainer_of(pair.first)
    assert before is not None
    trainer.kill()

    def another() -> bool:
        try:
            return trainer_of(first).pid != trainer.pid
        except (StopIteration, psutil.Error):  # the old one is dead, the new one not there yet
            return False

    pair.wait("another trainer is started", another)
    pair.wait_paired([first, pair.second], 2)
    after = first.report
    assert after is not None
    assert after.uptime > before.uptime, "the node itself went on"
    assert "NLC-125" in {error.code for error in after.errors}, "beside the steps since the last checkpoint, if there were any"


def test_kill_9_at_any_moment_goes_on_from_the_last_checkpoint(pair: Pair) -> None:
    first, trainer = pair.first, trainer_of(pair.first)
    assert first.report is not None
    last = first.report.round
    for wait in (0.0, 0.5):
        pair.wait_round(first, last + 3)
        time.sleep(wait)
        assert first.report is not None
        last, told = first.report.round, first.report.checkpoint_round or 0
        assert first.signal(signal.SIGKILL) == -signal.SIGKILL
        pair.wait("the trainer ends with its daemon", lambda one=trainer: gone(one))
        saved = [int(path.name[6:]) for path in first.paths.checkpoints.glob("round-*") if path.name[6:].isdigit()]
        assert 1 <= len(saved) <= 3, "the last two, and the one that was being written"
        first.run("start")
        pair.wait("it trains again", lambda: bool((r := first.report) and r.inner_steps))
        trainer, resumed = trainer_of(first), first.report
        assert resumed is not None
        assert resumed.round >= max(saved) >= told, "rounds go on while one is written"


def test_after_a_damaged_checkpoint_the_one_before_is_used(pair: Pair) -> None:
    first = pair.first
    assert first.signal(signal.SIGTERM) == 0
    newest = max(first.paths.checkpoints.glob("round-*"), key=lambda path: path.name)
    damaged = newest / "tensors.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    first.run("start")
    pair.wait("the damaged checkpoint is named", lambda: newest.name in first.log.read_text())
    pair.wait("it trains from the one before", lambda: bool((r := first.report) and r.inner_steps))


def test_a_stopped_node_evaluates_writes_and_exports(pair: Pair, tmp_path: Path) -> None:
    home = pair.second.paths.root
    pair.wait("a checkpoint", lambda: any(DataDir(home).checkpoints.glob("round-*")))
    assert pair.second.signal(signal.SIGTERM) == 0
    loss = float(nolocod("eval", "--data", str(pair.data), home=home)[0])
    assert 0 < loss < pair.first_loss
    assert len(nolocod("generate", "line ", "--tokens", "20", home=home)[0]) >= len("line ") + 20
    nolocod("export", str(tmp_path / "model"), home=home)
    card = (tmp_path / "model" / "README.md").read_text()
    receipts = nolocod("receipts", "list", "--json", home=home)[0].splitlines()
    assert f"| exchanges | {len(receipts)}, each signed by this node and its partner; partners: 1 |" in card
    assert json.loads(receipts[0])["run_id"] in card
    told = nolocod("eval", "--model", str(tmp_path / "model"), "--text", f"readme={ROOT / 'README.md'}", home=home)[0]
    assert "bits_per_byte" in told
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("héllo", return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == list("héllo".encode())
    assert model(input_ids=tokens).logits.shape[-1] >= 256
