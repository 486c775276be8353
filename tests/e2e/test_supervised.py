"""A real daemon under a supervisor that waits for its word (sd_notify)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from nolocod.identity import Identity
from tests.support.swarm import ENOUGH

if TYPE_CHECKING:
    from pathlib import Path


def test_a_daemon_says_when_it_is_up_and_that_it_is_alive(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    line = [sys.executable, "-m", "nolocod", "join", "--bootstrap", nobody, "--data-dir", str(tmp_path / "node"), "--no-upnp"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        ear.settimeout(ENOUGH)
        daemon = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            heard = {ear.recv(4096).decode()}
            while not {"READY=1", "WATCHDOG=1"} <= heard:
                heard.add(ear.recv(4096).decode())
        finally:
            daemon.kill()
            daemon.wait(ENOUGH)
