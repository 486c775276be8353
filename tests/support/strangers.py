"""Ends of connections made by hand, layer by layer, for bytes that no honest node sends.

As on the wire: multistream-select, noise, multistream-select, yamux, and multistream-select again on each stream. What is
honest here goes as far as the caller wants, and from there on the bytes are the caller's.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from nolocod.p2p.transport.noise import SecureChannel
from nolocod.p2p.transport.yamux import Yamux
from tests.support.wires import OURS, raw, transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nolocod.identity import Identity, PeerId
    from nolocod.p2p.transport.connection import Connection

HELLO_TEXT, NOISE, YAMUX = b"/multistream/1.0.0", b"/noise", b"/yamux/1.0.0"


def varint(number: int) -> bytes:
    """Of any size, also of sizes that no reader takes."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def line(text: bytes) -> bytes:
    """As multistream-select sends it."""
    return varint(len(text) + 1) + text + b"\n"


HELLO = line(HELLO_TEXT)


@dataclass
class Stranger:
    """One side of a TCP connection whose other side is a host under test."""

    socket: trio.SocketStream
    identity: Identity
    initiator: bool

    async def exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = await self.socket.receive_some(count - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    async def agree(self) -> None:
        """On noise."""
        await self.socket.send_all(HELLO + line(NOISE))
        await self.exactly(len(HELLO + line(NOISE)))

    def connection(self) -> Connection:
        """As the handshake wants it."""
        return raw(self.socket, self.initiator)

    async def secured(self, other: PeerId, *, agreed: bool = False) -> SecureChannel:
        """An honest handshake, agreement included."""
        if not agreed:
            await self.agree()
        way = transport(OURS, create_new_key_pair(self.identity.secret))
        if self.initiator:
            found = await way.secure_outbound(self.connection(), ID.from_string(other))
        else:
            found = await way.secure_inbound(self.connection())
        assert isinstance(found, SecureChannel)
        return found

    @asynccontextmanager
    async def muxed(self, other: PeerId) -> AsyncIterator[Yamux]:
        """An honest connection of which nobody serves the streams."""
        async with self.muxed_on(await self.secured(other)) as muxed:
            yield muxed

    @asynccontextmanager
    async def muxed_on(self, channel: SecureChannel) -> AsyncIterator[Yamux]:
        """The same on a channel that is there."""
        await channel.write(HELLO + line(YAMUX))
        left = len(HELLO + line(YAMUX))
        while left:
            left -= len(await channel.read(left))
        async with trio.open_nursery() as nursery:
            muxed = Yamux(channel, channel.get_remote_peer())
            nursery.start_soon(muxed.start)
            await muxed.event_started.wait()
            yield muxed
            await muxed.close()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def calling(port: int, identity: Identity, source: str = "127.0.0.1") -> AsyncIterator[Stranger]:
    """Dial 127.0.0.1:`port` from the address `source`."""
    dialled = trio.socket.socket()
    await dialled.bind((source, 0))
    await dialled.connect(("127.0.0.1", port))
    async with trio.SocketStream(dialled) as stream:
        yield Stranger(stream, identity, True)


@asynccontextmanager
async def answering(
    identity: Identity, answer: Callable[[Stranger], Awaitable[None]], place: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Listen at `place`, and give each who comes to `answer`; the multiaddr."""

    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            await answer(Stranger(stream, identity, False))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, handle, 0, host=place))
        yield f"/ip4/{place}/tcp/{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()
