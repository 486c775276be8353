"""Daemons of studies: what is told of one that ended, and that none stays behind."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from nolocod.errors import UsageError
from nolocod.studies.daemons import Daemon, DaemonError, end, folder
from tests.support.swarm import ENOUGH, gone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""


def daemon(root: Path, script: str) -> Daemon:
    one = Daemon(root / "node-0")
    one.program = ("-c", script)
    one.start("join")
    return one


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_that_ended_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    one = daemon(tmp_path, "import sys; sys.exit(f'the last words of {sys.argv[1]}')")
    one.running.wait(ENOUGH)
    with pytest.raises(DaemonError, match=r"(?s)node-0 ended with status 1\..*the last words of join"):
        one.wait("anything", ENOUGH, lambda _: True)


def test_one_that_never_answers_is_given_up(tmp_path: Path) -> None:
    one = daemon(tmp_path, "import time; time.sleep(60)")
    try:
        assert one.poll() is None
        with pytest.raises(DaemonError, match="its first step took more than 0 s"):
            one.wait("its first step", 0.2, lambda _: True)
    finally:
        one.kill()


def test_who_does_not_end_in_time_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    one = daemon(tmp_path, STUBBORN)
    until(lambda: "child" in one.tail())
    child = psutil.Process(int(one.tail().split()[1]))
    end([one, Daemon(tmp_path / "never-started")], 0.2)
    assert one.running.returncode == -signal.SIGKILL
    until(lambda: gone(child))


def test_a_folder_that_is_kept_was_empty(tmp_path: Path) -> None:
    with folder(tmp_path / "kept") as root:
        (root / "node-0").mkdir()
    assert (tmp_path / "kept" / "node-0").is_dir()
    with pytest.raises(UsageError, match="is not empty"), folder(tmp_path / "kept"):
        pass
    with folder() as root:
        pass
    assert not root.exists()
