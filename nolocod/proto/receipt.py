"""Receipts: what two partners sign about one exchange, byte for byte the same on both sides.

The answerer's signature says "I hold your bytes, verified, and will apply if you commit"; the
offerer's says "so do I, and I commit". What is signed covers all that decides what is applied: the terms
(in the standings), both messages, and each side's bit map of the blocks that it leaves out.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from nolocod.errors import ProtocolError
from nolocod.identity import Identity, PeerId, verify
from nolocod.proto import nolocod_pb2 as pb

_DOMAIN = b"nolocod receipt 1\0"
_SKIPPED_DOMAIN = b"nolocod skipped blocks 1\0"
MAX_LINE = 256 << 10
"""Bytes; more than any receipt takes as a line of text."""


@dataclass(frozen=True)
class Skipped:
    """What one side could not decode of the other's message: a bit map of blocks, and its signature under that and
    the receipt. A partner of release 0.1 signs nothing of the kind."""

    blocks: bytes = b""
    signature: bytes = b""

    @classmethod
    def signed(cls, identity: Identity, content: bytes, blocks: bytes) -> Skipped:
        return cls(blocks, identity.sign(_SKIPPED_DOMAIN + content + blocks))

    def check(self, peer_id: str, content: bytes) -> None:
        """SignatureError unless `peer_id` signed this for the receipt `content`."""
        verify(peer_id, _SKIPPED_DOMAIN + content + self.blocks, self.signature)


@dataclass(frozen=True)
class Receipt:
    """One exchange as both signed it. `content` is a serialised nolocod.Receipt, `sides[0]` the offerer's.

    Without the offerer's signature it is the answerer's vote, of which the outcome is not known.
    """

    content: bytes
    offerer_signature: bytes
    answerer_signature: bytes
    skipped: Skipped = Skipped()
    """The offerer's."""
    answerer_skipped: Skipped = Skipped()

    @property
    def parsed(self) -> pb.Receipt:
        """ProtocolError if `content` is not a receipt between two sides."""
        parsed = pb.Receipt()
        try:
            parsed.ParseFromString(self.content)
        except DecodeError as error:
            raise ProtocolError("a receipt cannot be parsed.") from error
        if len(parsed.sides) != 2:
            raise ProtocolError(f"a receipt has {len(parsed.sides)} sides, not two.")
        return parsed

    @property
    def session(self) -> bytes:
        return self.parsed.session

    @property
    def offerer(self) -> PeerId:
        return PeerId(self.parsed.sides[0].peer_id)

    @property
    def answerer(self) -> PeerId:
        return PeerId(self.parsed.sides[1].peer_id)

    def check(self) -> None:
        """SignatureError unless both sides signed this content, and what is signed of skipped blocks is theirs."""
        check_signature(self.offerer, self.content, self.offerer_signature)
        check_signature(self.answerer, self.content, self.answerer_signature)
        for peer, skipped in ((self.offerer, self.skipped), (self.answerer, self.answerer_skipped)):
            if skipped.signature:
                skipped.check(peer, self.content)

    def committed(self, commit: pb.Commit) -> Receipt:
        """This vote with the offerer's decision. ProtocolError, or SignatureError which is one, if it is not about this."""
        if commit.receipt != self.content:
            raise ProtocolError("the partner's receipt is not about the same bytes as ours.")
        check_signature(self.offerer, self.content, commit.signature)
        return replace(self, offerer_signature=commit.signature, skipped=skipped_of(commit, self.parsed.sides[0]))


def to_line(receipt: Receipt) -> bytes:
    """`receipt` as a line of JSON: all that anybody needs in order to check it."""
    fields = {
        "session": receipt.session.hex(),  # for people, and for those who look for it
        "receipt": base64.b64encode(receipt.content).decode(),
        "offerer": base64.b64encode(receipt.offerer_signature).decode(),
        "answerer": base64.b64encode(receipt.answerer_signature).decode(),
        "skipped": base64.b64encode(receipt.skipped.blocks).decode(),
        "skipped_signature": base64.b64encode(receipt.skipped.signature).decode(),
        "answerer_skipped": base64.b64encode(receipt.answerer_skipped.blocks).decode(),
        "answerer_skipped_signature": base64.b64encode(receipt.answerer_skipped.signature).decode(),
    }
    return json.dumps(fields).encode() + b"\n"


_OPTIONAL = ("skipped_signature", "answerer_skipped", "answerer_skipped_signature")  # not in lines of release 0.1


def from_line(line: bytes) -> Receipt:
    """Read `to_line` back, all signatures checked. ProtocolError, or SignatureError which is one."""
    receipt = read_line(line)
    receipt.check()
    return receipt


def read_line(line: bytes) -> Receipt:
    """The same with no signature checked."""
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a line of {len(line)} bytes is longer than any receipt.")
    try:
        fields = json.loads(line)
        parts = [base64.b64decode(fields[name], validate=True) for name in ("receipt", "offerer", "answerer", "skipped")]
        more = [base64.b64decode(fields.get(name, ""), validate=True) for name in _OPTIONAL]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError("a line is not a receipt.") from error
    content, offerer, answerer, skipped = parts
    return Receipt(content, offerer, answerer, Skipped(skipped, more[0]), Skipped(*more[1:]))


def content_of(run_id: str, session: bytes, offerer: pb.Side, answerer: pb.Side) -> bytes:
    """The bytes that both sides sign."""
    receipt = pb.Receipt(run_id=run_id, session=session, sides=[offerer, answerer])
    return receipt.SerializeToString(deterministic=True)


def commit_message(receipt: Receipt) -> pb.Commit:
    """What tells the answerer that the offerer decided."""
    skipped = receipt.skipped
    return pb.Commit(
        receipt=receipt.content,
        signature=receipt.offerer_signature,
        skipped=skipped.blocks,
        skipped_signature=skipped.signature,
    )


def skipped_of(signed: pb.Confirm | pb.Commit, side: pb.Side) -> Skipped:
    """What `side` says of skipped blocks. SignatureError unless it signed that, where its release does so."""
    skipped = Skipped(signed.skipped, signed.skipped_signature)
    if side.standing.HasField("terms") or skipped.signature:
        skipped.check(side.peer_id, signed.receipt)
    return skipped


def sign(identity: Identity, content: bytes) -> bytes:
    return identity.sign(_DOMAIN + content)


def check_signature(peer_id: str, content: bytes, signature: bytes) -> None:
    """SignatureError unless `signature` is `peer_id`'s under the receipt `content`."""
    verify(peer_id, _DOMAIN + content, signature)
