"""A copied data directory, on real connections: one of the two goes, the other stays; a restart keeps going."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from nolocod.errors import ClonedIdentityError
from nolocod.identity import Identity
from nolocod.node import data_directory
from nolocod.observe.events import Event, PeerLost, Troubled
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.paths import DataDir
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, seal
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

QUICK = Timing(heartbeat=0.2, live=10.0, request=8.0, bootstrap=8.0, search=0.5, widen=1.0)
SEALED = seal(Manifest(name="test", model={"model_type": "llama"}), Identity.generate())


@asynccontextmanager
async def member(root: Path, identity: Identity, events: list[Event], *bootstrap: str) -> AsyncIterator[Mesh]:
    data_directory.make(DataDir(root))
    config = MeshSettings(data_dir=root, bootstrap=bootstrap, listen=(Address("127.0.0.1", 0),), upnp=False)
    async with open_mesh(config, identity, events.append, rng=random.SystemRandom(), timing=QUICK) as mesh:
        await mesh.enter(SEALED, lambda: (Standing(5, 100, 2.5), "training"))
        yield mesh


def told(events: list[Event]) -> bool:
    return any(isinstance(event, Troubled) and event.code == ClonedIdentityError.entry.code for event in events)


async def test_of_two_nodes_with_one_identity_one_goes_and_the_other_says_so(tmp_path: Path) -> None:
    copied, friend_saw = Identity.generate(), list[Event]()
    first_saw, second_saw = list[Event](), list[Event]()
    async with member(tmp_path / "friend", Identity.generate(), friend_saw) as friend:
        address = friend.addresses[0]
        async with member(tmp_path / "first", copied, first_saw, address) as first:
            await trio.sleep(1.1)  # lives are ordered by the second in which they began
            async with member(tmp_path / "second", copied, second_saw, address) as second:
                with trio.fail_after(ENOUGH):
                    await second.cloned.wait()
                await until(lambda: told(first_saw))  # it comes with the other's next heartbeat
                await second.leave()
            assert not first.cloned.is_set()
            assert not told(second_saw), "it stops with the error instead"
            await trio.sleep(1.0)
            assert not any(isinstance(event, PeerLost) and event.reason == "it left" for event in friend_saw)
            assert [one.peer_id for one in friend.live()] == [copied.peer_id]


async def test_a_node_that_starts_again_is_no_clone_of_itself(tmp_path: Path) -> None:
    same, saw = Identity.generate(), list[Event]()
    async with member(tmp_path / "friend", Identity.generate(), []) as friend:
        for _ in range(3):
            async with member(tmp_path / "again", same, saw, friend.addresses[0]) as mesh:
                with trio.move_on_after(1.5):
                    await mesh.cloned.wait()
                assert not mesh.cloned.is_set()
    assert not told(saw)
