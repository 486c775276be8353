"""What a node keeps and passes on for the swarm beside its training: the announced runs, and what nodes gave.

The rule: peers are served from the call on; `run` of what is returned is the caller's to start.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from nolocod.node.peers import containing_failures
from nolocod.p2p.exchange.receipt_gossip import OwnReceipts, ReceiptGossip
from nolocod.p2p.exchange.receipt_gossip import Swarm as Counted
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.registry.records import Registry
from nolocod.p2p.registry.service import RegistryService, Swarm, near
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.requests import Terms
from nolocod.p2p.transport.stream import RECEIPTS, REGISTRY
from nolocod.run.credentials import stored_announcement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.identity import Identity, PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.mesh import Mesh
    from nolocod.p2p.transport.stream import Stream
    from nolocod.paths import DataDir
    from nolocod.run.manifest import Sealed


def keep_registry(mesh: Mesh, identity: Identity, sealed: Sealed, paths: DataDir, emit: Emit) -> RegistryService:
    """Keep our copy of the announced runs, and tell what our run's owner left in the data directory."""

    async def visit(peer: PeerId, protocol: str, addresses: Sequence[str]) -> Stream:
        return await (mesh.visit(peer, protocol, addresses) if addresses else mesh.dial(peer, protocol))

    terms = Terms(identity, sealed.run_id, Timing().request)
    swarm = Swarm(terms, lambda: near(mesh.live()), visit, lambda peer: mesh.origin(peer)[0], mesh.judge)
    registry = Registry(sealed.run_id, sealed.manifest.owner)
    service = RegistryService(registry, swarm, random.SystemRandom(), partial(stored_announcement, paths))
    mesh.serve(REGISTRY, containing_failures(service.handle, emit))
    return service


def keep_count(
    mesh: Mesh, identity: Identity, sealed: Sealed, paths: DataDir, receipts: ReceiptStore, emit: Emit
) -> ReceiptGossip:
    """Count what the run's nodes give, and pass on the receipts that show it; `receipts` are our own late ones."""
    swarm = Counted(Terms(identity, sealed.run_id, Timing().request), mesh.live, near, mesh.dial, mesh.judge)
    gossip = ReceiptGossip(swarm, OwnReceipts(receipts, ReceiptStore(paths.contributions)), random.SystemRandom(), emit)
    mesh.serve(RECEIPTS, containing_failures(gossip.handle, emit))
    return gossip
