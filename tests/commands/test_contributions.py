"""What a node gave, as a table, a badge, and a file that anybody verifies."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from nolocod.errors import ContributionsError
from nolocod.identity import Identity, load
from nolocod.node.data_directory import called
from nolocod.observe.events import Contribution
from nolocod.observe.status.badge import svg
from nolocod.p2p.exchange import contribution_file
from nolocod.p2p.exchange.contribution_file import thinned
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest
from tests.commands.test_cli import RUN, founded, run
from tests.support.receipts import exchanged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHERS = [Identity.from_secret((number + 1).to_bytes(32, "big")) for number in range(3)]


@pytest.fixture
def home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> DataDir:
    """The data directory of a node that exchanged each five minutes for an hour, and whose daemon ended."""
    founded(capsys, tmp_path / "home", RUN)
    paths = DataDir(tmp_path / "home")
    sealed = stored_manifest(paths)
    assert sealed is not None
    store, own = ReceiptStore(paths.receipts), load(paths.identity)
    for number in range(13):
        store.add(exchanged(own, OTHERS[number % 3], number * 300.0, run_id=sealed.run_id))
    called(paths, "Ann")
    return paths


def command(capsys: pytest.CaptureFixture[str], paths: DataDir, *arguments: str) -> str:
    status, out, err = run(capsys, "contributions", "--data-dir", str(paths.root), *arguments)
    assert status == 0, err
    return out


def test_a_table_and_json_say_what_was_given(home: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = command(capsys, home).splitlines()
    assert first == "this node, to one: 360 k tokens in 60 min, 13 exchanges known, 3 partners"
    assert len(others) == 4
    told = json.loads(command(capsys, home, "--json"))
    assert (told["own"]["tokens"], told["own"]["seconds"]) == (360_000, 3600.0)
    assert told["contributors"][0]["peer_id"] == load(home.identity).peer_id


def test_a_file_verifies_anywhere(home: DataDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    assert "verified" in command(capsys, home, "--export", str(out))
    status, told, _ = run(capsys, "contributions", "--data-dir", str(tmp_path / "nobody"), "--verify", str(out))
    assert status == 0
    assert f"{load(home.identity).peer_id}, called Ann" in told
    assert "360 k tokens in 60 min, 5 exchanges known" in told, "a receipt of each quarter of an hour, and all tokens"
    status, told, _ = run(capsys, "contributions", "--verify", str(out), "--json")
    assert json.loads(told)["tokens"] == 360_000
    status, _, err = run(capsys, "contributions", "--data-dir", str(home.root), "--export", str(out))
    assert (status, "exists already" in err) == (1, True)


def without_a_receipt(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], *lines[3:]]


def more(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[-1]]


def another_order(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


def altered(lines: list[bytes]) -> list[bytes]:
    raw = bytearray(base64.b64decode(lines[2]))
    raw[40] ^= 1
    return [*lines[:2], base64.b64encode(raw) + b"\n", *lines[3:]]


def another_name(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b"Ann", b"Eve"), *lines[1:]]


def nothing(_: list[bytes]) -> list[bytes]:
    return []


def endless(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b"A" * 100_000, *lines[1:]]


@pytest.mark.parametrize("change", [without_a_receipt, more, another_order, altered, another_name, nothing, endless])
def test_a_file_that_was_changed_does_not_verify(
    home: DataDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[list[bytes]], list[bytes]]
) -> None:
    out = tmp_path / "mine"
    command(capsys, home, "--export", str(out))
    out.write_bytes(b"".join(change(out.read_bytes().splitlines(keepends=True))))
    status, told, err = run(capsys, "contributions", "--verify", str(out))
    assert (status, told) == (1, "")
    assert "error NLC-161: contributions do not verify" in err


def test_nobody_shows_others_receipts_another_run_or_a_name_of_markup(tmp_path: Path) -> None:
    one, other, third = OTHERS
    between = [exchanged(one, other, number * 900.0) for number in range(3)]
    run_id = between[0].parsed.run_id
    for number, (who, of, name) in enumerate([(third, run_id, ""), (one, "ab" * 32, ""), (one, run_id, "<b>")]):
        contribution_file.write(tmp_path / f"{number}", who, (of, "run"), name, between)
        with pytest.raises(ContributionsError):
            contribution_file.read(tmp_path / f"{number}")
    contribution_file.write(tmp_path / "mixed", one, (run_id, "run"), "", [*between, exchanged(other, third, 900.0)])
    with pytest.raises(ContributionsError, match="other nodes"):
        contribution_file.read(tmp_path / "mixed")
    contribution_file.write(tmp_path / "good", one, (run_id, "run"), "", between)
    assert contribution_file.read(tmp_path / "good")[1].tokens == 180_000


@pytest.mark.parametrize("side", ["offerer_signature", "answerer_signature"])
def test_a_file_shows_receipts_that_both_signed(tmp_path: Path, side: str) -> None:
    """Whoever writes the file signs its first line himself."""
    one, other, _ = OTHERS
    forged = [replace(exchanged(one, other, number * 900.0), **{side: bytes(64)}) for number in range(3)]
    contribution_file.write(tmp_path / "file", one, (forged[0].parsed.run_id, "run"), "", forged)
    with pytest.raises(ContributionsError, match="not signed by it"):
        contribution_file.read(tmp_path / "file")


def test_a_file_of_numbers_beyond_all_measure_does_not_verify(tmp_path: Path) -> None:
    """Two that sign anything for each other do so with any number."""
    one, other, _ = OTHERS
    between = [exchanged(one, other, 900.0), exchanged(one, other, 1800.0, rate=1e16)]
    contribution_file.write(tmp_path / "file", one, (between[0].parsed.run_id, "run"), "", between)
    with pytest.raises(ContributionsError, match="too large"):
        contribution_file.read(tmp_path / "file")


def test_a_file_has_at_most_so_many_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, _ = OTHERS
    between = [exchanged(one, other, number * 900.0) for number in range(5)]
    run_id = between[0].parsed.run_id
    contribution_file.write(tmp_path / "long", one, (run_id, "run"), "", between)
    monkeypatch.setattr(contribution_file, "MOST", 4)
    assert thinned(between, run_id, one.peer_id) == between[1:]
    with pytest.raises(ContributionsError, match="no node says"):
        contribution_file.read(tmp_path / "long")


def test_a_badge_is_an_image_of_text_and_nothing_else(
    home: DataDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, home, "--badge", str(tmp_path / "badge.svg"))
    assert "one: 360 k tokens in 60 min" in (tmp_path / "badge.svg").read_text()
    given = Contribution(OTHERS[0].peer_id, "<script>", 5, 1.0, 1, 1)
    drawn = svg('<script>"&\x1b', given).decode()
    assert {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn).iter()} == {
        *("svg", "title", "rect", "path", "g", "text"),
    }
    assert not re.search(r"\x1b|<script", drawn)
    assert "no exchange yet" in svg("run", None).decode()


def test_a_name_is_kept_for_later_starts(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    assert called(paths) == ""
    assert called(paths, "Ann") == "Ann"
    assert called(paths) == "Ann"
    paths.name.write_text("<b>")
    assert called(paths) == "", "somebody else wrote it"
