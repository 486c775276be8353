"""A private run with real daemons and the commands as people type them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from nolocod.errors import InvitationError, InvitationOverError, NetworkKeyError, NotInvitedError
from nolocod.node import data_directory
from tests.support.swarm import ENOUGH, RUN_FILE, ready

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.swarm import Swarm


def nolocod(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "nolocod", *arguments], capture_output=True, text=True, timeout=ENOUGH, check=False
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def refusal(swarm: Swarm, *arguments: str) -> str:
    """The code and cause with which a joining node ends."""
    daemon = swarm.daemon().run("join", *arguments)
    assert daemon.process is not None
    assert daemon.process.wait(ENOUGH) != 0
    return next(line for line in daemon.log.read_text().splitlines() if line.startswith("error "))


def test_a_private_run_from_its_founding_to_a_revocation(swarm: Swarm, tmp_path: Path) -> None:
    key, run_file = tmp_path / "network.key", tmp_path / "run.toml"
    nolocod("network-key", str(key))
    run_file.write_text('access = "invited"\n' + RUN_FILE)
    owner = swarm.daemon()
    data_directory.found(owner.paths, run_file)
    owner.run("start", "--network-key", str(key))
    swarm.wait("the owner tells its address", lambda: ready(owner))

    home = ("--data-dir", str(owner.paths.root))
    token = nolocod("invite", *home).strip()
    member = swarm.daemon().run("join", "--invite", token)
    swarm.wait_paired([owner, member], 2)
    [issued] = nolocod("invite", "--list", *home).splitlines()

    assert NetworkKeyError.entry.code in refusal(swarm, "--bootstrap", owner.address)
    assert NotInvitedError.entry.code in refusal(swarm, "--bootstrap", owner.address, "--network-key", str(key))
    assert InvitationError.entry.code in refusal(swarm, "--invite", token[:-1])

    assert member.report is not None
    peer = member.report.peer_id
    nolocod("revoke", issued.split()[0], *home)
    swarm.wait(
        "the owner drops the member",
        lambda: (report := owner.report) is not None and peer not in {row.peer_id for row in report.peers if row.state},
    )
    assert InvitationOverError.entry.code in refusal(swarm, "--invite", token)
