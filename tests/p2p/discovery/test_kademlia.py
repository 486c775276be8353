"""What others leave with us in the DHT: bounded, and no false record keeps a true one out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from nolocod.p2p.discovery.kademlia import provider_key
from nolocod.p2p.libp2p_patches import Providers
from nolocod.run.manifest import RunId

if TYPE_CHECKING:
    from libp2p.abc import IHost

OWN = provider_key(RunId("ab" * 32))


class Host:
    def get_id(self) -> ID:
        return ID(b"own")


def store() -> ProviderStore:
    made = ProviderStore(cast("IHost", Host()))
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
        records.add_provider(number.to_bytes(34, "big"), provider(1))
    assert len(records.providers) == 512
    assert len(records.get_providers(OWN)) == 20
    assert records.get_providers((1999).to_bytes(34, "big"))
    assert not records.get_providers((1).to_bytes(34, "big"))
