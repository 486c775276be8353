"""Finding a run over real sockets: two meshes that meet, a bootstrap that knows nothing but the DHT, false records."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from nolocod.errors import ManifestError, NoBootstrapError, UsageError, WrongRunError
from nolocod.identity import Identity
from nolocod.observe.events import Event, PartitionHealed, RunFound, Troubled
from nolocod.p2p.discovery.bootstrap import Contact, Discovery, find_run
from nolocod.p2p.discovery.kademlia import PROTOCOL, Dht, look_up, open_dht
from nolocod.p2p.discovery.run_info import serve_info
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.membership.gossip_service import GossipService
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import GOSSIP, INFO
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, Sealed, seal, unseal
from nolocod.units import Address
from tests.support.wires import ENOUGH, until, wait_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

QUICK = Timing(heartbeat=0.1, live=6.0, eager=1.0, bootstrap=3.0, search=0.5, widen=3.0, lookup=1.0)
LOOPBACK = (Address("127.0.0.1", 0),)


def a_run(name: str = "test") -> Sealed:
    return seal(Manifest(name=name, model={"model_type": "llama"}), Identity.generate())


def silent(event: Event) -> None:
    """What a host tells is not asked for here."""


@dataclass
class Node:
    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    timing: Timing = QUICK
    identity: Identity = field(default_factory=Identity.generate)
    events: list[Event] = field(default_factory=list)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Mesh]:
        self.data_dir.mkdir(exist_ok=True)
        config = MeshSettings(data_dir=self.data_dir, bootstrap=self.bootstrap, listen=LOOPBACK, upnp=False)
        async with open_mesh(config, self.identity, self.events.append, rng=random.Random(7), timing=self.timing) as mesh:
            yield mesh

    async def enter(self, mesh: Mesh, run: Sealed) -> None:
        await mesh.enter(run, lambda: (Standing(5, 100, 2.5), "training"))

    def troubles(self) -> set[str]:
        return {event.code for event in self.events if isinstance(event, Troubled)}


@asynccontextmanager
async def stranger(run: Sealed) -> AsyncIterator[tuple[Host, Dht]]:
    """A libp2p node that serves the DHT, and is in no run of ours."""
    async with open_host(Identity.generate(), LOOPBACK, (), silent) as host, open_dht(host, run.run_id) as dht:
        yield host, dht


@dataclass
class Speaker:
    """A node of which only gossip runs, so that it meets whom the test says."""

    host: Host
    table: Membership
    gossip: GossipService
    events: list[Event]

    @property
    def contact(self) -> Contact:
        return self.host.own, self.host.announced


async def speaker(stack: AsyncExitStack, nursery: trio.Nursery, run: Sealed) -> Speaker:
    identity, events = Identity.generate(), list[Event]()
    host = await stack.enter_async_context(open_host(identity, LOOPBACK, (), events.append))
    table = Membership(identity.peer_id, run.run_id, QUICK)
    own_heartbeat = OwnHeartbeat(identity, run.run_id, lambda: (Standing(5, 100, 2.5), "training"), lambda: host.announced)
    gossip = GossipService(host, table, own_heartbeat, random.Random(7), QUICK, events.append)
    host.serve(GOSSIP, gossip.handle)
    nursery.start_soon(gossip.run, nursery)
    return Speaker(host, table, gossip, events)


async def test_two_meshes_of_three_are_one_after_one_look_at_a_bootstrap() -> None:
    run = a_run()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        left, right = [[await speaker(stack, nursery, run) for _ in range(3)] for _ in "lr"]
        for first, *others in (left, right):
            for other in others:
                await other.gossip.contact(*first.contact)
        everybody = [*left, *right]
        await until(lambda: all(one.table.settled(trio.current_time()) and len(one.table) == 2 for one in everybody))
        seeker = left[2]
        discovery = Discovery(
            seeker.gossip, [right[0].contact], lambda: (), random.Random(7), replace(QUICK, search=0.1), silent
        )
        nursery.start_soon(discovery.run, lambda: [one.contact for one in left[:2]])
        await until(lambda: all(len(one.table) == 5 for one in everybody))
        healed = [event for one in everybody for event in one.events if isinstance(event, PartitionHealed)]
        assert {event.peer_id for event in healed} >= {right[0].host.own}
        assert all(2 <= event.members <= 3 for event in healed)
        nursery.cancel_scope.cancel()


async def test_a_bootstrap_that_left_the_run_still_leads_to_it_by_the_dht(tmp_path: Path) -> None:
    run = a_run()
    async with stranger(a_run("another")) as (stale, _), AsyncExitStack() as stack:
        addresses = tuple(f"{address}/p2p/{stale.own}" for address in stale.announced)
        first, second = Node(tmp_path / "a", addresses), Node(tmp_path / "b", addresses)
        ann = await stack.enter_async_context(first.open())
        await first.enter(ann, run)
        assert first.troubles() == {NoBootstrapError.entry.code}
        bob = await stack.enter_async_context(second.open())
        await second.enter(bob, run)
        await until(lambda: len(ann.live()) == len(bob.live()) == 1)


async def test_a_newcomer_that_knows_the_run_by_name_gets_it_through_the_dht(tmp_path: Path) -> None:
    run = a_run()
    async with stranger(a_run("another")) as (stale, _), AsyncExitStack() as stack:
        addresses = tuple(f"{address}/p2p/{stale.own}" for address in stale.announced)
        member = Node(tmp_path / "a", addresses)
        mesh = await stack.enter_async_context(member.open())
        await member.enter(mesh, run)
        identity = Identity.generate()
        newcomer = await stack.enter_async_context(open_host(identity, LOOPBACK, (), silent))
        contacts = [(stale.own, stale.announced)]
        assert await find_run(newcomer, contacts, Terms(identity, run.run_id, ENOUGH), ENOUGH, silent) == run
        with pytest.raises(NoBootstrapError, match="does not know the protocol"):
            await find_run(newcomer, contacts, Terms(identity, None, 1.0), 1.0, silent)


@asynccontextmanager
async def informant(run: Sealed, claimed: str = "", delay: float = 0.0) -> AsyncIterator[Host]:
    """A node that answers newcomers, after `delay` seconds, that its run is `run`, and has the id `claimed`."""
    identity = Identity.generate()
    terms = Terms(identity, None, ENOUGH)

    async def inform(stream: Stream) -> None:
        await trio.sleep(delay)
        about = pb.Body(info=pb.Info(manifest=run.to_bytes()), run_id=claimed or run.run_id)

        async def reply(_: pb.Body) -> pb.Body:
            return about

        await answer(stream, terms, "info_request", reply)

    async with open_host(identity, LOOPBACK, (), silent) as host:
        host.serve(INFO, inform)
        yield host


@dataclass
class Asked:
    """What a newcomer gets out of its contacts; `told` are the events."""

    identity: Identity
    newcomer: Host
    contacts: list[Contact]
    told: list[Event] = field(default_factory=list)

    async def find(self, run_id: str, seconds: float = ENOUGH) -> Sealed:
        terms = Terms(self.identity, run_id or None, ENOUGH)
        with trio.fail_after(ENOUGH):
            return await find_run(self.newcomer, self.contacts, terms, seconds, self.told.append)


@asynccontextmanager
async def asked(*informants: Any) -> AsyncIterator[Asked]:  # noqa: ANN401 - context managers of hosts
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(one) for one in informants]
        identity = Identity.generate()
        newcomer = await stack.enter_async_context(open_host(identity, LOOPBACK, (), silent))
        yield Asked(identity, newcomer, [(host.own, host.announced) for host in hosts])


@pytest.mark.parametrize("digits", [12, 64])
async def test_a_bootstrap_of_another_run_is_named_and_the_others_are_asked_on(digits: int) -> None:
    """However late the honest one answers."""
    run, other = a_run("ours"), a_run("theirs")
    async with asked(informant(other), informant(run, delay=0.3)) as here:
        assert await here.find(run.run_id[:digits]) == run
        (trouble,) = here.told
        assert isinstance(trouble, Troubled)
        assert trouble.code == WrongRunError.entry.code
        (liar, (address, *_)), _ = here.contacts
        for text in (address, liar[-8:], run.run_id[:12], other.run_id[:12]):
            assert text in trouble.message


async def test_where_all_bootstraps_are_of_another_run_the_join_ends_with_it() -> None:
    run, others = a_run("ours"), [a_run("theirs"), a_run("its")]
    async with asked(*map(informant, others)) as here:
        with pytest.raises(WrongRunError, match=run.run_id[:12]):
            await here.find(run.run_id)


async def test_without_a_run_asked_for_the_first_word_counts_and_its_speaker_is_told() -> None:
    run = a_run("ours")
    async with asked(informant(run), informant(a_run("theirs"), delay=1.0)) as here:
        assert await here.find("") == run
        assert here.told == [RunFound(run.run_id, "ours", here.contacts[0][0])]


async def test_an_ambiguous_beginning_of_a_runs_id_is_told() -> None:
    """Nobody makes two of twelve equal digits for a test: the beginning is shorter here."""
    run = a_run("ours")
    while (other := a_run("theirs")).run_id[0] != run.run_id[0]:
        pass
    async with asked(informant(run), informant(other, delay=0.2)) as here:
        with pytest.raises(UsageError, match="several runs") as caught:
            await here.find(run.run_id[0])
        assert run.run_id in caught.value.cause
        assert other.run_id in caught.value.cause


async def test_a_run_id_that_is_not_the_manifests_is_an_altered_manifest() -> None:
    """Neither by the id that it claims nor by the manifest that it hands over does such a node bring in a newcomer."""
    run, claimed = a_run("ours"), a_run("theirs").run_id
    async with asked(informant(run, claimed)) as here:
        for wanted in ("", run.run_id, claimed):
            with pytest.raises(ManifestError, match=f"is in run {claimed[:12]!r}, but sends the manifest of {run.run_id[:12]}"):
                await here.find(wanted)


async def test_a_node_names_the_run_of_the_manifest_that_it_hands_over() -> None:
    run, identity = a_run(), Identity.generate()
    async with open_host(identity, LOOPBACK, (), silent) as host, asked() as here:
        host.serve(INFO, lambda stream: serve_info(stream, Terms(identity, run.run_id, ENOUGH), run))
        stream = await here.newcomer.open_stream(host.own, INFO, host.announced)
        body = await ask(stream, pb.Body(info_request=pb.InfoRequest()), Terms(here.identity, None, ENOUGH), "info")
        assert body.run_id == unseal(body.info.manifest).run_id == run.run_id


async def test_a_client_of_the_dht_provides_and_asks_and_serves_nothing() -> None:
    run = a_run()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(open_host(Identity.generate(), LOOPBACK, (), silent))
        await stack.enter_async_context(open_dht(server, run.run_id))
        client = await stack.enter_async_context(open_host(Identity.generate(), LOOPBACK, (), silent))
        public = False
        dht = await stack.enter_async_context(open_dht(client, run.run_id, lambda: public))
        await client.connect(server.own, server.announced)
        await dht.refresh([(server.own, server.announced)])
        asker = await stack.enter_async_context(open_host(Identity.generate(), LOOPBACK, (), silent))
        await asker.connect(server.own, server.announced)
        with trio.fail_after(ENOUGH):
            while not (found := await look_up(asker, server.own, run.run_id)):  # noqa: ASYNC110  # the server takes its time
                await trio.sleep(0.05)
        assert client.announced[0] in {address.partition("/p2p/")[0] for address in found[client.own]}
        assert PROTOCOL not in (await server.identify(client.own)).protocols
        public = True
        await dht.switch_mode()
        assert PROTOCOL in (await server.identify(client.own)).protocols, "reachable by now"


async def test_who_can_be_reached_serves_the_dht_long_before_it_looks_there_again() -> None:
    """A node knows it some seconds after its first look, and the next one is ten minutes later."""
    run = a_run()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        one, other = [await speaker(stack, nursery, run) for _ in range(2)]
        public = False
        timing = replace(QUICK, search=0.1, widen=0.1, lookup=600.0)
        discovery = Discovery(one.gossip, [], lambda: (), random.Random(7), timing, silent)
        discovery.dht = await stack.enter_async_context(open_dht(one.host, run.run_id, lambda: public))
        await other.host.connect(*one.contact)
        nursery.start_soon(discovery.run, lambda: [other.contact])
        await trio.sleep(0.5)  # the first look is over
        assert PROTOCOL not in (await other.host.identify(one.host.own)).protocols
        public = True
        with trio.fail_after(ENOUGH):
            while PROTOCOL not in (await other.host.identify(one.host.own)).protocols:  # noqa: ASYNC110  # it goes round
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


async def test_false_records_are_tried_and_make_nobody_a_member(tmp_path: Path) -> None:
    run = a_run()
    async with stranger(run) as (liar, dht), AsyncExitStack() as stack:
        await dht.refresh([])  # it says of itself that it is in the run
        addresses = tuple(f"{address}/p2p/{liar.own}" for address in liar.announced)
        node = Node(tmp_path / "a", addresses, replace(QUICK, search=0.2))
        mesh = await stack.enter_async_context(node.open())
        await node.enter(mesh, run)
        other = Node(tmp_path / "b", mesh.addresses)
        await other.enter(await stack.enter_async_context(other.open()), run)
        members = await wait_members(mesh, 1)
        assert [member.peer_id for member in members] == [other.identity.peer_id]
