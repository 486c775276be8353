"""The daemon's promises, on real processes with real signals; then a stranger that tells of 128 members that nobody is.

The tests share the daemons.
"""

from __future__ import annotations

import signal
import stat
import time
from typing import TYPE_CHECKING

import pytest
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
from tests.support.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.swarm import Daemon


@pytest.fixture(scope="module")
def swarm_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three daemons that have paired."""
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    try:
        swarm.wait_paired(swarm.joined_by(swarm.found(), 2), 1)
        yield swarm
    finally:
        swarm.end()


def knows(daemon: Daemon) -> int:
    """How many live members it tells of."""
    report = daemon.report
    return sum(1 for peer in report.peers if peer.state) if report else 0


def test_a_swarm_outlives_its_first_daemon(swarm_of_three: Swarm) -> None:
    swarm = swarm_of_three
    everyone = list(swarm.daemons)
    first, others = everyone[0], everyone[1:]
    swarm.wait("everyone knows everyone", lambda: all(knows(daemon) == 2 for daemon in everyone))
    assert all(stat.S_IMODE(daemon.paths.identity.stat().st_mode) == 0o600 for daemon in everyone)

    before = first.report
    assert before is not None
    assert first.signal(signal.SIGKILL) == -signal.SIGKILL
    swarm.wait_paired(others, 2)  # the rest keep pairing

    first.run("start")  # no bootstrap: it remembers its peers
    fourth = swarm.daemon().run("join", "--bootstrap", others[1].address)
    swarm.wait_paired([first], 1)
    after = first.report
    assert after is not None
    assert after.peer_id == before.peer_id
    assert after.round >= before.round, "it went on from its checkpoint, or from fresher weights"

    swarm.wait_paired([fourth], 1)
    assert "weights from" in fourth.log.read_text()
    swarm.stop(first)
    assert any(first.paths.checkpoints.glob("round-*"))


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


def test_128_invented_members_stop_nobody(swarm_of_three: Swarm) -> None:
    three = swarm_of_three.daemons[1:4]
    swarm_of_three.wait_paired(three, 2)
    report = three[0].report
    assert report is not None
    trio.run(_invent, three, RunId(report.run_id), 20.0)
    reports = [daemon.report for daemon in three]
    heard = [len(report.peers) for report in reports if report is not None]
    assert len(heard) == 3
    assert min(heard) > 16, f"many more than there are: {heard}"
    swarm_of_three.wait_paired(three, 3)
    for daemon in three:
        report = daemon.report
        assert report is not None
        assert report.round < 10_000
        log = daemon.log.read_text()
        assert "newer weights: this node is too far behind" not in log
        assert "NLC-124" not in log
    swarm_of_three.stop(*three)
    assert all(any(daemon.paths.checkpoints.glob("round-*")) for daemon in three)
