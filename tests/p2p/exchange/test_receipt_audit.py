"""`nolocod receipts`: what a stranger can verify with nothing but a file, and what convicts whom."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nolocod import cli
from nolocod.errors import ProtocolError, ReceiptError
from nolocod.identity import Identity
from nolocod.p2p.exchange import receipt_audit
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import MAX_LINE, Receipt, content_of, from_line, sign, to_line
from nolocod.run.manifest import Manifest, seal

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB, EVE = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2, 3))
SEALED = seal(Manifest(name="one", model={"model_type": "llama"}), ALICE)


def receipt(
    number: int, run: str = SEALED.run_id, offerer: Identity = ALICE, answerer: Identity = BOB, root: bytes = bytes(32)
) -> Receipt:
    standing = pb.Standing(round=number, tokens=100 * number, loss=2.0)
    sides = (pb.Side(peer_id=one.peer_id, standing=standing, root=root) for one in (offerer, answerer))
    content = content_of(run, number.to_bytes(16, "big"), *sides)
    return Receipt(content, sign(offerer, content), sign(answerer, content))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data directory with three receipts of one run."""
    (tmp_path / "home").mkdir()
    store = ReceiptStore(tmp_path / "home" / "receipts")
    for number in (1, 2, 3):
        store.add(receipt(number))
    (tmp_path / "home" / "manifest").write_bytes(SEALED.to_bytes())
    return tmp_path / "home"


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = 0
    try:
        cli.main([str(one) for one in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, *capsys.readouterr()


def test_a_receipt_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shown").write_bytes(to_line(receipt(1, run="\x1bc\x1b]0;owned\x07")))
    status, out, err = called(capsys, "receipts", "verify", tmp_path / "shown")
    assert status != 0
    assert "names no run" in err
    assert "\x1b" not in out + err


def test_what_is_stored_is_listed_and_verified(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "receipts", "list", "--data-dir", home)
    assert status == 0
    assert [line[:32] for line in out.splitlines()] == [f"{n:032x}" for n in (1, 2, 3)]
    status, out, _ = called(capsys, "receipts", "list", "--json", "--data-dir", home)
    told = json.loads(out.splitlines()[2])
    assert [(side["peer_id"], side["role"], side["round"]) for side in told["sides"]] == [
        (ALICE.peer_id, "offerer", 3),
        (BOB.peer_id, "answerer", 3),
    ]
    status, out, _ = called(capsys, "receipts", "verify", "--data-dir", home)
    assert (status, out) == (0, "3 verified, 0 not\n")


def test_a_stranger_verifies_what_is_shown_with_nothing_but_the_file(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = tmp_path / "shown"
    name = f"{2:032x}"
    assert called(capsys, "receipts", "show", name, "--out", shown, "--data-dir", home)[0] == 0
    status, out, _ = called(capsys, "receipts", "verify", shown, "--data-dir", tmp_path / "nobody")
    assert status == 0
    assert out.splitlines() == [receipt_audit.summary(receipt(2)), "1 verified, 0 not"]
    status, out, _ = called(capsys, "receipts", "show", name, "--data-dir", home)
    assert json.loads(out) == receipt_audit.as_fields(receipt(2))
    status, _, err = called(capsys, "receipts", "show", name, "--out", shown, "--data-dir", home)
    assert status == 1
    assert "exists already" in err


@pytest.mark.parametrize("position", range(0, len(to_line(receipt(2))) - 1, 11))
def test_a_byte_changed_anywhere_is_found_or_changes_nothing(position: int, tmp_path: Path) -> None:
    raw = bytearray(to_line(receipt(2)))
    raw[position] ^= 0x01
    (tmp_path / "shown").write_bytes(raw)
    verdict = receipt_audit.verify([tmp_path / "shown"])
    assert [one.content for one in verdict.receipts] in ([], [receipt(2).content])
    assert len(verdict.receipts) + len(verdict.faults) == 1


def test_a_file_that_does_not_verify_has_a_code_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    forged = replace(receipt(1), offerer_signature=sign(EVE, receipt(1).content))
    bad.write_bytes(to_line(receipt(2)) + to_line(forged) + b"nonsense\n")
    status, out, err = called(capsys, "receipts", "verify", bad)
    assert status == ReceiptError.entry.exit_status
    assert "1 verified, 2 not" in out
    assert ReceiptError.entry.code in err
    assert "line 2: a message in the name of" in err
    status, out, _ = called(capsys, "receipts", "verify", bad, "--json")
    told = json.loads(out)
    assert (status, len(told["verified"]), len(told["faults"]), told["proofs"]) == (1, 1, 2, [])
    assert called(capsys, "receipts", "verify", tmp_path / "missing")[0] == 1


def test_another_run_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(to_line(receipt(1, run="ab" * 32)))
    assert called(capsys, "receipts", "verify", foreign)[0] == 0, "a stranger's run is not ours to judge"
    status, _, err = called(capsys, "receipts", "verify", foreign, "--manifest", home / "manifest")
    assert status == 1
    assert "another run" in err
    ReceiptStore(home / "receipts").add(receipt(1, run="ab" * 32))
    assert called(capsys, "receipts", "verify", "--data-dir", home)[0] == 1
    assert "NLC-103" in called(capsys, "receipts", "verify", foreign, "--manifest", foreign)[2]
    assert "NLC-103" in called(capsys, "receipts", "verify", foreign, "--manifest", tmp_path / "none")[2]


@pytest.mark.parametrize(
    "odd", [receipt(1, answerer=ALICE), receipt(1, root=b"short")], ids=["of one with itself", "without a root"]
)
def test_what_no_exchange_leaves_behind_does_not_verify(odd: Receipt, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(to_line(odd))
    assert len(receipt_audit.verify([tmp_path / "odd"]).faults) == 1


def test_two_receipts_in_one_session_convict_who_offered_and_nobody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_twice = receipt(5, root=b"\1" * 32)
    (tmp_path / "one").write_bytes(to_line(receipt(5)) + to_line(receipt(5)))
    (tmp_path / "two").write_bytes(to_line(told_twice))
    (tmp_path / "other").write_bytes(to_line(receipt(5, offerer=EVE)))
    assert receipt_audit.verify([tmp_path / "one"]).proofs == [], "the same one twice is no contradiction"
    assert receipt_audit.verify([tmp_path / "one", tmp_path / "other"]).proofs == [], "Bob may have been asked twice"
    (proof,) = receipt_audit.verify([tmp_path / "one", tmp_path / "two"]).proofs
    assert (proof.peer, proof.second) == (ALICE.peer_id, told_twice)
    status, out, _ = called(capsys, "receipts", "verify", tmp_path / "one", tmp_path / "two")
    assert status == 0, "they are what they say they are"
    assert f"PROOF: peer {ALICE.peer_id} signed two different receipts" in out


def test_a_session_is_found_by_its_first_characters(home: Path) -> None:
    receipts = receipt_audit.verify(receipt_audit.stored(home / "receipts")).receipts
    assert receipt_audit.find(receipts, f"{3:032X}") == receipt(3)
    for name, says in (("00", "3 receipts"), ("ff", "no receipt"), ("", "no receipt")):
        with pytest.raises(ReceiptError, match=says):
            receipt_audit.find(receipts, name)


def test_reading_beside_a_running_node_changes_nothing_and_leaves_out_a_line_in_the_making(home: Path) -> None:
    whole = (home / "receipts").read_bytes()
    (home / "receipts.old").write_bytes(to_line(receipt(9)))
    (home / "receipts").write_bytes(whole + to_line(receipt(4))[:-20])
    verdict = receipt_audit.verify(receipt_audit.stored(home / "receipts"))
    assert [one.session[-1] for one in verdict.receipts] == [9, 1, 2, 3]
    assert verdict.faults == []
    assert (home / "receipts").read_bytes() == whole + to_line(receipt(4))[:-20]


def test_an_endless_line_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_bytes(b"x" * (3 * MAX_LINE))
    (fault,) = receipt_audit.verify([path]).faults
    assert "longer than any receipt" in fault


@settings(max_examples=50)
@given(st.binary(max_size=300) | st.builds(lambda text: json.dumps(text).encode(), st.recursive(st.text(), st.lists)))
def test_any_line_is_a_receipt_or_our_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_line(line)


@given(st.binary(max_size=200), st.binary(max_size=70), st.binary(max_size=70))
def test_any_content_is_a_receipt_or_our_error(content: bytes, one: bytes, other: bytes) -> None:
    with pytest.raises(ProtocolError):
        Receipt(content, one, other).check()
