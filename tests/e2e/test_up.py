"""From nothing to a first paired outer step in one command, and what it wrote is taken away again by another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.paths import DataDir
from tests.support.service_managers import systemctl, tool
from tests.support.swarm import ENOUGH, Swarm, ready

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user whose systemd is a stand-in that starts and stops what a unit says; with a space in its name."""
    home, bin = tmp_path / "a home", tmp_path / "bin"
    for folder in (home, bin):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.delenv("NOLOCOD_HOME", raising=False)
    systemctl(bin)
    tool(bin, "loginctl", "exit 1")
    yield home
    if (bin / "pid").exists():
        subprocess.run([bin / "systemctl", "--user", "disable", "--now", "x"], timeout=60, check=True)


def nolocod(*arguments: str, status: int = 0) -> dict[str, Any]:
    """What the command says in JSON."""
    command = [sys.executable, "-m", "nolocod", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found | {"stderr": done.stderr}


def test_a_node_is_up_with_one_command_and_gone_with_another(swarm: Swarm, home: Path) -> None:
    first = swarm.found()
    swarm.wait("the first node tells its address", lambda: ready(first))
    swarm.wait("it can be found by its address", lambda: nolocod("update", first.address)["run"].startswith("run e2e"))
    paths = DataDir(home / ".nolocod")

    missing = nolocod("up", first.address, "--use", "half", "--autostart", "yes", status=1)
    assert "NLC-120" in missing["stderr"], "this run trains on files of one's own"
    assert not (home / ".config").exists()

    flags = ("--data", str(swarm.data), "--checkpoint-every", "0", "--name", "Ann's box")
    told = nolocod("up", first.address, "--use", "duty=90% threads=1", "--autostart", "yes", *flags)
    assert told["refused"] == ["loginctl --no-ask-password enable-linger"]
    assert told["file"] == str(home / ".config/systemd/user/nolocod.service")
    swarm.wait("its first paired step", lambda: client.read(data_directory.find_running(paths)).outer_paired > 0)
    assert nolocod("set") == {"duty": "90%", "threads": "1", "stderr": ""}
    assert data_directory.find_running(paths).http == told["http"]
    process = psutil.Process(data_directory.find_running(paths).pid)

    state = nolocod("update")
    assert (state["needed"], state["newer"], len(state["releases"])) == (False, "", 2)

    again = nolocod("up", "--use", "all threads=1", "--autostart", "no", *flags)
    assert (again["run_id"], again["file"]) == (told["run_id"], told["file"])
    assert not process.is_running(), "it was started anew"
    assert nolocod("set") == {"threads": "1", "stderr": ""}
    other = nolocod(
        "up", "--run", "00" * 8, "--bootstrap", first.address, "--use", "all", "--autostart", "no", *flags, status=1
    )
    assert "NLC-104" in other["stderr"], "the directory belongs to a run"

    process = psutil.Process(data_directory.find_running(paths).pid)
    assert nolocod("up", "--remove")["removed"]
    assert not process.is_running()
    assert not Path(told["file"]).exists()
    assert not nolocod("up", "--remove")["removed"]
    assert paths.identity.exists()
    swarm.stop(first)
