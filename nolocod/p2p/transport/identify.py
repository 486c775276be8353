"""Who a peer says that it is, and what it sees of us: libp2p's identify, both sides (specs/identify).

The rule: nothing here is believed. What a peer observes of us is an address to try, not one that we have. We answer
ourselves, since libp2p tells a peer that is connected straight and through a relay only of the relay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from nolocod import __version__
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.multiaddrs import MAX_ADDRESS, dialable, straight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nolocod.p2p.transport.stream import Stream

IDENTIFY = "/ipfs/id/1.0.0"
_VERSION = "ipfs/0.1.0"
_AGENT = f"nolocod/{__version__}"
_MOST_BYTES = 64 << 10
_MOST_ADDRESSES = 32
_MOST_PROTOCOLS = 256
_ANSWER = 10.0


@dataclass(frozen=True)
class Identified:
    """What a peer tells: the address that it sees us at, its own addresses and protocols."""

    observed: str | None
    listen: tuple[str, ...]
    protocols: frozenset[str]


@dataclass(frozen=True)
class Observation:
    """What a peer that is connected straight sees us as, `at` in trio's time."""

    address: str
    from_listen_port: bool
    at: float
    observer: str | None = None
    """The multiaddr that it comes from, or is dialled at."""


async def ask(stream: Stream) -> Identified:
    """Read the one message of an identify stream. Raises RemoteError."""
    with deadline(_ANSWER, "a peer's word about itself"):
        message = await receive_message(stream, Identify, _MOST_BYTES)
    listen = [text for text in await texts_of(message.listen_addrs[:_MOST_ADDRESSES]) if dialable(text)]
    observed = readable(message.observed_addr)
    return Identified(
        observed if observed and straight(observed) else None, tuple(listen), frozenset(message.protocols[:_MOST_PROTOCOLS])
    )


async def answer(
    stream: Stream, public_key: bytes, addresses: Iterable[str], protocols: Iterable[str], observed: str | None
) -> None:
    """Tell `stream`'s peer who we are (`public_key` as libp2p's protobuf), and where we see it."""
    message = Identify(
        protocol_version=_VERSION,
        agent_version=_AGENT,
        public_key=public_key,
        listen_addrs=[Multiaddr(address).to_bytes() for address in addresses],
        observed_addr=Multiaddr(observed).to_bytes() if observed else b"",
        protocols=protocols,
    )
    await send_message(stream, message)


async def texts_of(raws: Iterable[bytes]) -> list[str]:
    """The multiaddrs among `raws`. One may take a quarter of a millisecond to read, so others have their turn after each."""
    found = dict[str, None]()
    for raw in raws:
        if text := readable(raw):
            found[text] = None
        await trio.lowlevel.checkpoint()
    return list(found)


def readable(raw: bytes) -> str | None:
    """A multiaddr's text; None for what is none, or too long."""
    try:
        return str(Multiaddr(raw)) if 0 < len(raw) <= MAX_ADDRESS else None
    except (MultiaddrError, ValueError):
        return None
