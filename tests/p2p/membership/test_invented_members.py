"""A stranger that tells a swarm of members whom it invented: signed heartbeats that cost nothing, of nobody who is there."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import trio

from nolocod.identity import Identity
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.studies.sim import clock
from tests.support.gossip_swarm import Checks, gossip_swarm

if TYPE_CHECKING:
    import pytest

    from tests.support.gossip_swarm import GossipSwarm

GHOSTS = 128


async def invent(swarm: GossipSwarm, seconds: float) -> None:
    """Tell every node of all ghosts, again and again: at round 1001, trained, an hour ahead, and always fresh."""
    ghosts = [
        OwnHeartbeat(
            Identity.from_secret(number.to_bytes(32, "big")),
            swarm.run_id,
            lambda: (Standing(1001, 10**9, 0.1), "training"),
            lambda number=number: (f"/ip4/10.200.0.{number}/tcp/1",),
            lambda: swarm.members[0].wall() + 3600.0,
        )
        for number in range(1, GHOSTS + 1)
    ]
    strangers = [Identity.from_secret((1000 + number).to_bytes(32, "big")).peer_id for number in range(8)]
    rng = random.Random(0)
    until = trio.current_time() + seconds
    while trio.current_time() < until:
        raws = [ghost.heartbeat() for ghost in ghosts]
        for member in swarm.members:
            for stranger in strangers:
                told = rng.sample(raws, 15)
                message = pb.Gossip(heartbeats=told, ages=[0] * len(told), answer=True)
                member._take(member.gossip.reply(stranger, message, trio.current_time())[1])
        await trio.sleep(12.0)


def test_a_swarm_under_128_invented_members_goes_on_knowing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Checks(monkeypatch)

    async def main() -> None:
        for honest in (3, 20):
            async with gossip_swarm() as swarm:
                members = swarm.add(honest)
                await trio.sleep(60.0)
                await invent(swarm, 240.0)
                own = {member.peer_id for member in members}
                for member in members:
                    live = member.table.live(trio.current_time())
                    assert sum(one.peer_id not in own for one in live) >= 64, "they are told of, as anybody is"
                    verified = {one.peer_id for one in live if one.verified}
                    assert verified <= own
                    assert len(verified) >= (honest - 1) / 2
                    assert abs(member.table.clock_offset()) < 1.0

    clock.run(main, seed=0)
