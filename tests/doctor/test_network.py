"""The doctor against real meshes on loopback: a good bootstrap, and each way in which one is not."""

from __future__ import annotations

import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.doctor import examine, network, reach
from nolocod.doctor.findings import CHECKS
from nolocod.identity import Identity
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.nat.hole_punching import HolePuncher
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import requests
from nolocod.p2p.transport.multiaddrs import through
from nolocod.proto import envelope
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.units import Address
from tests.support.wires import public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.doctor.findings import Finding, Report
    from nolocod.observe.events import Event

LOOPBACK = (Address("127.0.0.1", 0),)
OWN = Identity.generate()


def a_run(name: str = "ours", owner: Identity | None = None) -> Sealed:
    """Open to all, unless an owner is named, who invites."""
    access = "invited" if owner else "open"
    return seal(Manifest(name=name, model={"model_type": "llama"}, access=access), owner or Identity.generate())


@asynccontextmanager
async def a_host(identity: Identity | None = None, gater: ConnectionGater | None = None) -> AsyncIterator[Host]:
    limits = HostLimits(connect=2.0, negotiate=2.0)
    async with open_host(identity or Identity.generate(), LOOPBACK, (), lambda _: None, limits, None, gater) as host:
        yield host


@asynccontextmanager
async def a_member(folder: Path, sealed: Sealed | None, identity: Identity | None = None) -> AsyncIterator[Mesh]:
    """A node of the run, or of none, that gives samples as the daemon does."""
    config = public(MeshSettings(folder, listen=LOOPBACK, upnp=False))
    identity = identity or Identity.generate()
    async with open_mesh(config, identity, lambda _: None, rng=random.Random(7), timing=Timing(search=0.5)) as mesh:
        if sealed is not None:
            await mesh.enter(sealed, lambda: (Standing(5, 100, 2.5), "training"))
        yield mesh


async def visited(address: str, run_id: str | None = None, gater: ConnectionGater | None = None) -> network.Visit:
    visit = network.Visit(address)
    async with a_host(OWN, gater) as host:
        await visit.go(host, OWN, run_id, [OWN.peer_id])
    return visit


def statuses(visit: network.Visit) -> list[str]:
    assert [one.code for one in visit.findings] == ["D21", "D22", "D23"]
    assert all(one.about == visit.address for one in visit.findings)
    return [one.status for one in visit.findings]


# --- bootstraps ---------------------------------------------------------------------------------------


async def test_a_good_one(tmp_path: Path) -> None:
    sealed = a_run()
    async with a_member(tmp_path, sealed) as mesh:
        visit = await visited(mesh.addresses[0], sealed.run_id)
    assert statuses(visit) == ["ok", "ok", "ok"]
    assert visit.sealed == sealed


async def test_one_that_is_off() -> None:
    visit = await visited(f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}")
    assert statuses(visit) == ["fail", "skipped", "skipped"]
    assert visit.findings[0].found == "127.0.0.1 port 1 refuses: the machine is up, but nothing listens there."


async def test_names_and_networks_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Identity.generate().peer_id
    nameless = (await visited(f"/dns4/nowhere.invalid/tcp/1/p2p/{peer}")).findings[0]
    assert (nameless.status, "cannot be resolved" in nameless.found) == ("fail", True)

    async def unreachable(_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network, "_connect_any", unreachable)
    assert "there is no route to 203.0.113.7" in (await network.tcp("/ip4/203.0.113.7/tcp/1")).found

    async def silent(_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(network, "_connect_any", silent)
    monkeypatch.setattr(network, "_CONNECT", 0.05)
    assert "a firewall drops" in (await network.tcp("/ip4/203.0.113.7/tcp/1")).found


async def test_what_is_no_address_and_what_is_our_own() -> None:
    assert statuses(await visited("203.0.113.7:4001")) == ["fail", "skipped", "skipped"]
    ours = await visited(f"/ip4/127.0.0.1/tcp/1/p2p/{OWN.peer_id}")
    assert statuses(ours) == ["skipped", "skipped", "skipped"]
    assert "own" in ours.findings[0].found


async def test_another_peer_at_the_address() -> None:
    async with a_host() as host:
        visit = await visited(host.addresses[0].replace(host.own, Identity.generate().peer_id))
    assert statuses(visit) == ["ok", "fail", "skipped"]
    assert "another peer" in visit.findings[1].found


@pytest.mark.parametrize(
    ("says", "found"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a libp2p node"), (b"", "sends nothing")]
)
async def test_what_answers_is_something_else(says: bytes, found: str) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        if says:
            await stream.send_all(says)
            await stream.aclose()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        visit = await visited(f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}")
        nursery.cancel_scope.cancel()
    assert statuses(visit) == ["ok", "fail", "skipped"]
    assert found in visit.findings[1].found


async def test_another_run(tmp_path: Path) -> None:
    ours = a_run()
    async with a_member(tmp_path, a_run("theirs")) as mesh:
        visit = await visited(mesh.addresses[0], ours.run_id)
    assert statuses(visit) == ["ok", "ok", "fail"]
    assert visit.findings[2].found.startswith("it is in another run: ")
    assert not visit.good


async def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = envelope.seal

    def seal_as_newer(body: envelope.pb.Body, identity: Identity) -> bytes:
        made = envelope.pb.Envelope.FromString(ours(body, identity))
        made.major = 1 if identity == OWN else 2
        return made.SerializeToString()

    monkeypatch.setattr(requests, "seal", seal_as_newer)
    async with a_member(tmp_path, a_run()) as mesh:
        visit = await visited(mesh.addresses[0])
    assert statuses(visit) == ["ok", "ok", "fail"]
    assert "2.0" in visit.findings[2].found


async def test_a_node_that_is_in_no_run(tmp_path: Path) -> None:
    async with a_member(tmp_path, None) as mesh:
        visit = await visited(mesh.addresses[0])
    assert statuses(visit) == ["ok", "ok", "fail"]
    assert "in a run (yet)" in visit.findings[2].found


async def test_another_network_key_and_an_allow_list() -> None:
    async with a_host(gater=ConnectionGater(prologue=bytes(32))) as host:
        keyless = await visited(host.addresses[0])
    assert statuses(keyless) == ["ok", "fail", "skipped"]
    assert (keyless.findings[1].error, "--network-key" in keyless.findings[1].remedy) == ("NLC-210", True)
    async with a_host(gater=ConnectionGater(allowed=frozenset())) as host:
        unknown = await visited(host.addresses[0])
    refused = next(one for one in unknown.findings if one.status == "fail")
    assert (refused.error, "nolocod id" in refused.remedy) == ("NLC-211", True)
    beside_a_node = network.combined([unknown], beside_node=True)
    assert {one.status for one in beside_a_node} == {"ok", "skipped"}


async def test_where_one_is_good_the_others_failures_are_warnings(tmp_path: Path) -> None:
    dead = await visited(f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}")
    async with a_member(tmp_path, a_run()) as mesh:
        good = await visited(mesh.addresses[0])
    assert [one.status for one in network.combined([dead, good])] == ["warn", "skipped", "skipped", "ok", "ok", "ok"]
    assert [one.status for one in network.combined([dead])] == ["fail", "skipped", "skipped"]


# --- what members tell --------------------------------------------------------------------------------


async def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = a_run()
    now = time.time
    async with a_member(tmp_path, sealed) as mesh, a_host(OWN) as host:
        peer, address = mesh.addresses[0].rpartition("/p2p/")[2], mesh.addresses[0]
        await host.connect(peer, [address.rpartition("/p2p/")[0]])
        for offset, status in ((0.0, "ok"), (100.0, "warn"), (-100.0, "warn"), (1000.0, "fail")):
            monkeypatch.setattr(network.time, "time", lambda offset=offset: now() - offset)
            found = await network.members(host, peer, sealed, OWN)
            monkeypatch.setattr(network.time, "time", now)
            assert found[0].peer == peer
            finding = network.clock([found[0].offset])
            assert finding.status == status, finding
            assert ("behind" in finding.found) == (offset > 0)
        assert not mesh.live(), "who only looks is no member"
    assert network.clock([]).status == "skipped"


async def test_the_dht_tells_who_is_in_the_run(tmp_path: Path) -> None:
    sealed = a_run()
    async with a_member(tmp_path, sealed) as mesh, a_host(OWN) as host:
        peer = mesh.addresses[0].rpartition("/p2p/")[2]
        await host.connect(peer, [mesh.addresses[0].rpartition("/p2p/")[0]])
        assert (await network.dht(host, [peer], sealed)).status == "ok"
        assert OWN.peer_id not in await look_up(host, peer, sealed.run_id)
    async with a_host() as deaf, a_host(OWN) as host:
        await host.connect(deaf.own, deaf.announced)
        assert (await network.dht(host, [deaf.own], sealed)).status == "skipped", "it is not known to be reachable"


# --- reach --------------------------------------------------------------------------------------------


async def test_a_relays_place_and_a_punch() -> None:
    events: list[Event] = []
    async with a_host() as middle, a_host() as helper, a_host(OWN) as host:
        client = reach.prepare(host, events)
        await host.connect(middle.own, middle.announced)
        assert (await reach.relay(host, client, [middle.own], None)).status == "warn", "it does not relay"
        Relay(middle).serve()
        assert (await reach.relay(host, client, [middle.own], None)).status == "ok"
        assert (await reach.relay(host, client, [middle.own], "public")).status == "skipped"
        RelayClient(helper).serve()
        HolePuncher(helper, lambda _: None).serve()
        await helper.connect(middle.own, middle.announced)
        await RelayClient(helper).reserve(middle.own)
        circuit = through(middle.own, middle.announced[0])
        member = network.Member(helper.own, (circuit,), "cone", 0.0)
        assert (await reach.punch(host, [replace(member, addresses=())], events, None)).status == "skipped"
        assert (await reach.punch(host, [member], events, "cone")).status == "ok"
        assert host.straight(helper.own)


# --- all together -------------------------------------------------------------------------------------


def listed(report: Report) -> dict[str, Finding]:
    return {one.code: one for one in report.findings}


async def test_a_whole_look_at_a_good_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trio.lowlevel.open_process
    monkeypatch.setattr(trio.lowlevel, "open_process", lambda command, **options: real([command[0], "-c", ""], **options))
    sealed = a_run()
    async with a_member(tmp_path, sealed) as mesh:
        config = MeshSettings(tmp_path / "b", bootstrap=mesh.addresses[:1], listen=LOOPBACK, upnp=False)
        found = listed(await examine.examine(config, lambda _: None))
        beside = {code: (found[code].status, found[code].found) for code in CHECKS if code > "D20"}
        for code in ("D21", "D22", "D23", "D24", "D25", "D26"):
            assert beside[code][0] == "ok", beside
        for code in ("D27", "D28", "D29"):
            assert beside[code][0] == "skipped", beside
        assert not mesh.live(), "who only looks is no member"
    assert not (tmp_path / "b").exists()


async def test_a_look_at_a_run_that_one_must_be_invited_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trio.lowlevel.open_process
    monkeypatch.setattr(trio.lowlevel, "open_process", lambda command, **options: real([command[0], "-c", ""], **options))
    owner = Identity.generate()
    sealed = a_run(owner=owner)
    async with a_member(tmp_path, sealed, owner) as mesh:
        config = MeshSettings(tmp_path / "b", bootstrap=mesh.addresses[:1], listen=LOOPBACK, upnp=False)
        found = listed(await examine.examine(config, lambda _: None))
    assert [found[code].status for code in ("D21", "D22", "D23", "D25")] == ["ok"] * 4, found
    assert (found["D24"].status, "members only" in found["D24"].found) == ("skipped", True), found["D24"]
