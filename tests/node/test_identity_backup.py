"""`nolocod id backup` and `restore`: whole or not at all, in place of nothing, and opened by the passphrase alone."""

from __future__ import annotations

import io
import json
import stat
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nolocod import cli
from nolocod.errors import BackupError, DataDirInUseError, DiskFullError, IdentityError, UsageError
from nolocod.identity import Identity
from nolocod.node import identity_backup

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2))


class Shell:
    """A person with a data directory; what is typed goes to standard input."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.home, self._capsys, self._patch = home, capsys, patch

    def __call__(self, *arguments: object, typed: str = "", home: Path | None = None) -> tuple[int, str, str]:
        self._patch.setattr("sys.stdin", io.StringIO(typed))
        status = 0
        try:
            cli.main(["id", *(str(one) for one in arguments), "--data-dir", str(home or self.home)])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *self._capsys.readouterr()


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path / "home", capsys, monkeypatch)


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that cost little."""
    monkeypatch.setitem(identity_backup._COST, "n", 1 << 4)


def test_a_node_moves_to_another_directory_by_its_backup(shell: Shell, tmp_path: Path) -> None:
    peer = shell()[1].strip()
    file = tmp_path / "copy.json"
    assert shell("backup", file, typed="secret words\n")[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (shell.home / "identity.key").read_bytes() not in file.read_bytes()
    new = tmp_path / "new"
    status, out, _ = shell("restore", file, typed="secret words\n", home=new)
    assert (status, out.strip()) == (0, peer)
    assert stat.S_IMODE((new / "identity.key").stat().st_mode) == 0o600
    assert shell(home=new)[1].strip() == peer


def test_the_directory_may_stand_before_the_word_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOLOCOD_HOME", str(tmp_path / "default"))
    cli.main(["id", "--data-dir", str(tmp_path / "named")])
    cli.main(["id", "--data-dir", str(tmp_path / "named"), "backup", str(tmp_path / "copy"), "--no-passphrase"])
    assert capsys.readouterr().out.splitlines()[0] in (tmp_path / "copy").read_text()


def test_without_a_passphrase_only_by_the_users_word(shell: Shell, tmp_path: Path) -> None:
    peer = shell()[1].strip()
    file = tmp_path / "copy.json"
    status, _, err = shell("backup", file, typed="\n")
    assert status == UsageError.entry.exit_status
    assert "--no-passphrase" in err
    assert not file.exists()
    status, _, err = shell("backup", file, "--no-passphrase")
    assert status == 0
    assert "not encrypted" in err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert shell("restore", file, home=tmp_path / "new")[1].strip() == peer


def test_a_wrong_passphrase_is_told_and_changes_nothing(shell: Shell, tmp_path: Path) -> None:
    identity_backup.write(tmp_path / "copy", ALICE, "right")
    status, _, err = shell("restore", tmp_path / "copy", typed="wrong\n")
    assert status == 1
    assert BackupError.entry.code in err
    assert "passphrase is wrong" in err
    assert not (shell.home / "identity.key").exists()


def test_nothing_is_overwritten(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "copy"
    identity_backup.write(file, ALICE, None)
    before = file.read_bytes()
    shell()
    own = (shell.home / "identity.key").read_bytes()
    status, _, err = shell("backup", file, typed="x\n")
    assert (status, "exists already" in err, file.read_bytes()) == (1, True, before)
    status, _, err = shell("restore", file)
    assert (status, "this node has an identity" in err, (shell.home / "identity.key").read_bytes()) == (1, True, own)


def test_there_must_be_something_to_keep(shell: Shell, tmp_path: Path) -> None:
    status, _, err = shell("backup", tmp_path / "copy", typed="x\n")
    assert (status, IdentityError.entry.code in err) == (1, True)
    assert not shell.home.exists(), "a backup makes no identity"
    assert shell("restore", tmp_path / "missing")[0] == 1


def test_a_running_node_is_not_given_another_identity(shell: Shell, tmp_path: Path) -> None:
    from nolocod.node import data_directory
    from nolocod.paths import DataDir

    identity_backup.write(tmp_path / "copy", ALICE, None)
    with data_directory.hold(DataDir(shell.home)):
        status, _, err = shell("restore", tmp_path / "copy")
    assert (status, DataDirInUseError.entry.code in err) == (1, True)


def test_a_full_disk_leaves_no_part_of_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        identity_backup.write(tmp_path / "copy", ALICE, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_key_under_another_name_is_damage(tmp_path: Path) -> None:
    identity_backup.write(tmp_path / "copy", ALICE, None)
    fields = json.loads((tmp_path / "copy").read_text())
    (tmp_path / "copy").write_text(json.dumps({**fields, "peer_id": BOB.peer_id}))
    with pytest.raises(BackupError, match="damaged"):
        identity_backup.read(tmp_path / "copy").open(None)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.booleans())
def test_damage_anywhere_is_told_or_harmless(tmp_path: Path, position: int, flip: int, cut: bool) -> None:
    path = tmp_path / "copy"
    path.unlink(missing_ok=True)
    identity_backup.write(path, ALICE, "right")
    raw = bytearray(path.read_bytes())
    place = position % len(raw)
    raw[place] ^= flip
    path.write_bytes(raw[:place] if cut else raw)
    try:
        found = identity_backup.read(path).open("right")
    except BackupError:
        return
    assert found == ALICE


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.recursive(st.text() | st.integers(), st.lists).map(lambda one: json.dumps(one).encode()))
def test_any_file_is_a_backup_or_our_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "any").write_bytes(raw)
    with pytest.raises(BackupError):
        identity_backup.read(tmp_path / "any")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BackupError):
        identity_backup.read(tmp_path / "huge")
