"""Receipts on disk: whole or not there, whatever cut the writing short."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import DataDirError, DiskFullError
from nolocod.identity import Identity
from nolocod.p2p.exchange import receipts
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import Receipt, content_of, sign

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2))


def receipt(number: int, round_number: int = 0) -> Receipt:
    """`round_number`: Alice's; Bob's is 9."""
    rounds = {ALICE: round_number, BOB: 9}
    sides = (pb.Side(peer_id=one.peer_id, root=bytes(32), standing=pb.Standing(round=number)) for one, number in rounds.items())
    content = content_of("run", number.to_bytes(16, "big"), *sides)
    return Receipt(content, sign(ALICE, content), sign(BOB, content))


def test_what_was_added_is_found_by_another_process(tmp_path: Path) -> None:
    store = ReceiptStore(tmp_path / "in" / "receipts")
    for number in range(3):
        store.add(receipt(number))
    again = ReceiptStore(tmp_path / "in" / "receipts")
    assert list(again.all()) == [receipt(number) for number in range(3)]
    assert again.find(receipt(1).session) == receipt(1)
    assert again.find(bytes(16)[::-1] + b"x") is None
    assert again.find(receipt(7).session) is None


def test_a_tail_torn_at_any_byte_is_dropped_and_the_next_receipt_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    ReceiptStore(path).add(receipt(0))
    first = path.stat().st_size
    ReceiptStore(path).add(receipt(1))
    whole = path.read_bytes()
    for size in range(first, len(whole), 37):
        path.write_bytes(whole[:size])
        store = ReceiptStore(path)
        store.add(receipt(2))
        assert list(store.all()) == [receipt(0), receipt(2)]


def test_those_that_were_added_are_told_once_and_so_many_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_FRESH", 3)
    store = ReceiptStore(tmp_path / "receipts")
    assert store.fresh() == []
    for number in range(5):
        store.add(receipt(number))
    assert store.fresh() == [receipt(2), receipt(3), receipt(4)]
    assert store.fresh() == []


def vote(number: int) -> Receipt:
    return replace(receipt(number), offerer_signature=b"")


def test_votes_are_kept_until_they_are_settled(tmp_path: Path) -> None:
    path = tmp_path / "in" / "receipts"
    store = ReceiptStore(path)
    for number in range(3):
        store.vote(vote(number))
    assert store.doubts() == ReceiptStore(path).doubts() == [vote(number) for number in range(3)]
    store.settle(vote(1).session)
    store.add(receipt(0))
    assert store.doubts() == ReceiptStore(path).doubts() == [vote(2)]
    store.settle(vote(2).session)
    store.settle(vote(7).session)
    assert store.doubts() == ReceiptStore(path).doubts() == []
    assert list(store.all()) == [receipt(0)]


def test_a_vote_whose_receipt_is_stored_is_no_doubt(tmp_path: Path) -> None:
    """A crash between the receipt and what settles the vote."""
    path = tmp_path / "receipts"
    ReceiptStore(path).vote(vote(0))
    left = (tmp_path / "receipts.doubts").read_bytes()
    ReceiptStore(path).add(receipt(0))
    (tmp_path / "receipts.doubts").write_bytes(left)
    assert ReceiptStore(path).doubts() == []


def test_a_torn_vote_was_never_told_and_spoils_no_other(tmp_path: Path) -> None:
    path, votes = tmp_path / "receipts", tmp_path / "receipts.doubts"
    ReceiptStore(path).vote(vote(0))
    first = votes.stat().st_size
    ReceiptStore(path).vote(vote(1))
    whole = votes.read_bytes()
    for size in range(first, len(whole), 37):
        votes.write_bytes(whole[:size])
        store = ReceiptStore(path)
        store.vote(vote(2))
        assert store.doubts() == ReceiptStore(path).doubts() == [vote(0), vote(2)]


def test_so_many_votes_are_kept_and_no_more(tmp_path: Path) -> None:
    store = ReceiptStore(tmp_path / "receipts")
    for number in range(40):
        store.vote(vote(number))
    assert store.doubts() == ReceiptStore(tmp_path / "receipts").doubts() == [vote(number) for number in range(24, 40)]


def test_new_names_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of which only the content was synced may be gone after a crash, with all receipts in it."""
    home, synced, fsync = tmp_path / "home", [], os.fsync

    def noted(file: int) -> None:
        fsync(file)
        names = sorted(path.name for path in home.iterdir()) if home.exists() else []
        synced.append((os.readlink(f"/proc/self/fd/{file}"), names))

    monkeypatch.setattr(os, "fsync", noted)
    store = ReceiptStore(home / "receipts", limit=100)
    store.vote(vote(0))
    named = ["receipts.doubts"]
    assert synced == [(f"{tmp_path}", []), (f"{home}/receipts.doubts", named), (f"{home}", named)]
    synced.clear()
    store.add(receipt(0))
    assert [name for name, _ in synced] == [f"{home}/receipts", f"{home}"]
    synced.clear()
    store.add(receipt(1))
    assert [name for name, _ in synced] == [f"{home}", f"{home}/receipts", f"{home}"], "it became receipts.old first"


def test_an_altered_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    store = ReceiptStore(path)
    store.add(receipt(0))
    store.add(receipt(1))
    lines = path.read_bytes().splitlines(keepends=True)
    forged = lines[0].replace(b'"offerer": "', b'"offerer": "AAAA')
    path.write_bytes(forged + b"not json\n" + b"[]\n" + lines[1])
    assert list(store.all()) == [receipt(1)]
    assert store.find(receipt(0).session) is None


def test_two_files_bound_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    store = ReceiptStore(path, limit=2000)
    for number in range(40):
        store.add(receipt(number))
    kept = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) <= 2
    assert kept < 2 * 2000 + 2000
    assert store.find(receipt(39).session) == receipt(39)
    assert store.find(receipt(0).session) is None


def test_what_is_kept_is_found_while_the_file_is_moved(tmp_path: Path) -> None:
    store = ReceiptStore(tmp_path / "receipts", limit=2000)
    for number in range(40):
        store.add(receipt(number))
        before = list(store.all())
        looking = store.all()
        found = [next(looking)]
        store.add(receipt(100 + number))
        found += looking
        assert [known for known in before if known not in found] == []


def test_a_receipt_is_not_denied_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ReceiptStore(tmp_path / "receipts", limit=100)

    def fails(_self: Path, _target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(type(tmp_path), "replace", fails)
    store.add(receipt(0))
    with pytest.raises(DataDirError):
        store.add(receipt(1))
    assert list(store.all()) == [receipt(0)]


def test_a_full_disk_is_named_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "receipts"
    store = ReceiptStore(path)
    store.add(receipt(0))

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError):
            store.add(receipt(1))
    store.add(receipt(2))
    assert list(store.all()) == [receipt(0), receipt(2)]


def test_a_directory_in_its_place_is_a_data_directory_error(tmp_path: Path) -> None:
    (tmp_path / "receipts").mkdir()
    with pytest.raises(DataDirError):
        ReceiptStore(tmp_path / "receipts")


def test_receipts_tell_which_steps_a_checkpoint_does_not_hold(tmp_path: Path) -> None:
    """Rounds 6 and 7 were lost once already, and taken again; who takes a donor's weights leaps ahead."""
    store = ReceiptStore(tmp_path / "receipts")
    assert store.since(ALICE.peer_id, 0) == []
    for number, round_number in enumerate((5, 6, 7, 6, 7, 8, 30)):
        store.add(receipt(number, round_number))
    lost = {at: [session[-1] for session in store.since(ALICE.peer_id, at)] for at in (31, 30, 8, 7, 6)}
    assert lost == {31: [], 30: [6], 8: [6, 5], 7: [6, 5, 4], 6: [6, 5, 4, 3, 2, 1]}
    assert store.since(BOB.peer_id, 10) == []
