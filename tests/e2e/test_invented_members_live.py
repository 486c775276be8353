"""Three real daemons, and a stranger that tells them of 128 members that nobody is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.identity import Identity
from nolocod.p2p.host import open_host
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.transport.multiaddrs import split
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.run.manifest import RunId
from nolocod.units import Address
from tests.support.swarm import ready

if TYPE_CHECKING:
    from tests.support.swarm import Daemon, Swarm


async def _invent(daemons: list[Daemon], run_id: RunId, seconds: float) -> None:
    ghosts = [
        OwnHeartbeat(
            Identity.from_secret((7000 + number).to_bytes(32, "big")),
            run_id,
            lambda: (Standing(100_001, 10**9, 0.1), "training"),
            lambda number=number: (f"/ip4/127.0.0.99/tcp/{4000 + number}",),
            lambda: time.time() + 3600.0,
        )
        for number in range(128)
    ]
    stranger = Identity.generate()
    async with open_host(stranger, (Address("127.0.0.98", 0),), (), lambda _: None) as host:
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            for start in range(0, 128, 15):
                told = [ghost.heartbeat() for ghost in ghosts[start : start + 15]]
                for daemon in daemons:
                    peer, address = split(daemon.address)
                    try:
                        stream = await host.open_stream(peer, GOSSIP, (address,))
                        await ask(
                            stream,
                            pb.Body(gossip=pb.Gossip(heartbeats=told, answer=True)),
                            Terms(stranger, run_id, 8.0),
                            "gossip",
                        )
                    except RemoteError:
                        continue
            await trio.sleep(3.0)


def test_128_invented_members_stop_nobody(swarm: Swarm) -> None:
    first = swarm.found("modulo8", "", steps=50)
    swarm.wait("the first node tells its address", lambda: ready(first))
    everyone = [first, *[swarm.daemon().run("join", "--bootstrap", first.address) for _ in range(2)]]
    swarm.wait_paired(everyone, 2)
    report = first.report
    assert report is not None
    trio.run(_invent, everyone, RunId(report.run_id), 20.0)
    reports = [daemon.report for daemon in everyone]
    heard = [len(report.peers) for report in reports if report is not None]
    assert len(heard) == 3
    assert min(heard) > 16, f"many more than there are: {heard}"
    swarm.wait_paired(everyone, 3)
    for daemon in everyone:
        report = daemon.report
        assert report is not None
        assert report.round < 10_000
        log = daemon.log.read_text()
        assert "newer weights: this node is too far behind" not in log
        assert "NLC-124" not in log
