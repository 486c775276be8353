"""Receipts: what two partners sign about one exchange, byte for byte the same on both sides.

The answerer's signature says "I hold your bytes, verified, and will apply if you commit"; the
offerer's says "so do I, and I commit".
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from nolocod.errors import ProtocolError
from nolocod.identity import Identity, PeerId, verify
from nolocod.proto import nolocod_pb2 as pb

_DOMAIN = b"nolocod receipt 1\0"
MAX_LINE = 256 << 10
"""Bytes; more than any receipt takes as a line of text."""


@dataclass(frozen=True)
class Receipt:
    """One exchange as both signed it. `content` is a serialised nolocod.Receipt, `sides[0]` the offerer's."""

    content: bytes
    offerer_signature: bytes
    answerer_signature: bytes
    skipped: bytes = b""
    """What the offerer's Commit says beside its signature; under the envelope's signature, not these two."""

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
        """SignatureError unless both sides signed this content."""
        check_signature(self.offerer, self.content, self.offerer_signature)
        check_signature(self.answerer, self.content, self.answerer_signature)


def to_line(receipt: Receipt) -> bytes:
    """`receipt` as a line of JSON: all that anybody needs in order to check it."""
    fields = {
        "session": receipt.session.hex(),  # for people, and for those who look for it
        "receipt": base64.b64encode(receipt.content).decode(),
        "offerer": base64.b64encode(receipt.offerer_signature).decode(),
        "answerer": base64.b64encode(receipt.answerer_signature).decode(),
        "skipped": base64.b64encode(receipt.skipped).decode(),
    }
    return json.dumps(fields).encode() + b"\n"


def from_line(line: bytes) -> Receipt:
    """Read `to_line` back, both signatures checked. ProtocolError, or SignatureError which is one."""
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a line of {len(line)} bytes is longer than any receipt.")
    try:
        fields = json.loads(line)
        parts = [base64.b64decode(fields[name], validate=True) for name in ("receipt", "offerer", "answerer", "skipped")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError("a line is not a receipt.") from error
    receipt = Receipt(*parts)
    receipt.check()
    return receipt


def content_of(run_id: str, session: bytes, offerer: pb.Side, answerer: pb.Side) -> bytes:
    """The bytes that both sides sign."""
    receipt = pb.Receipt(run_id=run_id, session=session, sides=[offerer, answerer])
    return receipt.SerializeToString(deterministic=True)


def commit_message(receipt: Receipt) -> pb.Commit:
    """What tells the answerer that the offerer decided."""
    return pb.Commit(receipt=receipt.content, signature=receipt.offerer_signature, skipped=receipt.skipped)


def sign(identity: Identity, content: bytes) -> bytes:
    return identity.sign(_DOMAIN + content)


def check_signature(peer_id: str, content: bytes, signature: bytes) -> None:
    """SignatureError unless `signature` is `peer_id`'s under the receipt `content`."""
    verify(peer_id, _DOMAIN + content, signature)
