"""Receipts: what two partners sign about one exchange, byte for byte the same on both sides.

The answerer's signature says "I hold your bytes, verified, and will apply if you commit"; the
offerer's says "so do I, and I commit".
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from nolocod.errors import ProtocolError
from nolocod.identity import Identity, PeerId, verify
from nolocod.proto import nolocod_pb2 as pb

_DOMAIN = b"nolocod receipt 1\0"


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
