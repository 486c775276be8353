"""The attackers of the standing suite speak the product's protocols: against a mesh, without daemons."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.identity import Identity
from nolocod.p2p.membership import heartbeat as heartbeats
from nolocod.p2p.mesh import open_mesh
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.stream import EXCHANGE, SNAPSHOT
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, seal
from nolocod.units import Address
from tests.attacks.attackers import ATTACKS, Target, attack, heartbeat
from tests.support.wires import until

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

_HTTP = {"http", "slow http", "unread http"}


async def listen_on(stream: Stream) -> None:
    while await stream.arrived(None):
        pass


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - _HTTP - {"dht", "relay"}))
async def test_an_attack_reaches_a_node_which_goes_on(tmp_path: Path, name: str) -> None:
    identity, run = Identity.generate(), seal(Manifest(name="t", model={"model_type": "llama"}), Identity.generate())
    config = MeshSettings(tmp_path, listen=(Address("127.0.0.1", 0),), upnp=False)
    async with open_mesh(config, identity, lambda _: None, rng=random.Random(1), timing=Timing()) as mesh:
        await mesh.enter(run, lambda: (Standing(1, 1, 5.0), "training"))
        for protocol in (EXCHANGE, SNAPSHOT):
            mesh.serve(protocol, listen_on)
        address = mesh.addresses[0].partition("/p2p/")[0]
        port = int(address.rpartition("/")[2])
        target = Target(identity.peer_id, address, port, Address("127.0.0.1", port), run.run_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, name, target, 30.0)
            await until(lambda: target.done >= 2)
            nursery.cancel_scope.cancel()


def test_an_invented_member_is_signed_like_a_true_one() -> None:
    identity = Identity.generate()
    assert heartbeats.read(heartbeat(identity, "ab" * 32, 7), "ab" * 32).peer == identity.peer_id
