"""What others leave with us in the DHT: bounded, and no false record keeps a true one out."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from nolocod.errors import PeerUnavailableError
from nolocod.identity import Identity
from nolocod.p2p.discovery.kademlia import PROTOCOL, look_up, open_dht, provider_key
from nolocod.p2p.host import open_host
from nolocod.p2p.libp2p_patches import Providers
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.run.manifest import RunId
from nolocod.units import Address
from tests.support.wires import ENOUGH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from libp2p.abc import IHost

    from nolocod.p2p.discovery.kademlia import Dht
    from nolocod.p2p.host import Host

OWN = provider_key(RunId("ab" * 32))
LOOPBACK = (Address("127.0.0.1", 0),)


class Ours:
    def get_id(self) -> ID:
        return ID(b"own")


def store() -> ProviderStore:
    made = ProviderStore(cast("IHost", Ours()))
    made.providers = Providers(OWN)
    return made


def provider(number: int) -> PeerInfo:
    key = create_new_key_pair(number.to_bytes(32, "big")).public_key
    return PeerInfo(ID.from_pubkey(key), [Multiaddr(f"/ip4/192.0.2.{number % 250 + 1}/tcp/4001")])


def test_the_records_of_the_dht_are_so_many_and_newer_ones_get_in() -> None:
    records = store()
    for number in range(1, 41):
        records.add_provider(OWN, provider(number))
    found = {str(info.peer_id) for info in records.get_providers(OWN)}
    assert found == {str(provider(number).peer_id) for number in range(21, 41)}
    records.add_provider(OWN, provider(21))  # told again: the newest now
    records.add_provider(OWN, provider(41))
    assert str(provider(21).peer_id) in {str(info.peer_id) for info in records.get_providers(OWN)}
    for number in range(2000):
        records.add_provider(number.to_bytes(34, "big"), provider(100 + number))
    assert len(records.providers) == 512
    assert len(records.get_providers(OWN)) == 20
    assert records.get_providers((1999).to_bytes(34, "big"))
    assert not records.get_providers((1).to_bytes(34, "big"))


def test_one_provider_has_records_under_a_few_keys_and_shuts_nobody_out() -> None:
    records = store()
    honest = [number.to_bytes(34, "big") for number in range(100)]
    for number, key in enumerate(honest):
        records.add_provider(key, provider(number + 2))
    flood = [number.to_bytes(34, "big") for number in range(1000, 3000)]
    for key in flood:
        records.add_provider(key, provider(1))
    assert all(records.get_providers(key) for key in honest)
    assert [key for key in flood if records.get_providers(key)] == flood[-4:]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Host, Dht, Host]]:
    """A node that serves the DHT, and a stranger that is connected to it."""
    run = RunId("ab" * 32)
    async with (
        open_host(Identity.generate(), LOOPBACK, (), lambda _: None) as server,
        open_dht(server, run) as dht,
        open_host(Identity.generate(), LOOPBACK, (), lambda _: None) as stranger,
    ):
        await stranger.connect(server.own, server.announced)
        yield server, dht, stranger


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Message(type=Message.PUT_VALUE, key=b"a", record=Record(key=b"a", value=b"value")), id="a value"),
        pytest.param(Message(type=Message.PING, key=bytes(5 << 10)), id="a large question"),
    ],
)
async def test_no_value_is_taken(served: tuple[Host, Dht, Host], message: Message) -> None:
    server, dht, stranger = served
    stream = await stranger.open_stream(server.own, PROTOCOL)
    with suppress(PeerUnavailableError):  # the large one is not read to its end
        await send_message(stream, message)
    with trio.fail_after(ENOUGH), pytest.raises(PeerUnavailableError):
        await receive_message(stream, Message, 1 << 20)
    assert not dht.kad.value_store.store
    assert await look_up(stranger, server.own, RunId("ab" * 32)) == {}, "and it answers as before"


async def test_it_is_a_dht_of_our_own(served: tuple[Host, Dht, Host]) -> None:
    server, _, stranger = served
    protocols = (await stranger.identify(server.own)).protocols
    assert [name for name in protocols if "kad" in name] == [PROTOCOL]
