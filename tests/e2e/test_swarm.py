"""The daemon's promises, on real processes with real signals."""

from __future__ import annotations

import signal
import stat
from typing import TYPE_CHECKING

from tests.support.swarm import ready

if TYPE_CHECKING:
    from tests.support.swarm import Daemon, Swarm


def knows(daemon: Daemon) -> int:
    """How many live members it tells of."""
    report = daemon.report
    return sum(1 for peer in report.peers if peer.state) if report else 0


def test_a_swarm_outlives_its_first_daemon(swarm: Swarm) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    others = [swarm.daemon().run("join", "--bootstrap", first.address) for _ in range(3)]
    everyone = [first, *others]
    swarm.wait_paired(everyone, 1)
    swarm.wait("everyone knows everyone", lambda: all(knows(daemon) == 3 for daemon in everyone))
    assert all(stat.S_IMODE(daemon.paths.identity.stat().st_mode) == 0o600 for daemon in everyone)

    before = first.report
    assert before is not None
    assert first.signal(signal.SIGKILL) == -signal.SIGKILL
    swarm.wait_paired(others, 2)  # the rest keep pairing

    first.run("start")  # no bootstrap: it remembers its peers
    swarm.wait_paired([first], 1)
    after = first.report
    assert after is not None
    assert after.peer_id == before.peer_id
    assert after.round >= before.round, "it went on from its checkpoint, or from fresher weights"

    fifth = swarm.daemon().run("join", "--bootstrap", others[2].address)
    swarm.wait_paired([fifth], 1)
    assert "weights from" in fifth.log.read_text()
    for daemon in [*everyone, fifth]:
        assert daemon.signal(signal.SIGTERM) == 0
        assert any(daemon.paths.checkpoints.glob("round-*"))
