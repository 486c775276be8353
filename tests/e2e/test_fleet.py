"""A fleet over a real sshd on loopback: two hosts are two data directories, and one more does not answer."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nolocod.errors import NotRunningError
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.paths import DataDir
from tests.support.swarm import ENOUGH, Swarm, ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.observe.status.report import StatusReport

_ROOT = Path(__file__).resolve().parents[2]
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """Of ssh, for the hosts one and two, and for gone, where nobody listens; with keys of their own."""
    if _SSHD is None:
        pytest.skip("Debian's package openssh-server is not installed")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as nobody:
        port, closed = (one.getsockname()[1] for one in (free, nobody))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the system's service makes it elsewhere
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    (folder / "known").write_text(f"* {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"Host one two\n  Port {port}\nHost gone\n  Port {closed}\nHost *\n  HostName 127.0.0.1\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n"
    )
    server = subprocess.Popen([_SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        assert b"Server listening" in server.stderr.readline()
        yield folder / "config"
    finally:
        server.terminate()
        server.wait(ENOUGH)


class Fleet:
    """`nolocod fleet` on a file of hosts, whose nolocod is that of this checkout."""

    def __init__(self, folder: Path, swarm: Swarm, address: str, ssh_config: Path) -> None:
        self.folder = folder / "it's a fleet"  # no shell may trip over it
        self.folder.mkdir()
        self._program = self.folder / "nolocod"
        self._program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(_ROOT))} exec {sys.executable} -m nolocod "$@"\n')
        self._program.chmod(0o755)
        flags = ["--no-upnp", "--listen", "127.0.0.1:0", "--threads", "1", "--checkpoint-every", "0"]
        shared = {"bootstrap": [address], "nolocod": str(self._program), "ssh_config": str(ssh_config), "flags": flags}
        shared["data"] = str(swarm.data)
        lines = [f"{key} = {json.dumps(value)}" for key, value in shared.items()]
        lines.append('limits = { nice = "10" }')
        for name in ("one", "two"):
            lines.append(f"[hosts.{name}]\ndata_dir = {json.dumps(str(self.home(name)))}")
        (self.folder / "well.toml").write_text("\n".join(lines))
        (self.folder / "all.toml").write_text("\n".join([*lines, "[hosts.gone]"]))

    def home(self, name: str) -> Path:
        return self.folder / name

    def report(self, name: str) -> StatusReport | None:
        """What the node says to this machine; None if it is too busy."""
        with suppress(NotRunningError):
            return client.read(data_directory.find_running(DataDir(self.home(name))))
        return None

    def pid(self, name: str) -> int:
        return data_directory.find_running(DataDir(self.home(name))).pid

    def __call__(self, action: str, *more: str, file: str = "well", status: int = 0) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "nolocod", "fleet", str(self.folder / f"{file}.toml"), action, "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH, check=False)
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        assert ("error NLC-191" in done.stderr) == bool(status)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def end(self) -> None:
        for name in ("one", "two"):
            data_directory.stop(DataDir(self.home(name)), ENOUGH)


def test_a_fleet_from_up_to_down(swarm: Swarm, tmp_path: Path, ssh_config: Path) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    fleet = Fleet(tmp_path, swarm, first.address, ssh_config)
    try:
        rows = fleet("up", "--within", str(ENOUGH))
        assert [(row["host"], row["reason"]) for row in rows] == [("one", ""), ("two", "")]
        began = {name: fleet.pid(name) for name in ("one", "two")}
        again = fleet("up", file="all", status=1)
        assert "Connection refused" in again[2]["reason"]
        assert {name: fleet.pid(name) for name in began} == began, "up is the same said again"
        assert all(row["report"]["allowance"]["limits"] == {"nice": "10", "threads": "1"} for row in again[:2])

        def paired() -> bool:
            return all((report := fleet.report(name)) is not None and report.outer_paired > 0 for name in began)

        swarm.wait("both train with partners", paired)
        assert all(row["report"]["state"] == "training" for row in fleet("status"))
        rows = fleet("update", "--install", "true", "--at-once", "2", "--within", str(ENOUGH))
        assert [row["report"]["state"] for row in rows] == ["training", "training"]
        assert not set(began.values()) & {fleet.pid(name) for name in began}
        assert fleet("down") == [{"host": name, "report": None, "reason": ""} for name in began]
        for name in began:
            with data_directory.hold(DataDir(fleet.home(name))):
                pass  # nobody holds it: down waits
        down = fleet("status", file="all", status=1)
        assert ["NLC-130" in row["reason"] for row in down] == [True, True, False]
    finally:
        fleet.end()
