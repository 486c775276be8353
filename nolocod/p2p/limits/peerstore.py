"""What libp2p notes of peers, chiefly what the DHT told: bounded in peers, and in bytes of each.

The rule: who was told of last is kept, the oldest goes, and never we ourselves. libp2p 0.8.1 starts nobody to clean its
store, keeps records of megabytes, and at a thousand peers forgets first those without addresses: our own keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from libp2p.peer.peerstore import PeerStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.peer.envelope import Envelope
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

MOST_PEERS = 256
"""The DHT's table of a large swarm, with room for those that it asks on the way."""
MOST_ADDRESSES = 16
"""Of one peer."""
MOST_RECORD = 4096
"""Bytes of what a peer has signed about itself."""


class BoundedStore(PeerStore):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """A peer store for a host of ours."""

    def __init__(self, most: int = MOST_PEERS) -> None:
        super().__init__(max_records=most, max_peers=most)

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """Whether the record was taken; too large a one is not."""
        return len(envelope.raw_payload) <= MOST_RECORD and super().consume_peer_record(envelope, ttl)

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Note these addresses before those that are known, MOST_ADDRESSES in all: of a peer that moves about the oldest go."""
        if (noted := self.peer_data_map.pop(peer_id, None)) is not None:
            self.peer_data_map[peer_id] = noted  # told of last
        latest = list(dict.fromkeys(addrs))[:MOST_ADDRESSES]
        super().add_addrs(peer_id, latest, ttl)
        noted = self.peer_data_map[peer_id]
        noted.addrs = list(dict.fromkeys([*latest, *noted.addrs]))[:MOST_ADDRESSES]

    def _enforce_peer_limit(self) -> None:
        old = [peer for peer, noted in self.peer_data_map.items() if noted.privkey is None]
        for peer in old[: max(0, len(self.peer_data_map) - self.max_peers)]:
            self.clear_peerdata(peer)
