"""This release beside the one before, which is commit a8dff09: they pair with each other in one run, and this one opens
a data directory that the other made."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nolocod.identity import load
from nolocod.p2p.exchange import receipt_audit
from nolocod.run.manifest import stored_manifest
from tests.support.swarm import ENOUGH, RUN_FILE, ready, stopped_often, trainer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.swarm import Daemon, Swarm

RELEASE_BEFORE = "a8dff09"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds its package."""
    done = subprocess.run(
        ["git", "archive", RELEASE_BEFORE, "nolocod"], cwd=ROOT, capture_output=True, timeout=ENOUGH, check=False
    )
    if done.returncode != 0:
        why = f"the history has no commit {RELEASE_BEFORE}: {done.stderr.decode(errors='replace').strip()}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    folder = tmp_path_factory.mktemp("release-before")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        packed.extractall(folder, filter="data")
    where = [sys.executable, "-c", "import nolocod; print(nolocod.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.run(where, cwd=folder, env=environment, capture_output=True, text=True, timeout=ENOUGH, check=True)
    assert Path(found.stdout.strip()).is_relative_to(folder), "not this tree's"
    return folder


def found(swarm: Swarm, source: Path | None) -> Daemon:
    """Found a run with `nolocod create`, and bring up its first node."""
    first = swarm.daemon()
    first.source = source
    run_file = swarm.root / "run.toml"
    lines = RUN_FILE.splitlines(keepends=True)
    unasked = ("optimizer", "schedule", "documents", "turns")  # it trains with these
    known = [line for line in lines if not line.startswith(unasked)]
    run_file.write_text("".join(known if source else ['weights = "float32"\n', *lines]))
    create = [sys.executable, "-m", "nolocod", "create", str(run_file), "--data-dir", str(first.paths.root)]
    folder = source or ROOT
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(create, cwd=folder, env=environment, capture_output=True, timeout=ENOUGH, check=True)
    first.run("start")
    swarm.wait("the first node tells its address", lambda: ready(first))
    return first


def join(swarm: Swarm, first: Daemon, source: Path | None) -> Daemon:
    daemon = swarm.daemon()
    daemon.source = source
    return daemon.run("join", "--bootstrap", first.address)


@contextmanager
def rests(swarm: Swarm, old: Daemon) -> Iterator[None]:
    """That release knows no --duty: have its trainer compute in a fifth of the time, once it has begun."""
    swarm.wait("the old one trains", lambda: bool((said := old.report) and said.inner_steps))
    with stopped_often(trainer_of(old), 0.8):
        yield


def receipts(daemon: Daemon) -> dict[str, dict[str, object]]:
    """What its receipts say, by session; all of them verify."""
    sealed = stored_manifest(daemon.paths)
    assert sealed is not None
    verdict = receipt_audit.verify(receipt_audit.stored(daemon.paths.receipts), sealed.run_id)
    assert verdict.faults == []
    return {receipt.session.hex(): receipt_audit.as_fields(receipt) for receipt in verdict.receipts}


def assert_agreed(one: Daemon, other: Daemon) -> None:
    """Both have stopped, and hold the same receipts of what they did together."""
    ours, theirs = receipts(one), receipts(other)
    both = set(ours) & set(theirs)
    assert len(both) >= 2
    assert {session: ours[session] for session in both} == {session: theirs[session] for session in both}


def test_an_old_founder_and_a_new_joiner_pair_and_this_release_goes_on_in_the_old_ones_directory(
    swarm: Swarm, release_before: Path
) -> None:
    old = found(swarm, release_before)
    with rests(swarm, old):
        new = join(swarm, old, None)
        swarm.wait_paired([old, new], 2)
    before = old.report
    assert before is not None
    swarm.stop(old, new)
    assert_agreed(old, new)

    peer, held = load(old.paths.identity).peer_id, len(receipts(old))
    saved = max(int(path.name.removeprefix("round-")) for path in old.paths.checkpoints.glob("round-*"))
    read_again = (old.paths.manifest, old.paths.peers, old.paths.usage, old.paths.reputation)
    assert all(path.exists() for path in read_again)
    old.source = None
    old.log.unlink()
    old.run("start", "--monthly-budget", "1TB")
    swarm.wait_round(old, saved + 1)
    after = old.report
    assert after is not None
    assert (after.peer_id, after.run_id) == (peer, before.run_id)
    assert f"starting from the checkpoint's weights, round {saved}" in old.log.read_text()
    told = [line for line in old.log.read_text().splitlines() if line.split()[1] in ("warning", "error")]
    assert all("NLC-110" in line for line in told), "only that the peer it remembers is gone"
    assert told, "it remembers its peer"
    swarm.stop(old)
    assert len(receipts(old)) == held


def amend(daemon: Daemon, *arguments: str) -> None:
    """`nolocod amend`, by the owner of the run."""
    command = [sys.executable, "-m", "nolocod", "amend", "--data-dir", str(daemon.paths.root), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ENOUGH, check=False)
    assert done.returncode == 0, done.stderr


def test_an_amendment_reaches_all_and_one_that_was_away_beside_the_release_before(swarm: Swarm, release_before: Path) -> None:
    """Three nodes of this release, of which one is not there when the run is amended, and one of the release before throughout:
    it knows no amendments, and pairs with the others all the same."""
    new = found(swarm, None)
    old = join(swarm, new, release_before)
    with rests(swarm, old):
        swarm.wait_paired([new, old], 2)
        amended(swarm, new, old)
    swarm.stop(new, old)
    assert_agreed(new, old)


def amended(swarm: Swarm, new: Daemon, old: Daemon) -> None:
    """Two join, and all of this release follow two amendments, the second to the run's end."""
    nodes = swarm.joined_by(new, 2)
    swarm.wait_paired(nodes, 1)
    away = nodes[-1]
    swarm.stop(away)

    report = new.report
    assert report is not None
    begins = report.round + 8
    amend(new, "--at", str(begins), "--learning-rate", "0.00012", "--note", "we go on slowly")
    seen: list[tuple[int, float]] = []

    def followed() -> bool:
        reports = [said for node in nodes if node.process is not None and (said := node.report) is not None]
        seen.extend((one.round, one.learning_rate) for one in reports if one.state == "training" and one.learning_rate)
        return len(reports) == len(nodes) and all(one.round >= begins and one.learning_rate == 0.00012 for one in reports)

    swarm.wait("two know of it", lambda: all((said := node.report) and said.amended for node in nodes[:-1]))
    away.run("start")
    swarm.wait(f"all train at the new rate from round {begins} on", followed)
    swarm.wait_paired([*nodes, old], 2)
    assert {rate for number, rate in seen if number < begins - 1} <= {0.001}, "and nobody before"
    assert all((said := node.report) and said.amended == (f"from round {begins} on: learning rate 0.00012: we go on slowly",)
               for node in nodes)  # fmt: skip

    report = new.report
    assert report is not None
    ends = report.round + 8
    amend(new, "--at", str(ends), "--end")
    swarm.wait(f"all end at round {ends}", lambda: all((said := node.report) and said.state == "finished" for node in nodes))
    assert all((said := node.report) and said.round >= ends for node in nodes)
    last = old.report
    assert last is not None
    assert last.state == "training", "it goes on alone"
