"""Receipts as two partners sign them, without an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import blake3

from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import Receipt, content_of, sign
from nolocod.studies.sim.member import WALL

if TYPE_CHECKING:
    from nolocod.identity import Identity

RUN = "cd" * 32


def side(identity: Identity, time: float, number: int, tokens: int) -> pb.Side:
    """`identity` in round `number` at `time` seconds after WALL."""
    terms = pb.Terms(codec="block4 2", size=1 << 24, fragment=3)
    standing = pb.Standing(
        round=number, tokens=tokens, loss=2.5, terms=terms, step_seconds=1.5, time_ms=int((WALL + time) * 1000)
    )
    return pb.Side(peer_id=identity.peer_id, standing=standing, root=blake3.blake3(f"{time}".encode()).digest())


def signed(offerer: Identity, answerer: Identity, sides: tuple[pb.Side, pb.Side], run_id: str = RUN) -> Receipt:
    session = blake3.blake3(sides[0].SerializeToString() + sides[1].SerializeToString()).digest()[:16]
    content = content_of(run_id, session, *sides)
    return Receipt(content, sign(offerer, content), sign(answerer, content))


def exchanged(
    offerer: Identity, answerer: Identity, time: float, *, rate: float = 100.0, others: float = 100.0, skew: float = 0.0,
    every: float = 60.0, run_id: str = RUN,
) -> Receipt:  # fmt: skip
    """An exchange at `time`, of nodes that trained so many tokens a second and stepped every so many seconds."""
    number = int(time / every)
    first, second = side(offerer, time, number, int(rate * time)), side(answerer, time + skew, number, int(others * time))
    return signed(offerer, answerer, (first, second), run_id)
