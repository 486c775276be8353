"""`nolocod amend`: what owners type, and what they are told."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from nolocod import cli
from nolocod.disk import write_private
from nolocod.identity import Identity
from nolocod.paths import DataDir
from nolocod.run.amendments import read
from nolocod.run.manifest import Manifest, seal
from nolocod.run.owners import Owners

if TYPE_CHECKING:
    from pathlib import Path

ANN, BOB, EVE = (Identity.from_secret(bytes([number]) * 32) for number in range(1, 4))


def directory(path: Path, manifest: Manifest, identity: Identity) -> DataDir:
    """A data directory of Ann's run, with the identity of somebody."""
    path.mkdir()
    paths = DataDir(path)
    write_private(paths.identity, identity.secret)
    paths.manifest.write_bytes(seal(manifest, ANN).to_bytes())
    return paths


def amend(capsys: pytest.CaptureFixture[str], paths: DataDir, *arguments: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    status = 0
    try:
        cli.main(["amend", "--data-dir", str(paths.root), *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out + err


def changes(capsys: pytest.CaptureFixture[str], paths: DataDir) -> list[tuple[int, str]]:
    """From which round, and what."""
    return [(row["from round"], row["change"]) for row in json.loads(amend(capsys, paths, "--json")[1])["changes"]]


@pytest.fixture
def ours(tmp_path: Path) -> DataDir:
    return directory(tmp_path / "ann", Manifest(name="verse", model={"model_type": "llama"}), ANN)


def test_an_owner_changes_a_run_and_takes_back_what_does_not_count_yet(
    ours: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "as it was founded" in amend(capsys, ours)[1]
    assert amend(capsys, ours, "--at", "50", "--rounds", "200", "--note", "we go on")[0] == 0
    assert amend(capsys, ours, "--at", "80", "--pause")[0] == 0
    assert amend(capsys, ours, "--resume")[0] == 0
    status, out = amend(capsys, ours, "--json")
    told = json.loads(out)
    assert (status, told["version"], told["signed_by"]) == (0, 3, [str(ANN.peer_id)])
    assert changes(capsys, ours) == [(50, "rounds 200: we go on"), (80, "paused yes"), (80, "paused no")]
    (ours.checkpoints / "round-00000060").mkdir(parents=True)
    assert amend(capsys, ours, "--drop")[0] == 0
    assert changes(capsys, ours) == [(50, "rounds 200: we go on")]


def test_a_run_goes_on_from_its_pause_and_not_from_a_later_change(ours: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    amend(capsys, ours, "--at", "80", "--pause")
    amend(capsys, ours, "--at", "500", "--learning-rate", "0.001")
    assert amend(capsys, ours, "--resume")[0] == 0
    assert changes(capsys, ours) == [(80, "paused yes"), (80, "paused no"), (500, "learning rate 0.001")]


def test_a_change_may_count_before_one_that_waits(ours: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    amend(capsys, ours, "--at", "500", "--learning-rate", "0.001")
    assert amend(capsys, ours, "--at", "80", "--rounds", "900")[0] == 0
    assert changes(capsys, ours) == [(80, "rounds 900"), (500, "learning rate 0.001")]


def test_several_owners_sign_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest(name="verse", model={"model_type": "llama"}, owners=Owners(others=(str(BOB.peer_id),), needed=2))
    ann, bob = directory(tmp_path / "ann", manifest, ANN), directory(tmp_path / "bob", manifest, BOB)
    file = tmp_path / "amendment"
    status, out = amend(capsys, ann, "--at", "50", "--rounds", "200", "--out", str(file))
    assert (status, ann.amendments.exists()) == (0, False)
    assert f"missing: 1. Another owner signs with: nolocod amend --sign {file}" in out
    status, out = amend(capsys, bob, "--sign", str(file))
    assert (status, "tells the others" in out) == (0, True)
    assert read(bob.amendments.read_bytes(), seal(manifest, ANN)).changes[0].rounds == 200
    shutil.copy(bob.amendments, ann.amendments)
    assert "from round 50 on: rounds 200" in amend(capsys, ann)[1]
    status, out = amend(capsys, bob, "--sign", str(file))
    assert (status, "version 1 is known" in out) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rounds", "9"], "NLC-100", "no node runs here that could tell the round"),
        (["--at", "-1", "--rounds", "9"], "NLC-162", ">= 0"),
        (["--at", "5", "--schedule", "linear"], "NLC-162", "linear"),
        (["--at", "5", "--learning-rate", "0"], "NLC-162", "> 0"),
        (["--at", "5", "--dataset", "a/b"], "NLC-162", "data of a run can be changed"),
        (["--at", "5", "--bootstrap", "nonsense"], "NLC-100", "nonsense"),
        (["--at", "5", "--release", "next"], "NLC-162", "release"),
        (["--at", "5", "--note", "x" * 200, "--end"], "NLC-162", "note"),
        (["--pause", "--resume"], "NLC-100", "cannot wait and go on"),
        (["--drop"], "NLC-162", "nothing is there"),
        (["--sign", "nowhere"], "NLC-162", "cannot be read"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(
    ours: DataDir, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str, says: str
) -> None:
    status, out = amend(capsys, ours, *arguments)
    assert (status, out.startswith(f"error {code}")) == (2, True), out
    assert says in out
    assert not ours.amendments.exists()


def test_nobody_else_amends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = directory(tmp_path / "eve", Manifest(name="verse", model={"model_type": "llama"}), EVE)
    status, out = amend(capsys, theirs, "--at", "5", "--rounds", "9")
    assert (status, "is no owner of run verse" in out) == (2, True)
    status, out = amend(capsys, DataDir(tmp_path), "--at", "5", "--rounds", "9")
    assert (status, "belongs to no run" in out) == (1, True)
