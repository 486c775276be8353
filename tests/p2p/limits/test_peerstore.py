"""What libp2p notes of peers stays within bounds, whoever tells it what."""

from __future__ import annotations

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError, create_signed_peer_record
from multiaddr import Multiaddr

from nolocod.identity import Identity
from nolocod.p2p.host import open_host
from nolocod.p2p.limits.peerstore import MOST_ADDRESSES, MOST_PEERS, MOST_RECORD, BoundedStore
from nolocod.units import Address

HERE = Multiaddr("/ip4/203.0.113.7/tcp/4001")


def told(store: BoundedStore, count: int = 1, addresses: int = 1) -> list[ID]:
    """Signed records of `count` strangers, as a DHT's server passes them on."""
    found = []
    for _ in range(count):
        keys = create_new_key_pair()
        found.append(ID.from_pubkey(keys.public_key))
        listed = [Multiaddr(f"/ip4/203.0.113.7/tcp/{4001 + port}") for port in range(addresses)]
        assert store.consume_peer_record(create_signed_peer_record(found[-1], listed, keys.private_key), 7200)
    return found


def test_those_told_of_last_are_kept_and_nobody_else() -> None:
    store = BoundedStore(most=4)
    first, second, *_ = told(store, 4)
    store.add_addrs(first, [HERE], 60)
    fresh = told(store, 2)
    assert set(store.peer_ids()) == set(store.peer_record_map) | {first}
    assert len(store.peer_ids()) == 4
    assert {first, *fresh} < set(store.peer_ids())
    assert second not in store.peer_ids()
    assert second not in store.peer_record_map


def test_our_own_keys_are_never_forgotten() -> None:
    keys = create_new_key_pair()
    own, store = ID.from_pubkey(keys.public_key), BoundedStore(most=3)
    store.add_key_pair(own, keys)
    told(store, 10)
    assert store.privkey(own) is keys.private_key
    assert len(store.peer_ids()) == 3


def test_a_peer_has_so_many_addresses_and_no_record_of_any_size() -> None:
    store = BoundedStore()
    (peer,) = told(store, addresses=3 * MOST_ADDRESSES)
    assert len(store.addrs(peer)) == MOST_ADDRESSES
    store.add_addrs(peer, [HERE, *(Multiaddr(f"/ip4/203.0.113.8/tcp/{port}") for port in range(1, 40))], 60)
    assert len(store.addrs(peer)) == MOST_ADDRESSES
    keys = create_new_key_pair()
    large = [Multiaddr(f"/ip4/203.0.113.7/tcp/{port}") for port in range(1, MOST_RECORD // 8)]
    record = create_signed_peer_record(ID.from_pubkey(keys.public_key), large, keys.private_key)
    assert not store.consume_peer_record(record, 7200)
    with pytest.raises(PeerStoreError):
        store.addrs(ID.from_pubkey(keys.public_key))


def test_where_a_peer_was_told_to_be_last_is_what_is_kept() -> None:
    """A home gets another address each day: after two weeks of that the peer is not to be lost."""
    store = BoundedStore()
    (peer,) = told(store)
    for day in range(2 * MOST_ADDRESSES):
        store.add_addrs(peer, [Multiaddr(f"/ip4/198.51.100.{day}/tcp/4001")], 7200)
        store.add_addrs(peer, [HERE], 7200)  # one that others tell every day
    assert store.addrs(peer)[:2] == [HERE, Multiaddr(f"/ip4/198.51.100.{2 * MOST_ADDRESSES - 1}/tcp/4001")]
    assert len(store.addrs(peer)) == MOST_ADDRESSES


async def test_a_host_notes_no_more_and_still_knows_its_keys() -> None:
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda _: None) as host:
        store = host.basic.get_peerstore()
        for number in range(2 * MOST_PEERS):
            store.add_addrs(ID(b"\x00\x04" + number.to_bytes(4, "big")), [HERE], 7200)
        await trio.lowlevel.checkpoint()
        assert len(store.peer_ids()) == MOST_PEERS
        assert host.basic.get_public_key() == store.pubkey(host.basic.get_id())
