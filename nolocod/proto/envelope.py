"""Envelopes: one signed message each, checked in full before anything of it is believed.

The rule: what is signed is the serialised body as sent, under a domain of its own, so nothing is ever
serialised again in order to check it. Fields that we do not know are ignored; another major is not.
"""

from __future__ import annotations

import math
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from nolocod.errors import OtherRunError, PeerVersionError, ProtocolError
from nolocod.identity import Identity, PeerId, short, verify
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing

M = TypeVar("M", bound=Message)

MAJOR = 1
MINOR = 0
MAX_NUMBER = 1 << 53
"""Counts that peers tell are below this."""

_DOMAIN = b"nolocod envelope 1\0"
_TO_ALL = "heartbeat"  # the one message without a receiver


def seal(body: pb.Body, identity: Identity) -> bytes:
    """Sign `body` (its sender is filled in here) and serialise the envelope."""
    body.sender = identity.peer_id
    raw = body.SerializeToString()
    envelope = pb.Envelope(major=MAJOR, minor=MINOR, body=raw, signature=identity.sign(_DOMAIN + raw))
    return envelope.SerializeToString()


def open_envelope(raw: bytes, *, run_id: str | None, receiver: str, remote: str | None = None) -> pb.Body:
    """Check a serialised envelope, of which whoever read it has checked the size, and return its body.

    `run_id` is ours, or None where any run may ask (a newcomer's question for the manifest). `remote`
    is the stream's authenticated peer, which must be the sender; None for gossip, which others carry.

    Raises PeerVersionError, OtherRunError (both name both sides), SignatureError or ProtocolError.
    """
    envelope = _parse(pb.Envelope(), raw)
    if envelope.major != MAJOR:
        raise PeerVersionError(
            f"the peer speaks version {envelope.major}.{envelope.minor} of the protocol, this node {MAJOR}.{MINOR}."
        )
    body = _parse(pb.Body(), envelope.body)
    verify(body.sender, _DOMAIN + envelope.body, envelope.signature)
    if remote is not None and body.sender != remote:
        raise ProtocolError(f"{short(remote)} sent a message in the name of {short(body.sender)}.")
    if body.receiver != receiver and (body.receiver or body.WhichOneof("content") != _TO_ALL):
        raise ProtocolError(f"a message of {short(body.sender)} is meant for another peer.")
    if run_id is not None and body.run_id != run_id:
        raise OtherRunError(f"peer {short(body.sender)} is in run {body.run_id[:64]!r}, this node in run {run_id!r}.")
    return body


def peek(raw: bytes) -> pb.Body:
    """The body of a serialised envelope with nothing of it checked: good only for dropping it cheaply.

    Raises ProtocolError if it cannot be parsed.
    """
    return _parse(pb.Body(), _parse(pb.Envelope(), raw).body)


def _parse(message: M, raw: bytes) -> M:
    try:
        message.ParseFromString(raw)
    except (DecodeError, MemoryError, RecursionError) as error:
        raise ProtocolError("a message cannot be parsed.") from error
    return message


class Dialogue:
    """One session with one partner: numbers and signs what we say, refuses what is old or out of order.

    It outlives a broken stream, so a message recorded from one stream is worth nothing on the next.
    `sequence` is the number of our last message.
    """

    def __init__(self, identity: Identity, run_id: str, partner: PeerId, session: bytes, sequence: int = 0) -> None:
        self.identity = identity
        self.run_id = run_id
        self.partner = partner
        self.session = session
        self._sent = sequence
        self._seen = 0

    def seal(self, body: pb.Body) -> bytes:
        """Address, number and sign `body`."""
        self._sent += 1
        body.run_id = self.run_id
        body.session = self.session
        body.sequence = self._sent
        body.receiver = self.partner
        return seal(body, self.identity)

    def open(self, raw: bytes) -> pb.Body:
        """`open_envelope`, then `admit`."""
        body = open_envelope(raw, run_id=self.run_id, receiver=self.identity.peer_id, remote=self.partner)
        self.admit(body)
        return body

    def admit(self, body: pb.Body) -> None:
        """Take an opened body as the partner's next; ProtocolError if it is of another session or not new."""
        if body.session != self.session:
            raise ProtocolError(f"{short(self.partner)} sent a message of another session.")
        if body.sequence <= self._seen:
            raise ProtocolError(f"{short(self.partner)} sent message {body.sequence} after message {self._seen}.")
        self._seen = body.sequence


def standing_to_wire(standing: Standing, wall: float = 0.0) -> pb.Standing:
    """`wall`: the time of day, where it is told."""
    told = pb.Standing(round=standing.round, tokens=standing.tokens, loss=standing.loss, time_ms=int(wall * 1000))
    told.step_seconds = standing.step_seconds
    return told


def standing_from_wire(standing: pb.Standing) -> Standing:
    """ProtocolError for numbers that no run reaches; a loss may be any float, NaN too. A step's seconds that cannot be
    count as not told."""
    if max(standing.round, standing.tokens) >= MAX_NUMBER:
        raise ProtocolError("a peer's rounds or tokens are too large.")
    step_seconds = standing.step_seconds if 0 < standing.step_seconds < math.inf else 0.0
    return Standing(standing.round, standing.tokens, standing.loss, step_seconds)


def readable(text: str, limit: int = 200) -> str:
    """A peer's text made fit for a log or a page: printable, one line, bounded."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])
