"""Connections without a network: two ends of a socket pair, secured and multiplexed by ours or by libp2p's own classes.

And `until`, for what no test of the network is told.
"""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as StockNoise
from libp2p.stream_muxer.yamux.yamux import Yamux as StockYamux

from nolocod.p2p.limits.bandwidth import Meter, Unmetered
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.transport.connection import Connection, Origin
from nolocod.p2p.transport.endpoints import CircuitEndpoint, TcpEndpoint
from nolocod.p2p.transport.noise import NoiseTransport, SecureChannel
from nolocod.p2p.transport.yamux import Yamux
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.crypto.keys import KeyPair

    from nolocod.p2p.mesh import Mesh
    from nolocod.p2p.settings import MeshSettings
    from nolocod.p2p.transport.buffers import HeldMemory
    from nolocod.p2p.transport.yamux_limits import MuxLimits
    from nolocod.proto.types import Member

PROGRESS = 2.0
ENOUGH = 60.0
"""Seconds that a busy machine may take for anything here: where a test waits for longer, what it waits for does not come."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody tells of: it happens in libp2p, or in another node."""
    with trio.fail_after(ENOUGH):
        while not condition():  # noqa: ASYNC110  # see above
            await trio.sleep(0.01)


_HOLDERS: list[socket.socket] = []


def own_port() -> int:
    """A port of 127.0.0.1 for listeners of this process, one after the other: the system gives it to nobody else.

    A socket that is bound and does not listen holds it; it is in no way of one that may reuse addresses, as all here may.
    """
    holder = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
    holder.bind(("127.0.0.1", 0))
    _HOLDERS.append(holder)
    return int(holder.getsockname()[1])


def public(settings: MeshSettings) -> MeshSettings:
    """The same, of a node that says that everybody reaches it: it serves the DHT."""
    port = own_port()
    return replace(settings, listen=(Address("127.0.0.1", port),), announce=(f"/ip4/127.0.0.1/tcp/{port}",))


async def wait_members(mesh: Mesh, count: int = 1) -> list[Member]:
    """Wait until `mesh` has `count` live members, for less than a slow heartbeat takes (60 s); return those that it has."""
    with trio.move_on_after(ENOUGH / 2):
        while len(mesh.live()) < count:  # noqa: ASYNC110  # see above
            await trio.sleep(0.01)
    return mesh.live()


@dataclass(frozen=True)
class Stack:
    """What one side is made of."""

    noise: str = "ours"
    yamux: str = "ours"
    meter: Meter | None = None
    limits: MuxLimits | None = None
    memory: HeldMemory | None = None

    def __str__(self) -> str:
        return f"{self.noise}-{self.yamux}"


OURS = Stack()
STOCK = Stack("stock", "stock")


@dataclass
class Side:
    socket: trio.SocketStream
    keys: KeyPair
    channel: Any
    muxed: Any = None


def raw(stream: trio.SocketStream, initiator: bool) -> Connection:
    return Connection(TcpEndpoint(stream), initiator, Origin("direct" if initiator else "inbound"))


def transport(stack: Stack, keys: KeyPair) -> Any:  # noqa: ANN401  # libp2p has no types that mypy follows
    if stack.noise == "stock":
        return StockNoise(keys, create_new_x25519_key_pair().private_key)
    return NoiseTransport(keys, PROGRESS, stack.meter or Unmetered(), ConnectionGater())


async def socket_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    left, right = trio.socket.socketpair()
    return trio.SocketStream(left), trio.SocketStream(right)


async def channels(dialer: Stack = OURS, listener: Stack = OURS) -> tuple[Side, Side]:
    """Two ends that have shaken hands."""
    sockets = await socket_pair()
    sides = [Side(socket, create_new_key_pair(), None) for socket in sockets]

    async def dial() -> None:
        way = transport(dialer, sides[0].keys)
        peer = ID.from_pubkey(sides[1].keys.public_key)
        sides[0].channel = await way.secure_outbound(raw(sockets[0], True), peer)

    async def listen() -> None:
        way = transport(listener, sides[1].keys)
        sides[1].channel = await way.secure_inbound(raw(sockets[1], False))

    with trio.fail_after(ENOUGH):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            nursery.start_soon(listen)
    return sides[0], sides[1]


def muxer(stack: Stack, channel: Any) -> Any:  # noqa: ANN401
    peer = channel.get_remote_peer()
    if stack.yamux == "stock":
        return StockYamux(channel, peer, is_initiator=channel.is_initiator)
    assert isinstance(channel, SecureChannel)
    return Yamux(channel, peer, stack.limits, stack.memory)


@asynccontextmanager
async def connections(dialer: Stack = OURS, listener: Stack = OURS) -> AsyncIterator[tuple[Any, Any]]:
    """Two multiplexed connections that run."""
    sides = await channels(dialer, listener)
    async with trio.open_nursery() as nursery:
        for side, stack in zip(sides, (dialer, listener), strict=True):
            side.muxed = muxer(stack, side.channel)
            nursery.start_soon(side.muxed.start)
            await side.muxed.event_started.wait()
        yield sides[0].muxed, sides[1].muxed
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            for side in sides:
                await side.muxed.close()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def circuits(dialer: Stack = OURS, listener: Stack = OURS) -> AsyncIterator[tuple[Yamux, Yamux]]:
    """Two connections of ours that lie on the two ends of one stream of another connection."""
    async with connections(dialer, listener) as (ann, bob), trio.open_nursery() as nursery:
        streams = [await ann.open_stream(), await bob.accept_stream()]
        keys = [create_new_key_pair(), create_new_key_pair()]
        found: list[Yamux] = []

        async def upgrade(number: int, stack: Stack) -> None:
            on = Connection(CircuitEndpoint(streams[number]), number == 0, Origin("relayed"))
            way = transport(stack, keys[number])
            peer = ID.from_pubkey(keys[1].public_key)
            channel = await (way.secure_inbound(on) if number else way.secure_outbound(on, peer))
            found.append(muxer(stack, channel))

        with trio.fail_after(ENOUGH):
            async with trio.open_nursery() as upgrading:
                upgrading.start_soon(upgrade, 0, dialer)
                upgrading.start_soon(upgrade, 1, listener)
        found.sort(key=lambda muxed: not muxed.is_initiator)
        for muxed in found:
            nursery.start_soon(muxed.start)
            await muxed.event_started.wait()
        yield found[0], found[1]
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            for muxed in found:
                await muxed.close()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def against_frames(stack: Stack = OURS) -> AsyncIterator[tuple[Yamux, SecureChannel]]:
    """A connection of ours, and the other end bare, for frames made by hand. Ours listens."""
    dialled, ours = await channels(OURS, stack)
    async with trio.open_nursery() as nursery:
        muxed = muxer(stack, ours.channel)
        nursery.start_soon(muxed.start)
        await muxed.event_started.wait()
        yield muxed, dialled.channel
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await muxed.close()
            await dialled.channel.close()
        nursery.cancel_scope.cancel()
