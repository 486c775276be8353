"""The last receipts of each member that are passed on: what they are, which are taken, which are told.

The rule: anybody can check a receipt, so it matters not who brings it. It is held while it is the newest of one of its two
members, at most so often a new one of each, and until it is an hour old. So what is held, told and checked grows with the
members and not with their exchanges, however many keys a liar makes. No clock in here: `wall` is the time of day in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import blake3
from google.protobuf.message import DecodeError

from nolocod.errors import ProtocolError, RemoteError
from nolocod.p2p.exchange.contributions import AWAY, SKEW, points
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import Receipt

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.contributions import Point

CAPACITY = 512
"""Members of which the newest receipt is held."""
MAX_RECEIPT = 768
"""Bytes of one."""
PER_MESSAGE = 4
DIGEST = 6
_LEAST, _PER_MEMBER, _MANY = 10.0, 4.0, 40
"""Seconds between two receipts of one member: at least, and for each that there is where there are so many. Fewer are told of
more often, by their share of so many: each is told of few, and a small swarm's page is to show all exchanges."""


@dataclass(frozen=True, slots=True)
class Recent:
    """A receipt that is held."""

    raw: bytes
    sides: tuple[Point, ...]


def packed(receipt: Receipt) -> bytes:
    """`receipt` as it travels: without what was skipped, which has signatures of its own."""
    signatures = {"offerer": receipt.offerer_signature, "answerer": receipt.answerer_signature}
    return pb.SignedReceipt(content=receipt.content, **signatures).SerializeToString(deterministic=True)


def unpacked(raw: bytes) -> Receipt:
    """Read `packed` back, nothing of it checked but its size. ProtocolError if it is none."""
    if len(raw) > MAX_RECEIPT:
        raise ProtocolError(f"a receipt of {len(raw)} bytes is above the limit of {MAX_RECEIPT}.")
    told = pb.SignedReceipt()
    try:
        told.ParseFromString(raw)
    except DecodeError as error:
        raise ProtocolError("a receipt cannot be parsed.") from error
    return Receipt(told.content, told.offerer, told.answerer)


def digest(receipt: Receipt) -> bytes:
    """What stands for a receipt, however its signatures are written."""
    return blake3.blake3(receipt.content).digest()[:DIGEST]


@dataclass
class RecentReceipts:
    """Of the members of run `run_id`."""

    run_id: str
    _held: dict[bytes, Recent] = field(default_factory=dict)
    _newest: dict[PeerId, bytes] = field(default_factory=dict)

    def hear(self, raw: bytes, members: Collection[PeerId], wall: float) -> Recent | None:
        """Take in a packed receipt; that one, if it is news. ProtocolError or SignatureError."""
        receipt = unpacked(raw)
        if (name := digest(receipt)) in self._held:
            return None
        sides = points(receipt)
        if receipt.parsed.run_id != self.run_id:
            raise ProtocolError("a receipt is of another run.")
        if not sides or not all(wall - AWAY < one.time < wall + SKEW and one.peer in members for one in sides):
            return None
        if not any(self._is_due(one, len(members)) for one in sides):
            return None
        receipt.check()
        return self._hold(name, Recent(packed(receipt), sides))

    def keep(self, receipt: Receipt, members: int) -> None:
        """Hold one of our own, where it is time for one and it tells times."""
        raw, sides = packed(receipt), points(receipt)
        if len(raw) <= MAX_RECEIPT and any(self._is_due(one, members) for one in sides):
            self._hold(digest(receipt), Recent(raw, sides))

    def _is_due(self, point: Point, members: int) -> bool:
        held = self._held.get(self._newest.get(point.peer, b""))
        if held is None:
            return True
        before = next(one.time for one in held.sides if one.peer == point.peer)
        return point.time - before >= max(_LEAST, _PER_MEMBER * members * min(members / _MANY, 1.0))

    def _hold(self, name: bytes, recent: Recent) -> Recent:
        self._held[name] = recent
        for point in recent.sides:
            held = self._held.get(self._newest.get(point.peer, b""))
            if held is None or all(one.time < point.time for one in held.sides if one.peer == point.peer):
                self._newest.pop(point.peer, None)  # those that were heard of last come last
                self._newest[point.peer] = name
        while len(self._newest) > CAPACITY:
            del self._newest[next(iter(self._newest))]
        self._drop_the_rest()
        return recent

    def expire(self, wall: float) -> None:
        """Drop those that are an hour old."""
        late = {name for name, one in self._held.items() if one.sides[0].time <= wall - AWAY}
        self._newest = {peer: name for peer, name in self._newest.items() if name not in late}
        self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        kept = set(self._newest.values())
        self._held = {name: one for name, one in self._held.items() if name in kept}

    # --- messages -----------------------------------------------------------------------------------

    def question(self) -> pb.ReceiptsRequest:
        """What we hold."""
        return pb.ReceiptsRequest(digests=b"".join(sorted(self._held)))

    def answer(self, request: pb.ReceiptsRequest, rng: random.Random) -> pb.Receipts:
        """Some of what the other does not hold."""
        known = {request.digests[at : at + DIGEST] for at in range(0, len(request.digests), DIGEST)}
        others = [one.raw for name, one in self._held.items() if name not in known]
        return pb.Receipts(receipts=rng.sample(others, min(len(others), PER_MESSAGE)))

    def learn(self, told: pb.Receipts, members: Collection[PeerId], wall: float) -> tuple[list[Recent], int]:
        """Take in an answer: what was news, and how many were not valid. ProtocolError for more than anybody tells."""
        if len(told.receipts) > PER_MESSAGE:
            raise ProtocolError(f"a peer tells more than {PER_MESSAGE} receipts at once.")
        news, faults = [], 0
        for raw in told.receipts:
            try:
                recent = self.hear(raw, members, wall)
            except RemoteError:
                faults += 1
            else:
                news += [recent] if recent is not None else []
        return news, faults
