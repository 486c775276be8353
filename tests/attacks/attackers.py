"""What the standing attack suite does to a node: each attack is one of `ATTACKS`, and goes on until it is cancelled.

The rule: attackers have free identities and one address, each attack another. They speak the product's protocols as far as an
attack needs it, and whatever the node answers, they come again.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID

from nolocod.errors import RemoteError
from nolocod.identity import Identity
from nolocod.p2p.discovery.kademlia import PROTOCOL, look_up, provider_key
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.nat import autonat
from nolocod.p2p.nat.circuit_relay import RelayClient
from nolocod.p2p.transport.delimited import send_message
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, PING, SNAPSHOT
from nolocod.p2p.transport.yamux_frames import Flag, Kind, pack
from nolocod.proto import envelope
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import standing_to_wire
from nolocod.proto.framing import envelope_head
from nolocod.proto.types import Standing
from nolocod.units import Address
from tests.support.strangers import HELLO, NOISE, YAMUX, calling, line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nolocod.identity import PeerId
    from nolocod.run.manifest import RunId

    Attack = Callable[["Target"], Awaitable[None]]

SIDES = 8
"""Attackers at the same time."""
_HELD = 64
"""Connections or streams that one of them holds."""
_LOST = (RemoteError, OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)
"""What a node does to an attacker."""


@dataclass
class Target:
    """The attacked node, and how often it was reached."""

    peer: PeerId
    address: str
    port: int
    http: Address
    run_id: RunId
    place: str = "127.0.0.1"
    """Where attackers come from."""
    done: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def terms(self, identity: Identity) -> Terms:
        return Terms(identity, self.run_id, 5.0)


@asynccontextmanager
async def attacker(target: Target, identity: Identity | None = None) -> AsyncIterator[Host]:
    async with open_host(identity or Identity.generate(), (Address(target.place, 0),), (), lambda _: None) as host:
        yield host


def heartbeat(identity: Identity, run_id: str, count: int) -> bytes:
    """Of a member that nobody has ever met, at an address that nobody has."""
    told = pb.Heartbeat(
        count=count,
        standing=standing_to_wire(Standing(1000, 1, 0.1)),
        state="training",
        addresses=["/ip4/203.0.113.7/tcp/4001"],
        version="1",
    )
    return envelope.seal(pb.Body(run_id=run_id, heartbeat=told), identity)


async def connections(target: Target) -> None:
    """Silent ones, held."""
    async with trio.open_nursery() as nursery:
        for _ in range(_HELD):
            nursery.start_soon(_hold, await _peer_port(target))
            target.done += 1


async def _hold(stream: trio.SocketStream) -> None:
    async with stream:
        while await stream.receive_some():
            pass


async def handshakes(target: Target) -> None:
    """Whole ones, and then nothing."""
    async with calling(target.port, Identity.generate(), target.place) as stranger, stranger.muxed(target.peer):
        target.done += 1


async def streams(target: Target) -> None:
    """Without a word on them."""
    async with attacker(target) as host:
        held = []
        while True:
            held.append(await host.open_stream(target.peer, GOSSIP, (target.address,)))
            target.done += 1


async def frames(target: Target) -> None:
    """That carry nothing, as fast as they are read."""
    async with calling(target.port, Identity.generate(), target.place) as stranger:
        channel = await stranger.secured(target.peer)
        await channel.write(HELLO + line(YAMUX))
        while True:
            await channel.write(pack(Kind.PING, Flag.ACK, 0, 0) * 1000)
            target.done += 1000


async def heartbeats(target: Target) -> None:
    """Of invented members, as many in a message as gossip takes."""
    identity = Identity.generate()
    async with attacker(target, identity) as host:
        while True:
            made = [heartbeat(Identity.generate(), target.run_id, target.rng.getrandbits(40)) for _ in range(16)]
            stream = await host.open_stream(target.peer, GOSSIP, (target.address,))
            told = pb.Body(gossip=pb.Gossip(heartbeats=made, answer=True))
            await ask(stream, told, target.terms(identity), "gossip")
            target.done += 1


async def offers(target: Target) -> None:
    """That lead to nothing: the stream stays open, and silent."""
    identity, held = Identity.generate(), []
    async with attacker(target, identity) as host:
        while True:
            stream = await host.open_stream(target.peer, EXCHANGE, (target.address,))
            body = pb.Body(
                run_id=target.run_id,
                session=target.rng.randbytes(16),
                sequence=1,
                receiver=target.peer,
                offer=pb.Offer(standing=standing_to_wire(Standing(1, 1, 5.0)), codec="modulo8/1", size=1 << 20),
            )
            raw = envelope.seal(body, identity)
            await stream.write(envelope_head(len(raw)) + raw)
            held.append(stream)
            target.done += 1


async def dht(target: Target) -> None:
    """Questions, and false records."""
    async with attacker(target) as host:
        while True:
            await host.connect(target.peer, (target.address,))
            await look_up(host, target.peer, target.run_id)
            stream = await host.open_stream(target.peer, PROTOCOL)
            liar = Message.Peer(id=ID.from_string(Identity.generate().peer_id).to_bytes())
            false = Message(type=Message.ADD_PROVIDER, key=provider_key(target.run_id), providerPeers=[liar])
            await send_message(stream, false)
            await stream.close()
            target.done += 1


async def relay(target: Target) -> None:
    """Reservations, and circuits to nobody."""
    async with attacker(target) as host:
        client = RelayClient(host)
        while True:
            await host.connect(target.peer, (target.address,))
            nobody = Identity.generate().peer_id
            for ask_for in (client.reserve, lambda relay, nobody=nobody: client.connect(relay, nobody)):
                try:
                    await ask_for(target.peer)
                except RemoteError:
                    target.done += 1


async def autonat_questions(target: Target) -> None:
    """Where nobody listens."""
    async with attacker(target) as host:
        while True:
            await host.connect(target.peer, (target.address,))
            await autonat.ask(host, target.peer, ("/ip4/127.0.0.1/tcp/1",))
            target.done += 1


async def pings(target: Target) -> None:
    """On one stream, as many as go in."""
    async with attacker(target) as host:
        stream = await host.open_stream(target.peer, PING, (target.address,))
        while True:
            await stream.write(bytes(32 * 64))
            await stream.read_exactly(32)
            target.done += 1


async def http(target: Target) -> None:
    """Questions as fast as they are answered."""
    async with await trio.open_tcp_stream(target.http.host, target.http.port) as stream:
        await stream.send_all(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while await stream.receive_some():
            pass
        target.done += 1


def trickling(open_one: Callable[[Target], Awaitable[trio.SocketStream]], content: bytes) -> Attack:
    """A byte a second of `content`, on as many connections as one attacker holds."""

    async def one(target: Target) -> None:
        async with await open_one(target) as stream:
            for byte in content:
                await stream.send_all(bytes([byte]))
                target.done += 1
                await trio.sleep(1)

    return one


async def _peer_port(target: Target) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", target.port, local_address=target.place)


async def _http_port(target: Target) -> trio.SocketStream:
    return await trio.open_tcp_stream(target.http.host, target.http.port)


async def slow_frames(target: Target) -> None:
    """An envelope's head, and then a byte a second, on a snapshot's stream."""
    async with attacker(target) as host:
        stream = await host.open_stream(target.peer, SNAPSHOT, (target.address,))
        for byte in envelope_head(4000) + bytes(4000):
            await stream.write(bytes([byte]))
            target.done += 1
            await trio.sleep(1)


async def slow_reader(target: Target) -> None:
    """Pages that are asked for again and again, and not read."""
    async with await _http_port(target) as stream:
        while True:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
            target.done += 1


ATTACKS: dict[str, Attack] = {
    "connections": connections,
    "handshakes": handshakes,
    "streams": streams,
    "frames": frames,
    "heartbeats": heartbeats,
    "offers": offers,
    "dht": dht,
    "relay": relay,
    "autonat": autonat_questions,
    "pings": pings,
    "http": http,
    "slow multistream": trickling(_peer_port, HELLO + line(NOISE)),
    "slow frames": slow_frames,
    "slow http": trickling(_http_port, b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "unread http": slow_reader,
}


async def attack(name: str, target: Target, seconds: float) -> None:
    """`SIDES` attackers at once, each of which comes again when the node is done with it."""

    async def side() -> None:
        while True:
            try:
                await ATTACKS[name](target)
            except* _LOST:
                pass
            await trio.sleep(0.05)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(SIDES):
                nursery.start_soon(side)
