"""What a supervisor hears, on the virtual clock; the socket is a real one of this process's own."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.node.supervisor import Supervisor
from nolocod.observe.events import OuterStep, Resumed, StateChanged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Ear:
    """The supervisor's end."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)

    def heard(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    found = Ear(str(tmp_path / "notify"))
    yield found
    found.close()


def test_it_tells_what_the_node_does(ear: Ear, tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "HOME": "/"}
    supervisor = Supervisor(environment)
    assert environment == {"HOME": "/"}, "children must not speak for the node"
    supervisor.ready()
    supervisor.follow(StateChanged("discovering", "a peer"))
    supervisor.follow(StateChanged("training"))
    supervisor.follow(OuterStep(7, "paired", None, 50, None, 0.1))
    supervisor.follow(Resumed())
    supervisor.follow(StateChanged("stopping"))
    started = ["READY=1", "STATUS=discovering, waits for a peer", "STATUS=training", "STATUS=training, round 7"]
    assert ear.heard() == [*started, "STATUS=stopping", "STOPPING=1"]


def test_a_name_with_an_at_sign_is_in_the_abstract_namespace() -> None:
    name = f"nolocod-test-{os.getpid()}"
    ear = Ear(f"\0{name}")
    try:
        Supervisor({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert ear.heard() == ["READY=1"]
    finally:
        ear.close()


def test_nobody_listens_and_nothing_fails(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        Supervisor(environment).ready()


def test_a_supervisor_that_does_not_read_is_not_waited_for(ear: Ear, tmp_path: Path) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    for _ in range(10_000):  # far more than a socket holds
        supervisor.ready()
    assert 0 < len(ear.heard()) < 10_000


async def test_signs_of_life_come_twice_in_the_watchdogs_time(ear: Ear, tmp_path: Path, autojump_clock: object) -> None:
    supervisor = Supervisor(
        {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    )
    with trio.move_on_after(19):
        await supervisor.feed()
    assert ear.heard() == ["WATCHDOG=1"] * 5  # at 0, 4, 8, 12 and 16 s


@pytest.mark.parametrize("watch", [{}, {"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
async def test_nobody_watches_and_the_feeder_ends(
    ear: Ear, tmp_path: Path, watch: dict[str, str], autojump_clock: object
) -> None:
    with trio.fail_after(1):
        await Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify"), **watch}).feed()
    assert ear.heard() == []
