"""How amendments come to a node, from peers and from its owner's commands, and what it does not follow."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, cast

import pytest
import trio
import trio.testing

from nolocod.errors import DataDirError, ProtocolError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Amended, Troubled
from nolocod.p2p.membership.amended import AmendedRun
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.proto.types import Standing
from nolocod.run.amendments import goal, propose
from nolocod.run.manifest import Manifest, seal
from nolocod.run.owners import Change

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.observe.events import Event

OWNER, OTHER = Identity.from_secret(b"1" * 32), Identity.from_secret(b"2" * 32)
RUN = seal(Manifest(name="verse", model={"model_type": "llama"}), OWNER)
FIRST = propose(RUN, 1, [Change(at=40, rounds=60)], OWNER)
SECOND = propose(RUN, 2, [Change(at=40, rounds=60), Change(at=50, paused=True)], OWNER)
OTHERWISE = propose(RUN, 3, [Change(at=40, rounds=90)], OWNER)


class Node:
    """At round `number`."""

    def __init__(self, path: Path | None = None, number: int = 0, identity: Identity = OWNER) -> None:
        self.number, self.told = number, cast("list[Event]", [])
        self.run = AmendedRun(RUN, path, lambda: self.number, self.told.append)
        own = OwnHeartbeat(identity, RUN.run_id, lambda: (Standing(number, 0, 0.0), "training"), tuple, clock=lambda: 1e9)
        self.gossip = Gossip(Membership(identity.peer_id, RUN.run_id), own, random.Random(0), self.run)

    @property
    def codes(self) -> list[str]:
        return [event.code for event in self.told if isinstance(event, Troubled)]


def test_what_one_knows_the_other_learns_by_gossip() -> None:
    one, other = Node(), Node(identity=OTHER)
    one.run.learn(FIRST)
    question = other.gossip.question(0.0)
    answer, _ = one.gossip.reply(OTHER.peer_id, question, 0.0)
    assert other.gossip.learn(OWNER.peer_id, answer, 0.0).faults == 0
    assert goal(other.run.sealed) == 60
    assert other.told == [Amended(40, "rounds 60")]
    other.gossip.learn(OWNER.peer_id, answer, 1.0)
    assert len(other.told) == 1, "told once"


def test_what_is_not_valid_is_the_carriers_fault() -> None:
    node = Node()
    message = Node().gossip.question(0.0)
    message.amendments = b"nothing"
    assert node.gossip.learn(PeerId("somebody"), message, 0.0).faults == 1
    assert node.run.raw == b""
    with pytest.raises(ProtocolError):
        node.run.learn(b"nothing")


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST), (SECOND,)])
def test_all_come_to_the_same_in_whatever_order_they_hear(order: tuple[bytes, ...]) -> None:
    node = Node()
    for raw in order:
        node.run.learn(raw)
    assert node.run.raw == SECOND


def test_what_is_in_force_is_not_taken_back() -> None:
    early, late = Node(number=39), Node(number=40)
    for node in (early, late):
        node.run.learn(FIRST)
        node.run.learn(OTHERWISE)
        node.run.learn(OTHERWISE)
    assert (early.run.raw, late.run.raw) == (OTHERWISE, FIRST)
    assert (early.codes, late.codes) == ([], ["NLC-162"]), "told once"
    assert goal(late.run.sealed) == 60


async def test_it_lies_in_the_data_directory_and_what_the_owner_leaves_there_is_followed(
    tmp_path: Path, autojump_clock: object
) -> None:
    path = tmp_path / "amendments"
    node = Node(path)
    node.run.learn(FIRST)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run.run)
        await trio.testing.wait_all_tasks_blocked(0.01)
        while not path.exists() or path.read_bytes() != FIRST:  # noqa: ASYNC110 - a thread writes it
            await trio.sleep(1)
        assert Node(path).run.raw == FIRST, "a node that is started again knows it"
        path.write_bytes(SECOND)
        while node.run.raw != SECOND:  # noqa: ASYNC110 - a thread reads it
            await trio.sleep(1)
        path.write_bytes(b"damaged")
        while not node.codes:  # noqa: ASYNC110 - the same
            await trio.sleep(1)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert node.codes == ["NLC-108"], "told once"
    assert node.run.raw == SECOND
    with pytest.raises(DataDirError, match="cannot be parsed"):
        Node(path)


def test_further_addresses_are_kept_and_what_is_none_is_left_out() -> None:
    node = Node()
    good = f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER.peer_id}"
    node.run.learn(propose(RUN, 1, [Change(at=0, bootstrap=("nonsense", good))], OWNER))
    assert node.run.contacts == [(OTHER.peer_id, (good,))]
