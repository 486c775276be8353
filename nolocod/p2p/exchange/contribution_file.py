"""A file that shows what one node gave, to anybody, with nothing but the file.

The rule: the first line says whose it is, of which run, and which receipts follow, signed by that node; then comes a receipt a
line, one of each quarter of an hour. What a reader is told is counted anew from receipts whose two signatures fit.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import blake3
import msgspec

from nolocod.disk import disk_errors, written_whole
from nolocod.errors import ContributionsError, ProtocolError, SignatureError
from nolocod.identity import PeerId, verify
from nolocod.p2p.exchange.contributions import Tally, points
from nolocod.p2p.exchange.receipt_gossip import KEPT_EVERY
from nolocod.p2p.exchange.recent_receipts import MAX_RECEIPT, packed, unpacked
from nolocod.units import NAME

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nolocod.identity import Identity
    from nolocod.observe.events import Contribution
    from nolocod.proto.receipt import Receipt

_DOMAIN = b"nolocod contributions 1\0"
_MAX_LINE = 4 * MAX_RECEIPT // 3 + 64
MOST = 200_000
"""Receipts in a file: those of five years."""


class Head(msgspec.Struct, frozen=True):
    """The first line, without its signature."""

    peer_id: PeerId
    run_id: str
    run_name: str
    name: str
    """What the node is called."""
    receipts: int
    digest: str
    """BLAKE3 of what both sides signed in all receipts, in hex."""


class _Signed(msgspec.Struct, frozen=True):
    head: str
    """The JSON of a Head, as it was signed."""
    signature: str


def thinned(receipts: Iterable[Receipt], run_id: str, own: PeerId) -> list[Receipt]:
    """Those of `own` in the run that counting needs, in the order of their times."""
    times = [(sides[0].time, one) for one in receipts if (sides := points(one)) and own in (sides[0].peer, sides[1].peer)]
    ordered = sorted(((time, one) for time, one in times if one.parsed.run_id == run_id), key=lambda one: one[0])
    kept: list[tuple[float, Receipt]] = []
    for time, one in ordered:
        if not kept or time - kept[-1][0] >= KEPT_EVERY or one is ordered[-1][1]:
            kept.append((time, one))
    return [one for _, one in kept[-MOST:]]


def write(path: Path, identity: Identity, run: tuple[str, str], name: str, receipts: list[Receipt]) -> None:
    """Show what `identity`, called `name`, gave to `run`, an id and a name. ContributionsError if the file is there."""
    if path.exists():
        raise ContributionsError(f"{path} exists already.", remedy="Choose another name.")
    head = msgspec.json.encode(Head(identity.peer_id, *run, name, len(receipts), _digest(receipts))).decode()
    signature = base64.b64encode(identity.sign(_DOMAIN + head.encode())).decode()
    with written_whole(path) as file:
        file.write(msgspec.json.encode(_Signed(head, signature)) + b"\n")
        file.writelines(base64.b64encode(packed(one)) + b"\n" for one in receipts)


def read(path: Path) -> tuple[Head, Contribution]:
    """Whose the file is, and what it shows that this node gave. ContributionsError if any of it does not verify."""
    if not path.is_file():
        raise ContributionsError(f"{path} is not a file.", remedy="Name a file that `nolocod contributions --export` wrote.")
    with disk_errors(path), path.open("rb") as file:
        try:
            head = _head(file.readline(_MAX_LINE))
            receipts = [_receipt(file.readline(_MAX_LINE), head) for _ in range(head.receipts)]
            if file.read(1):
                raise ProtocolError("more follows than its first line says.")
            if _digest(receipts) != head.digest:
                raise ProtocolError("its receipts are not those of its first line.")
            tally = Tally(head.peer_id)
            tally.add_all(map(points, receipts))
        except (ProtocolError, SignatureError, ValueError) as error:
            cause = (
                error.cause
                if isinstance(error, ProtocolError | SignatureError)
                else f"a line is none of such a file ({error})."
            )
            raise ContributionsError(f"{path}: {cause}") from error
    given = next((one for one in tally.contributions({head.peer_id: head.name}) if one.peer_id == head.peer_id), None)
    if given is None:
        raise ContributionsError(f"{path}: it has no receipt that counts.")
    return head, given


def _head(line: bytes) -> Head:
    signed = msgspec.json.decode(line, type=_Signed)
    head = msgspec.json.decode(signed.head, type=Head)
    verify(head.peer_id, _DOMAIN + signed.head.encode(), base64.b64decode(signed.signature, validate=True))
    if not 0 < head.receipts <= MOST or (head.name and not NAME.fullmatch(head.name)):
        raise ProtocolError("its first line says what no node says.")
    return head


def _receipt(line: bytes, head: Head) -> Receipt:
    receipt = unpacked(base64.b64decode(line.rstrip(b"\n"), validate=True))
    if receipt.parsed.run_id != head.run_id or head.peer_id not in (receipt.offerer, receipt.answerer):
        raise ProtocolError("a receipt is of another run or other nodes.")
    receipt.check()
    return receipt


def _digest(receipts: list[Receipt]) -> str:
    hasher = blake3.blake3()
    for one in receipts:
        hasher.update(one.content)
    return hasher.hexdigest()
