"""Which receipts are passed on: what is taken, held and told, whoever sends it."""

from __future__ import annotations

import random

import pytest

from nolocod.errors import ProtocolError, SignatureError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.exchange import recent_receipts as module
from nolocod.p2p.exchange.contributions import AWAY, SKEW, Point
from nolocod.p2p.exchange.recent_receipts import CAPACITY, DIGEST, MAX_RECEIPT, PER_MESSAGE, RecentReceipts, packed
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.limits import FIRST, most_bytes
from nolocod.proto.receipt import Receipt
from nolocod.studies.sim.member import WALL
from tests.support.receipts import RUN, exchanged

NODES = [Identity.from_secret((number + 1).to_bytes(32, "big")) for number in range(20)]
MEMBERS = frozenset(one.peer_id for one in NODES)
LATER = 10_000.0


def a_receipt(first: int = 0, second: int = 1, time: float = LATER) -> Receipt:
    return exchanged(NODES[first], NODES[second], time)


def hear(recent: RecentReceipts, receipt: Receipt, members: frozenset[PeerId] = MEMBERS, wall: float = LATER) -> bool:
    return recent.hear(packed(receipt), members, WALL + wall) is not None


def held(recent: RecentReceipts) -> list[tuple[Point, ...]]:
    return [one.sides for one in recent._held.values()]


def test_each_member_has_its_newest_and_a_new_one_only_after_a_while() -> None:
    recent, wait = RecentReceipts(RUN), 4.0 * len(NODES) / 2  # they are half as many as are many
    assert hear(recent, a_receipt())
    assert not hear(recent, a_receipt()), "once"
    assert not hear(recent, a_receipt(time=LATER + wait - 1))
    assert hear(recent, a_receipt(time=LATER + wait))
    assert not hear(recent, a_receipt(time=LATER + 1)), "older than what is held"
    assert len(held(recent)) == 1
    assert hear(recent, a_receipt(0, 2, LATER + wait + 1)), "the other one was not heard of for a while"
    assert len(held(recent)) == 2, "one is still the newest of its other side"


@pytest.mark.parametrize(("members", "wait"), [(2, 10.0), (12, 14.4), (40, 160.0), (200, 800.0)])
def test_a_small_swarm_is_told_of_more_often_and_a_large_one_costs_no_more(members: int, wait: float) -> None:
    recent = RecentReceipts(RUN)
    recent.keep(a_receipt(), members)
    recent.keep(a_receipt(time=LATER + wait - 0.1), members)
    assert [sides[0].time for sides in held(recent)] == [WALL + LATER]
    recent.keep(a_receipt(time=LATER + wait + 0.1), members)
    assert [sides[0].time for sides in held(recent)] == [pytest.approx(WALL + LATER + wait + 0.1, abs=0.01)]


def test_what_is_forged_or_of_no_member_or_of_another_time_is_not_held() -> None:
    recent, good = RecentReceipts(RUN), a_receipt()
    for bad in (Receipt(good.content, good.offerer_signature, good.offerer_signature),
                Receipt(good.content, good.answerer_signature, good.answerer_signature)):  # fmt: skip
        with pytest.raises(SignatureError):
            hear(recent, bad)
    with pytest.raises(ProtocolError, match="another run"):
        hear(recent, exchanged(NODES[0], NODES[1], LATER, run_id="ab" * 32))
    assert not hear(recent, good, MEMBERS - {NODES[1].peer_id}), "keys cost nothing: both must be members"
    assert not hear(recent, good, wall=LATER + AWAY + 1)
    assert not hear(recent, good, wall=LATER - SKEW - 1)
    assert held(recent) == []
    assert hear(recent, good, wall=LATER - SKEW + 1)


def test_a_receipt_written_otherwise_is_the_same() -> None:
    """Else a liar could have others carry one receipt again and again."""
    recent, raw = RecentReceipts(RUN), packed(a_receipt())
    more = raw + bytes.fromhex("a20603") + b"xyz"  # a field that nobody knows
    held = recent.hear(more, MEMBERS, WALL + LATER)
    assert held is not None
    assert held.raw == raw
    assert recent.hear(raw, MEMBERS, WALL + LATER) is None


@pytest.mark.parametrize("raw", [b"", b"\xff", b"x" * 100, pb.SignedReceipt(content=b"x").SerializeToString()])
def test_what_is_no_receipt_is_a_fault(raw: bytes) -> None:
    assert RecentReceipts(RUN).learn(pb.Receipts(receipts=[raw]), MEMBERS, WALL + LATER) == ([], 1)


def test_a_receipt_has_a_size() -> None:
    good = a_receipt()
    large = Receipt(
        good.content + bytes.fromhex("a20680") + bytes([4]) + bytes(512), good.offerer_signature, good.answerer_signature
    )
    with pytest.raises(ProtocolError, match="above the limit"):
        hear(RecentReceipts(RUN), large)
    assert len(packed(good)) < MAX_RECEIPT - 128


def test_more_than_anybody_tells_is_refused_unread() -> None:
    told = pb.Receipts(receipts=[packed(a_receipt())] * (PER_MESSAGE + 1))
    with pytest.raises(ProtocolError, match=f"more than {PER_MESSAGE}"):
        RecentReceipts(RUN).learn(told, MEMBERS, WALL + LATER)


def test_a_question_and_an_answer_carry_what_the_other_lacks() -> None:
    one, other = RecentReceipts(RUN), RecentReceipts(RUN)
    for number in range(0, 20, 2):
        hear(one, a_receipt(number, number + 1))
    hear(other, a_receipt())
    assert other.learn(one.answer(pb.ReceiptsRequest(digests=b"x" * 8), random.Random(0)), MEMBERS, WALL + LATER)[1] == 0
    for _ in range(4):
        told = one.answer(other.question(), random.Random(0))
        assert len(told.receipts) <= PER_MESSAGE
        assert other.learn(told, MEMBERS, WALL + LATER)[1] == 0
    assert one.question() == other.question()
    assert one.answer(other.question(), random.Random(0)) == pb.Receipts()


def test_what_is_held_ends_after_an_hour_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentReceipts(RUN)
    hear(recent, a_receipt(0, 1))
    hear(recent, a_receipt(2, 3, LATER + 60))
    recent.expire(WALL + LATER + AWAY)
    assert [sides[0].peer for sides in held(recent)] == [NODES[2].peer_id]
    monkeypatch.setattr(module, "CAPACITY", 6)
    for number in range(4, 20, 2):
        hear(recent, a_receipt(number, number + 1, LATER + number), wall=LATER + number)
    assert len(held(recent)) == 3
    assert held(recent)[-1][0].peer == NODES[18].peer_id


def test_all_that_is_held_fits_into_a_message() -> None:
    asked = pb.Body(receipts_request=pb.ReceiptsRequest(digests=bytes(DIGEST * CAPACITY)))
    assert len(asked.SerializeToString()) + 512 <= most_bytes(["receipts_request"]) == FIRST
    told = pb.Body(receipts=pb.Receipts(receipts=[bytes(MAX_RECEIPT)] * PER_MESSAGE))
    assert len(told.SerializeToString()) + 512 <= most_bytes(["receipts"])
