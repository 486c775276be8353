"""What gossip and discovery keep in mind and whom they ask, over a host that connects to nobody."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, cast

import pytest
import trio

from nolocod.errors import BannedError, ClonedIdentityError, PeerUnavailableError, ProtocolError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Troubled
from nolocod.p2p.discovery.bootstrap import Contact, Discovery
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.gossip_service import GossipService
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.requests import Terms, answer
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import open_envelope, seal
from nolocod.proto.types import Standing
from nolocod.run.manifest import RunId
from tests.support.sim_net import Net

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.observe.events import Emit, Event
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

OWN = Identity.from_secret(bytes(32))
OURS = 5 << 32
"""Our life."""
BOOTSTRAP: Contact = (PeerId("bootstrap"), ("/ip4/192.0.2.1/tcp/1",))
REMEMBERED: list[Contact] = [(PeerId(f"peer {n}"), (f"/ip4/192.0.2.2/tcp/{n}",)) for n in range(1, 201)]


class EmptyHost:
    """Nobody is connected, nobody answers."""

    def __init__(self) -> None:
        self.asked: list[PeerId] = []
        self.faults = 0

    def peers(self) -> dict[PeerId, str]:
        return {}

    async def open_stream(self, peer: PeerId, protocol: str, addresses: Sequence[str] = ()) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(peer)
        raise PeerUnavailableError("nobody answers.")


def own_heartbeat_of(identity: Identity) -> OwnHeartbeat:
    return OwnHeartbeat(identity, "run", lambda: (Standing(0, 0, 0.0), "training"), tuple, clock=lambda: 1e9)


def gossip_over(host: EmptyHost, emit: Emit = lambda _event: None) -> GossipService:
    table = Membership(OWN.peer_id, "run")
    return GossipService(cast("Host", host), table, own_heartbeat_of(OWN), random.Random(0), Timing(), emit)


async def test_peers_that_asked_once_are_not_kept_in_mind(virtual_clock: object) -> None:
    gossip = gossip_over(EmptyHost())
    gossip.heard_directly = dict.fromkeys((PeerId(f"peer {n}") for n in range(1000)), 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gossip.run, nursery)
        await trio.sleep(2 * Timing().heartbeat)
        nursery.cancel_scope.cancel()
    assert gossip.heard_directly == {}


async def test_a_banned_member_is_left_alone_without_a_word_at_every_heartbeat(virtual_clock: object) -> None:
    host, other = EmptyHost(), Identity.generate()
    events: list[Event] = []
    gossip = gossip_over(host, events.append)
    gossip._table.ban = lambda peer: BannedError("it is banned.") if peer == other.peer_id else None
    gossip._table.heard(own_heartbeat_of(other).heartbeat(), trio.current_time(), 1e9)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gossip.run, nursery)
        await trio.sleep(3 * Timing().heartbeat)
        nursery.cancel_scope.cancel()
    assert gossip._table.among([other.peer_id]) == {other.peer_id}
    assert (host.asked, events) == ([], [])


def of_friend(number: int) -> pb.Gossip:
    """What a friend tells of a node with our key that began after us, as its `number`-th life."""
    heartbeat = pb.Heartbeat(count=number, life=OURS + number, other=OURS, standing=pb.Standing(round=1), state="training")
    return pb.Gossip(heartbeats=[seal(pb.Body(run_id="run", heartbeat=heartbeat), OWN)])


async def test_each_clone_that_comes_later_is_told_once(virtual_clock: object) -> None:
    events: list[Event] = []
    gossip = gossip_over(EmptyHost(), events.append)
    gossip._own_heartbeat.life = OURS
    friend = PeerId("friend")
    for number in (1, 1, 2, 2):
        gossip._take(friend, gossip._gossip.learn(friend, of_friend(number), trio.current_time()))
    assert [event.code for event in events if isinstance(event, Troubled)] == [ClonedIdentityError.entry.code] * 2
    assert not gossip.cloned.is_set()


async def test_who_answers_gossip_with_something_else_is_judged(virtual_clock: object) -> None:
    other = Identity.generate()
    judged: list[tuple[PeerId, Conduct]] = []
    async with trio.open_nursery() as nursery:
        net = Net(nursery, [])
        gossip = gossip_over(EmptyHost())
        gossip.judge = lambda peer, conduct: judged.append((peer, conduct))
        dial = net.dial(OWN.peer_id)

        async def open_stream(peer: PeerId, protocol: str, _addresses: Sequence[str] = ()) -> Stream:
            return await dial(peer, protocol)

        gossip._host.open_stream = open_stream  # type: ignore[method-assign]
        terms = Terms(other, RunId("run"), 5.0)

        async def evil(stream: Stream) -> None:
            async def reply(_: pb.Body) -> pb.Body:
                return pb.Body(info_request=pb.InfoRequest())

            await answer(stream, terms, "gossip", reply)

        net.handlers[other.peer_id, GOSSIP] = evil
        with pytest.raises(ProtocolError, match="sent info_request where gossip was due"):
            await gossip.contact(other.peer_id, ())
        nursery.cancel_scope.cancel()
    assert judged == [(other.peer_id, Conduct.BROKE_PROTOCOL)]


async def test_every_look_for_members_asks_the_bootstraps(virtual_clock: object) -> None:
    remembered = [*REMEMBERED, BOOTSTRAP]
    for known, others in ([], 8), ([REMEMBERED[0]], 1):
        host, timing = EmptyHost(), Timing(search=1.0, widen=1.0)
        discovery = Discovery(gossip_over(host), [BOOTSTRAP], lambda: remembered, random.Random(0), timing, lambda _event: None)
        with trio.move_on_after(1.5):
            await discovery.run(lambda known=known: known)  # type: ignore[misc]  # a list of contacts
        assert host.asked.count(BOOTSTRAP[0]) == 1
        assert len(host.asked) == 1 + others
        assert REMEMBERED[0][0] not in host.asked or not known


async def test_a_node_that_loses_all_members_looks_for_them_at_once(virtual_clock: object) -> None:
    host, timing = EmptyHost(), Timing(search=1.0, widen=600.0)
    discovery = Discovery(gossip_over(host), [BOOTSTRAP], list, random.Random(0), timing, lambda _event: None)
    known = [REMEMBERED[0]]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.run, lambda: known)
        await trio.sleep(60.0)
        before = len(host.asked)
        known.clear()
        await trio.sleep(2.0)
        assert len(host.asked) > before
        nursery.cancel_scope.cancel()


async def test_who_leaves_says_so_until_it_is_gone() -> None:
    timing = Timing()
    table = Membership(OWN.peer_id, "run", timing)
    gossip = GossipService(cast("Host", EmptyHost()), table, own_heartbeat_of(OWN), random.Random(1), timing, lambda _: None)
    await gossip.leave(1.0)
    gossip._gossip.beat(trio.current_time())  # the next is due before it is gone
    (said,) = gossip._gossip.question(trio.current_time()).heartbeats
    assert open_envelope(said, run_id="run", receiver="").heartbeat.state == "leaving"


@pytest.mark.parametrize(("answered", "contacted"), [(True, 1), (False, 5)])
def test_where_few_of_those_heard_of_answer_more_are_contacted_at_a_beat(answered: bool, contacted: int) -> None:
    """Else invented members keep a node from finding those that are there."""
    table = Membership(OWN.peer_id, "run")
    for _ in range(16):
        table.heard(own_heartbeat_of(Identity.generate()).heartbeat(), 0.0, 1e9)
    table.answers.extend([answered] * 32)
    assert len(Gossip(table, own_heartbeat_of(OWN), random.Random(0)).targets(1.0, ())) == contacted
