"""Dial-backs between real hosts: what is dialled, what is refused, and what a node concludes."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.autonat.autonat import AutoNATService
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from nolocod.errors import PeerUnavailableError, RefusedError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.address_groups import source
from nolocod.p2p.nat.autonat import AUTONAT, AutoNatLimits, AutoNatServer, ask
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.nat.reachability import Reachability, ReachTiming
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.identify import IDENTIFY, Observation
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nolocod.observe.events import ReachFound
    from nolocod.p2p.transport.stream import Stream

LIMITS = HostLimits(connect=ENOUGH, negotiate=ENOUGH, progress=ENOUGH, linger=0.5)
QUICK = ReachTiming(first=0.1, look=0.02, again=0.1, interval=0.2)
OFTEN = AutoNatLimits(per_peer=1000, per_address=1000, in_all=1000)
CONFIG = MeshSettings(data_dir=Path("/nonexistent"), upnp=False)


@asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    """Hosts on loopback addresses of their own: 127.0.0.1, 127.0.0.2, ..."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                open_host(Identity.generate(), [Address(f"127.0.0.{number + 1}", 0)], (), lambda _: None, LIMITS)
            )
            for number in range(count)
        ]


async def deafen(host: Host) -> None:
    """As a firewall does: nobody can dial `host` any more, though it still can dial others."""
    for listener in list(host.basic.get_network().listeners.values()):
        await listener.close()


async def question(asker: Host, helper: Host, addresses: list[str], about: PeerId | None = None) -> Message:
    """The answer to a question made by hand."""
    stream = await asker.open_stream(helper.own, AUTONAT, helper.local)
    message = Message(type=Message.DIAL)
    message.dial.peer.id = ID.from_string(about or asker.own).to_bytes()
    message.dial.peer.addrs.extend(Multiaddr(text).to_bytes() for text in addresses)
    await send_message(stream, message)
    answer = await receive_message(stream, Message, 1000)
    await stream.close()
    return answer


async def test_a_helper_tells_where_it_got_through() -> None:
    async with hosts(2) as (ann, bob):
        AutoNatServer(bob)
        await ann.connect(bob.own, bob.local)
        closed = ann.local[0].rpartition("/")[0] + "/1"
        found = await ask(ann, bob.own, [closed, *ann.local])
        assert found is not None
        assert (found.observer, found.host, found.dialled) == ("127.0.0.2", "127.0.0.1", ann.local[0])
        assert bob.peers() == {ann.own: "inbound"}, "the dial left no connection behind"
        assert ann.faults == bob.faults == 0
        await deafen(ann)
        found = await ask(ann, bob.own, ann.local)
        assert found is not None
        assert found.dialled is None


async def test_only_the_host_that_asks_is_dialled() -> None:
    """Not another address, though it is on the same machine, and no name."""
    async with hosts(3) as (ann, bob, victim):
        AutoNatServer(bob)
        met: list[object] = []

        async def meet(stream: object, address: object) -> None:
            met.append(address)

        victim.basic.get_network()._handle_inbound_connection = meet
        for addresses in ([*victim.local], ["/dns4/localhost/tcp/4001"], []):
            answer = await question(ann, bob, addresses)
            assert answer.dialResponse.status == Message.E_DIAL_REFUSED, addresses
        assert await ask(ann, bob.own, victim.local) is None
        here, bob.local = bob.local, ("/ip4/192.168.1.2/tcp/4001",)
        answer = await question(ann, bob, list(ann.local))
        assert answer.dialResponse.status == Message.E_DIAL_REFUSED, "loopback is not of Bob's network: he does not say no"
        bob.local = here
        assert met == []
        with pytest.raises(PeerUnavailableError), trio.fail_after(ENOUGH):
            await ann.probe(victim.own, victim.local[0])
        assert met, "it would have been seen"


async def test_a_question_about_another_peer_is_refused() -> None:
    async with hosts(3) as (ann, bob, carol):
        AutoNatServer(bob)
        answer = await question(ann, bob, list(ann.local), about=carol.own)
        assert answer.dialResponse.status == Message.E_BAD_REQUEST


async def test_questions_are_rationed_per_peer_and_in_all() -> None:
    async with hosts(3) as (ann, bob, carol):
        AutoNatServer(bob, replace(AutoNatLimits(), per_peer=2, in_all=3))

        async def status(asker: Host) -> int:
            return int((await question(asker, bob, list(asker.local))).dialResponse.status)

        assert [await status(ann) for _ in range(3)] == [Message.OK, Message.OK, Message.E_DIAL_REFUSED]
        assert [await status(carol) for _ in range(2)] == [Message.OK, Message.E_DIAL_REFUSED]


async def test_questions_are_rationed_per_address_however_many_peers_ask_from_it() -> None:
    async with hosts(1) as (helper,), AsyncExitStack() as stack:
        at_home = [open_host(Identity.generate(), [Address("127.0.0.9", 0)], (), lambda _: None, LIMITS) for _ in range(3)]
        askers = [await stack.enter_async_context(one) for one in at_home]
        AutoNatServer(helper, replace(AutoNatLimits(), per_peer=1, per_address=2))
        found = [(await question(asker, helper, list(asker.local))).dialResponse.status for asker in askers]
        assert found == [Message.OK, Message.OK, Message.E_DIAL_REFUSED]


async def test_one_address_group_has_its_share_of_questions_and_no_more() -> None:
    async with hosts(1) as (helper,):
        asked = [(PeerId(f"peer {number}"), f"203.0.113.{number}") for number in range(30)]
        server = AutoNatServer(helper)
        assert sum(server._admit(peer, source(host), 0.0) for peer, host in asked) == 12
        assert server._admit(PeerId("another"), source("198.51.100.1"), 0.0)


async def test_no_minute_has_more_questions_than_are_allowed_and_a_refused_one_costs_its_peer_nothing() -> None:
    async with hosts(1) as (helper,):
        server = AutoNatServer(helper, AutoNatLimits(per_peer=2, per_address=3, in_all=4))

        def admitted(now: float, *askers: tuple[str, str]) -> list[bool]:
            return [server._admit(PeerId(peer), address, now) for peer, address in askers]

        assert admitted(0.0, ("ann", "home"), ("ann", "home"), ("ann", "home")) == [True, True, False]
        assert admitted(59.0, ("ann", "home"), ("bob", "home"), ("carol", "home")) == [False, True, False]
        assert admitted(59.0, ("carol", "office"), ("dave", "elsewhere"), ("dave", "elsewhere")) == [True, False, False]
        assert admitted(60.0, ("dave", "elsewhere"), ("dave", "elsewhere"), ("ann", "home")) == [True, True, False]


async def test_one_question_of_a_peer_at_a_time_and_at_most_four_addresses() -> None:
    async with hosts(2) as (ann, bob), trio.open_nursery() as nursery:
        AutoNatServer(bob, OFTEN)
        await ann.connect(bob.own, bob.local)
        dialled: list[str] = []
        gate = trio.Event()
        probe = bob.probe

        async def slow(peer: PeerId, address: str) -> None:
            dialled.append(address)
            await gate.wait()
            await probe(peer, address)

        bob.probe = slow  # type: ignore[method-assign]
        found: list[Message] = []

        async def first() -> None:
            found.append(await question(ann, bob, [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 9)]))

        nursery.start_soon(first)
        await until(lambda: dialled)
        assert (await question(ann, bob, list(ann.local))).dialResponse.status == Message.E_DIAL_REFUSED
        gate.set()
        await until(lambda: found)
        assert found[0].dialResponse.status == Message.E_DIAL_ERROR
        assert sorted(dialled) == [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 5)]


async def test_who_comes_through_a_relay_is_not_dialled() -> None:
    async with hosts(3) as (ann, relay, bob):
        AutoNatServer(bob)
        Relay(relay).serve()
        clients = [RelayClient(ann), RelayClient(bob)]
        for client in clients:
            client.serve()
        for end in (ann, bob):
            await end.connect(relay.own, relay.local)
        await clients[1].reserve(relay.own)
        await clients[0].connect(relay.own, bob.own)
        assert ann.peers()[bob.own] == "relayed"
        answer = await question(ann, bob, list(ann.local))
        assert answer.dialResponse.status == Message.E_DIAL_REFUSED
        assert await ask(ann, bob.own, ann.local) is None


async def test_nonsense_costs_its_sender_the_stream_only() -> None:
    async with hosts(2) as (ann, bob):
        AutoNatServer(bob)
        for nonsense in (b"\xff\xff\xff\xff\xff", b"\x80\x80\x01", b"\x03abc"):
            stream = await ann.open_stream(bob.own, AUTONAT, bob.local)
            await stream.write(nonsense)
            with pytest.raises(PeerUnavailableError):
                await stream.read_exactly(1)
        assert bob.faults == 3
        assert (await question(ann, bob, list(ann.local))).dialResponse.status == Message.OK


async def test_a_question_has_to_come_to_its_end() -> None:
    async with hosts(2) as (ann, bob):
        AutoNatServer(bob, replace(AutoNatLimits(), question=0.3))
        stream = await ann.open_stream(bob.own, AUTONAT, bob.local)
        await stream.write(b"\x40")
        with suppress(PeerUnavailableError):
            for _ in range(20):
                await stream.write(b"x")  # never too slow, and never done
                await trio.sleep(0.1)
        assert bob.faults == 1


async def test_a_helper_cannot_make_us_believe_in_an_address_that_we_did_not_name() -> None:
    async with hosts(2) as (ann, bob):

        async def lie(stream: object) -> None:
            await receive_message(stream, Message, 1000)  # type: ignore[arg-type]
            answer = Message(type=Message.DIAL_RESPONSE)
            answer.dialResponse.status = Message.OK
            answer.dialResponse.addr = Multiaddr("/ip4/192.0.2.66/tcp/1").to_bytes()
            await send_message(stream, answer)  # type: ignore[arg-type]

        bob.serve(AUTONAT, lie)
        await ann.connect(bob.own, bob.local)
        assert await ask(ann, bob.own, ann.local) is None


async def test_libp2p_as_it_is_shipped_asks_and_answers() -> None:
    stock = new_host(key_pair=create_new_key_pair())
    async with hosts(1) as (ann,), stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        service = AutoNATService(stock)
        AutoNatServer(ann)
        peer = PeerId(str(stock.get_id()))
        await stock.connect(PeerInfo(ID.from_string(ann.own), [Multiaddr(ann.local[0])]))
        listening = [address.decapsulate("/p2p") for address in stock.get_addrs()]
        status, dialled = await service.query_server(ID.from_string(ann.own), [one.to_bytes() for one in listening])
        assert (status, Multiaddr(dialled or b"")) == (Message.OK, listening[0])
        found = await ask(ann, peer, ann.local)
        assert found is not None
        assert found.dialled == ann.local[0]


async def test_who_knows_no_autonat_refuses() -> None:
    async with hosts(2) as (ann, bob):
        await ann.connect(bob.own, bob.local)
        with pytest.raises(RefusedError):
            await ask(ann, bob.own, ann.local)


# --- what a node concludes ------------------------------------------------------------------------------


@asynccontextmanager
async def reaching(
    host: Host, config: MeshSettings = CONFIG, timing: ReachTiming = QUICK
) -> AsyncIterator[tuple[Reachability, list[ReachFound]]]:
    events: list[ReachFound] = []
    reach = Reachability(host, config, events.append, random.Random(0), timing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reach.run)
        yield reach, events
        nursery.cancel_scope.cancel()


async def test_a_node_that_is_dialled_back_is_public_until_that_fails_twice() -> None:
    async with hosts(4) as (ann, *helpers), reaching(ann) as (reach, events):
        for helper in helpers:
            AutoNatServer(helper, OFTEN)
        assert reach.kind is None
        for helper in helpers:
            await ann.connect(helper.own, helper.local)
        await until(lambda: reach.kind == "public")
        assert f"dialled us at {ann.local[0]}" in reach.why
        await deafen(ann)
        await until(lambda: reach.kind == "cone" and "3 peers could not dial us, and 3 see us at 127.0.0.1" in reach.why)
        assert [kind for kind, _ in groupby(event.kind for event in events)] == [None, "public", "cone"]
        assert events[-1].addresses == ann.addresses


async def test_another_address_is_asked_about_at_once() -> None:
    rarely = replace(QUICK, again=1000.0, interval=1000.0)
    async with hosts(2) as (ann, bob), reaching(ann, timing=rarely) as (reach, events):
        asked: list[PeerId] = []
        server = AutoNatServer(bob, OFTEN)

        async def answer(stream: Stream) -> None:
            asked.append(stream.remote)
            await server.handle(stream)

        bob.serve(AUTONAT, answer)
        await ann.connect(bob.own, bob.local)
        await until(lambda: reach.kind == "public")
        assert len(asked) == 1
        port = int(ann.local[0].rpartition("/")[2])
        ann.announce([Address("127.0.0.1", port), Address("127.0.0.9", port)])  # as when a network interface comes up
        await until(lambda: len(asked) == 2)
        await until(lambda: len(events[-1].addresses) == 2)
        assert reach.kind == "public"


async def test_one_bootstrap_is_enough_to_find_out_that_a_node_is_public() -> None:
    async with hosts(2) as (ann, bob), reaching(ann) as (reach, _), reaching(bob) as (other, _):
        await ann.connect(bob.own, bob.local)
        await until(lambda: reach.kind == other.kind == "public")


async def test_who_was_too_busy_to_tell_what_it_sees_is_asked_again() -> None:
    async with hosts(3) as (ann, *helpers):
        asked: Counter[PeerId] = Counter()

        async def fail(stream: Stream) -> None:
            asked[stream.remote] += 1
            await stream.reset()

        await deafen(ann)
        for helper in helpers:
            helper.serve(IDENTIFY, fail)
            AutoNatServer(helper, OFTEN)
            await ann.connect(helper.own, helper.local)
        await until(lambda: asked[ann.own] == len(helpers))
        assert not ann.observed
        for helper in helpers:
            helper.serve(IDENTIFY, helper._tell_who_we_are)
        async with reaching(ann) as (reach, _):
            await until(lambda: reach.kind == "cone")


async def test_one_helper_cannot_tell_the_kind_of_nat() -> None:
    async with hosts(2) as (ann, bob), reaching(ann) as (reach, _):
        AutoNatServer(bob, OFTEN)
        await deafen(ann)
        await ann.connect(bob.own, bob.local)
        await until(lambda: "1 peer could not dial us" in reach.why)
        assert reach.kind is None


async def test_helpers_that_know_no_autonat_are_asked_once_and_what_they_see_counts() -> None:
    async with hosts(3) as (ann, bob, carol), reaching(ann) as (reach, _):
        for helper in (bob, carol):
            await ann.connect(helper.own, helper.local)
        await until(lambda: len(ann.observed) == 2)
        await until(lambda: len(reach._no_autonat) == 2)
        assert reach.kind is None, "nobody tried, and there is no NAT in sight"


async def test_no_relay_and_no_way_in_makes_a_client_until_there_is_a_relay() -> None:
    config = replace(CONFIG, relaying=Relaying(use=False))
    async with hosts(3) as (ann, *helpers), reaching(ann, config) as (reach, _):
        await deafen(ann)
        for helper in helpers:
            AutoNatServer(helper, OFTEN)
            await ann.connect(helper.own, helper.local)
        await until(lambda: reach.kind == "client")
        assert "--no-relay forbids" in reach.why


async def test_relays_only_is_no_question_and_answers_none() -> None:
    config = replace(CONFIG, relaying=Relaying(only=True))
    async with hosts(2) as (ann, bob), reaching(ann, config) as (reach, _):
        await until(lambda: reach.kind == "symmetric")
        await bob.connect(ann.own, ann.local)
        with pytest.raises(RefusedError):
            await ask(bob, ann.own, bob.local)


async def test_what_is_announced_is_what_helpers_are_asked_about() -> None:
    config = replace(CONFIG, announce=("/ip4/127.0.0.1/tcp/1",))
    async with hosts(2) as (ann, bob), reaching(ann, config) as (reach, _):
        AutoNatServer(bob, OFTEN)
        await ann.connect(bob.own, bob.local)
        await until(lambda: "1 peer could not dial it" in reach.why)
        assert reach.kind == "public"


async def test_one_who_tells_another_tale_each_time_does_not_make_us_begin_anew() -> None:
    async with hosts(1) as (ann,):
        reach = Reachability(ann, CONFIG, lambda _: None, random.Random(0), QUICK)

        def see(number: int, host: str) -> None:
            observer = f"/ip4/203.0.113.{number}/tcp/1"
            ann.observed[PeerId(str(number))] = Observation(f"/ip4/{host}/tcp/9", True, trio.current_time(), observer)

        for number in (1, 2):
            see(number, "198.51.100.7")
        before = reach._surroundings()
        for tale in range(3):
            see(66, f"192.0.2.{tale}")
            assert reach._surroundings() == before
        for number in (1, 2):
            see(number, "198.51.100.8")
        assert reach._surroundings() != before, "what most see counts"
