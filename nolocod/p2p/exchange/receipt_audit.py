"""What receipts prove, to anybody, with nothing but the file: the signatures of both, and who contradicts himself.

The rule: only what a signature covers is believed, and only what no honest node can have signed is called proof.
A session's name is drawn at random by whoever offers, who signs one receipt in it; two different ones in his name
convict him, and not the answerer, whom he may have asked twice. What receipts cannot prove: an order in time, a
round that went back (a node may have gone back to its checkpoint), what was in the bytes beyond their hash.

Files are read only: a node that runs may be writing its store meanwhile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import blake3

from nolocod.disk import disk_errors, written_whole
from nolocod.errors import ProtocolError, ReceiptError
from nolocod.identity import short
from nolocod.proto.receipt import MAX_LINE, Receipt, from_line, to_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.proto import nolocod_pb2 as pb

_SESSION_SIZE = 16
_ROOT_SIZE = 32
_RUN_ID = re.compile("[0-9a-f]{64}")
_PROOFS = 1000
"""Contradictions that are told of one heap of receipts at most."""


@dataclass(frozen=True)
class Line:
    """One line of a file of receipts: its number from 1, and the receipt or why it is none."""

    number: int
    receipt: Receipt | None
    cause: str = ""


@dataclass(frozen=True)
class Proof:
    """`peer` offered twice in one session, with different content: both receipts carry its signature."""

    peer: PeerId
    first: Receipt
    second: Receipt

    def __str__(self) -> str:
        return f"peer {self.peer} signed two different receipts in session {self.first.session.hex()}"


@dataclass
class Verdict:
    """What is to be said of the files together."""

    receipts: list[Receipt] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Lines that do not verify: file, line and cause."""
    proofs: list[Proof] = field(default_factory=list)


def stored(receipts: Path) -> list[Path]:
    """The files of a node's store, older first; empty if there is none."""
    return [path for path in (receipts.with_name(receipts.name + ".old"), receipts) if path.exists()]


def read(path: Path) -> Iterator[Line]:
    """Every line of `path`. A last one that does not end may be in the making and is left out, unless it is all there is.

    Raises ReceiptError if there is no such file, DataDirError if it cannot be read.
    """
    if not path.is_file():
        raise ReceiptError(f"{path} is not a file.", remedy="Name a file that `nolocod receipts show --out` wrote.")
    with disk_errors(path), path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if not line.endswith(b"\n") and len(line) <= MAX_LINE and number > 1:
                return
            yield _read(number, line)
            if len(line) > MAX_LINE:
                return  # what follows is the rest of a line that is none


def _read(number: int, line: bytes) -> Line:
    try:
        receipt = from_line(line.rstrip(b"\n"))
    except ProtocolError as error:
        return Line(number, None, error.cause)
    cause = _odd(receipt.parsed)
    return Line(number, None if cause else receipt, cause)


def _odd(parsed: pb.Receipt) -> str:
    """What no exchange can have left behind, whoever signed it; empty if there is nothing odd."""
    if parsed.sides[0].peer_id == parsed.sides[1].peer_id:
        return "a receipt is of one peer with itself."
    if len(parsed.session) != _SESSION_SIZE or any(len(side.root) != _ROOT_SIZE for side in parsed.sides):
        return "a receipt names no session, or no bytes."
    if not _RUN_ID.fullmatch(parsed.run_id):  # it is shown, and a stranger chose it
        return "a receipt names no run."
    return ""


def verify(paths: Iterable[Path], run_id: str | None = None) -> Verdict:
    """Check all lines of `paths`, against `run_id` too if it is given, and against each other."""
    verdict = Verdict()
    first: dict[tuple[PeerId, bytes], Receipt] = {}
    for path in paths:
        for line in read(path):
            receipt, cause = line.receipt, line.cause
            if receipt is not None and run_id not in (None, told := receipt.parsed.run_id):
                receipt, cause = None, f"a receipt is of another run, {told[:12]!r}."
            if receipt is None:
                verdict.faults.append(f"{path}, line {line.number}: {cause}")
                continue
            verdict.receipts.append(receipt)
            before = first.setdefault((receipt.offerer, receipt.session), receipt)
            if before.content != receipt.content and len(verdict.proofs) < _PROOFS:
                verdict.proofs.append(Proof(receipt.offerer, before, receipt))
    return verdict


def find(receipts: Sequence[Receipt], name: str) -> Receipt:
    """The one receipt whose session begins with `name`, in hex; ReceiptError if there is none, or several."""
    found = {receipt.content: receipt for receipt in receipts if receipt.session.hex().startswith(name.lower())}
    if not name or not found:
        raise ReceiptError(f"no receipt of a session {name!r} is stored.", remedy="`nolocod receipts list` names them.")
    if len(found) > 1:
        raise ReceiptError(f"{len(found)} receipts begin with {name!r}.", remedy="Give more of the session's name.")
    return next(iter(found.values()))


def digest(receipts: Iterable[Receipt]) -> str:
    """BLAKE3, in hex, of what the sides signed in all of `receipts`, each once, in the order of their bytes."""
    hasher = blake3.blake3()
    for content in sorted({receipt.content for receipt in receipts}):
        hasher.update(content)
    return hasher.hexdigest()


def export(receipt: Receipt, path: Path) -> None:
    """Write `receipt` to a file of its own; ReceiptError if the file is there."""
    if path.exists():
        raise ReceiptError(f"{path} exists already.", remedy="Choose another name.")
    with written_whole(path) as file:
        file.write(to_line(receipt))


def as_fields(receipt: Receipt) -> dict[str, object]:
    """What the receipt says, for people and for JSON."""
    parsed = receipt.parsed
    skipped = (receipt.skipped, receipt.answerer_skipped)
    told = all(one.signature for one in skipped)  # a partner of release 0.1 keeps only the offerer's, and signs none
    return {
        "session": parsed.session.hex(),
        "run_id": parsed.run_id,
        "sides": [
            {
                "peer_id": side.peer_id,
                "role": role,
                "round": side.standing.round,
                "tokens": side.standing.tokens,
                "root": side.root.hex(),
                "skipped": one.blocks.hex() if told else None,
                "terms": _terms(side.standing.terms) if side.standing.HasField("terms") else None,
            }
            for role, side, one in zip(("offerer", "answerer"), parsed.sides, skipped, strict=True)
        ],
    }


def _terms(terms: pb.Terms) -> dict[str, object]:
    return {"codec": terms.codec, "size": terms.size, "fragment": terms.fragment}


def summary(receipt: Receipt) -> str:
    """One line: session, run, and who was in which round."""
    parsed = receipt.parsed
    sides = " with ".join(f"{short(side.peer_id)} in round {side.standing.round}" for side in parsed.sides)
    return f"{parsed.session.hex()}  run {parsed.run_id[:12]}  {sides}"
