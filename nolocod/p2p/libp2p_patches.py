"""What py-libp2p 0.8.1 does that we replace, switch off or bound: one function each, with the reason.

The rule: no other module of ours sets an attribute of libp2p's objects or touches a private one. Each function has a test in
tests/p2p/test_libp2p_patches.py that fails once libp2p does without it: then both go.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.exceptions import IncompleteReadError, IOException
from libp2p.kad_dht import common, kad_dht, peer_routing, provider_store, value_store
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from nolocod.p2p.limits.newest import Newest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from libp2p.abc import INetConn, INetStream
    from libp2p.host.basic_host import BasicHost
    from libp2p.kad_dht.kad_dht import KadDHT
    from libp2p.network.swarm import Swarm
    from libp2p.stream_muxer.muxer_multistream import MuxerMultistream

    Handle = Callable[[INetStream], Awaitable[None]]

MAX_LINE = 1024
"""Bytes of a line of multistream-select, as in js-libp2p: names of protocols."""
_MOST_ID = 64
"""Bytes of a peer id; the longest that there are have 42. What is longer names nobody."""
_MOST_KEYS = 512
"""Keys of others for which we keep the DHT's records."""
_MOST_RECORDS = 20
"""Of one key: libp2p's own bound."""
_MOST_OF_PROVIDER = 4
"""Keys under which one provider has records: a node is in one run."""


# --- logs ---------------------------------------------------------------------------------------------


def quiet_libraries() -> None:
    """libp2p logs every peer's failure as an error of ours, hundreds a minute; some of that with the root logger itself, which
    gives it a handler where it has none: then each line of our own log, that begins later, would be there twice."""
    for name in ("libp2p", "multiaddr", "async_service"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    root = logging.getLogger()
    if _not_from_libp2p not in root.filters:
        root.addFilter(_not_from_libp2p)
        root.addHandler(logging.NullHandler())


def _not_from_libp2p(record: logging.LogRecord) -> bool:
    return "/libp2p/" not in record.pathname


# --- the swarm ----------------------------------------------------------------------------------------


def offer_only(swarm: Swarm, muxer: MuxerMultistream) -> None:
    """`new_host` ignores the class that `muxer_opt` names for yamux."""
    swarm.upgrader.muxer_multistream = muxer


def prefer(swarm: Swarm, best: Callable[[Sequence[INetConn], ID], INetConn]) -> None:
    """Of several connections to a peer libp2p uses the one with most streams, though it may be dead."""
    swarm._select_connection = best


def dial_with(swarm: Swarm, dial: Callable[[ID], Awaitable[list[INetConn]]]) -> None:
    """libp2p tries one TCP address of a peer, remembers a failure for a minute, and leaves from a port of chance."""
    swarm.dial_peer = dial


def accept_with(swarm: Swarm, accept: Callable[[Any, Multiaddr], Awaitable[None]]) -> None:
    """libp2p keeps the task and the slot of an inbound connection until the host stops: after `max_connections` of them in
    its whole life a node would accept no more."""
    swarm._handle_inbound_connection = accept


async def never_dial_unasked(swarm: Swarm) -> None:
    """The auto connector dials whomever the peer store names."""
    await swarm.auto_connector.stop()


def forget_disconnected(swarm: Swarm, peer: ID) -> None:
    """The auto connector, though stopped, notes for ever when each peer was lost."""
    swarm.auto_connector.record_successful_connection(peer)


async def stop_listening(swarm: Swarm) -> None:
    """A host that is closed goes on listening."""
    for listener in list(swarm.listeners.values()):
        await listener.close()


# --- the host -----------------------------------------------------------------------------------------


def announce_with(host: BasicHost, addresses: Callable[[], Iterable[str]]) -> None:
    """libp2p announces wildcards as they are; of a circuit it makes an address of the relay with our name, so `addresses`
    are without them."""
    host._addrs_factory = lambda _: [Multiaddr(text) for text in addresses()]


def never_identify(host: BasicHost) -> None:
    """libp2p keeps what each peer says of itself, up to a megabyte unasked, until the host stops; we ask (identify.py)."""
    host._schedule_identify = lambda *_, **__: None
    host.remove_stream_handler(ID_PUSH)


def contain_streams(host: BasicHost, contained: Callable[[Handle], Handle]) -> None:
    """Whatever a negotiation or a handler of libp2p's raises ends the host: KeyError for one that is removed meanwhile, as the
    DHT's is behind a NAT, or what the peer's bytes bring about."""
    swarm = host.get_network()
    swarm.set_stream_handler(contained(swarm.common_stream_handler))


def bound_lengths() -> None:
    """libp2p believes the length in front of a line of multistream-select, up to 2^64 bytes, and that the line is text;
    and it writes ids of any length in base58, which takes minutes for 250 kB."""
    MultiselectCommunicator.read = _read_line
    ID.base58 = _BASE58


_WRITTEN = ID.base58.func
_BASE58 = cached_property(lambda self: _WRITTEN(ID(self.to_bytes()[:_MOST_ID])))
_BASE58.__set_name__(ID, "base58")


async def _read_line(self: MultiselectCommunicator) -> str:
    try:
        line = str(await read_varint_prefixed_bytes_limited(self.read_writer, MAX_LINE), "utf-8")
    except (ParseError, IOException, UnicodeDecodeError) as error:
        raise MultiselectCommunicatorError("what came is no line of multistream-select") from error
    if not line.endswith("\n"):
        raise MultiselectCommunicatorError("a line without an end")
    return line[:-1]


# --- the DHT ------------------------------------------------------------------------------------------


def own_dht(protocol: str, most: int, most_of_question: int) -> None:
    """libp2p's DHT speaks to the public network under its id whatever prefix it is given, and believes messages of 4 MiB where
    `most` bytes are plenty, and as many addresses in a question as go in: about a millisecond for each KiB."""
    for module in (common, kad_dht, peer_routing, provider_store, value_store):
        module.PROTOCOL_ID = TProtocol(protocol)
    kad_dht.MAX_DHT_MESSAGE_SIZE, peer_routing.MAX_DHT_MESSAGE_SIZE = most_of_question, most
    kad_dht.read_varint_prefixed_bytes_limited = _read_question


async def _read_question(stream: INetStream, most: int) -> bytes:
    """One of each stream, as ours ask: on one stream libp2p answers any number, as fast as they come."""
    if getattr(stream, "was_asked", False):
        raise IncompleteReadError("one question was answered")
    stream.was_asked = True
    return bytes(await read_varint_prefixed_bytes_limited(stream, most))


def bound_dht(kad: KadDHT, handle: Callable[[Any], Awaitable[None]], own: bytes) -> None:
    """The DHT's streams know no deadline (`handle` has one), and its store takes any number of keys; of those, `own` never
    makes room for others here."""
    kad.handle_stream = handle
    kad.provider_store.providers = Providers(own)


class _Records(Newest[str, object]):
    """The providers of one key. libp2p takes no other for two days once there are 20: so a few who come first with false
    records would shut out all true ones. It is told of one less, and the oldest goes. One provider has records under a few
    keys of `store`: for the next, that under its oldest goes."""

    def __init__(self, store: Providers) -> None:
        super().__init__(_MOST_RECORDS)
        self._store = store

    def __len__(self) -> int:
        return min(super().__len__(), _MOST_RECORDS - 1)

    def __setitem__(self, provider: str, record: object) -> None:
        super().__setitem__(provider, record)
        held = [key for key, records in self._store.items() if provider in records]
        if len(held) > _MOST_OF_PROVIDER:
            oldest = self._store[held[0]]
            del oldest[provider]
            if not oldest:
                del self._store[held[0]]


class Providers(Newest[bytes, dict[str, object]]):
    """The records that others leave with us, by key, as libp2p's store keeps them."""

    def __init__(self, own: bytes) -> None:
        super().__init__(_MOST_KEYS, own)

    def __setitem__(self, key: bytes, _: dict[str, object]) -> None:
        super().__setitem__(key, _Records(self))  # the store sets none but empty ones
