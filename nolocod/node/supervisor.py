"""What systemd is told about a daemon that it started with `Type=notify` (sd_notify(3)).

The rule: one datagram per fact, without waiting and without failing: a supervisor that does not read costs the node
nothing. Ready means that the node serves its pages; whether it trains yet is the status line's matter, because a node
that waits for its network must not be killed for that. The watchdog is fed by trio's own loop, so that a loop which
hangs is found out.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from nolocod.observe.events import OuterStep, StateChanged

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from nolocod.observe.events import Event

_SHARE = 0.4
"""Of the watchdog's time that passes between two signs of life: one may be lost."""


class Supervisor:
    """The socket that the environment names, if any; made once, in the process that was started."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Read the environment and take the names out of it: they are not for our children."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        every, process = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        ours = process in ("", str(os.getpid()))
        self._watchdog = int(every) / 1e6 if ours and every.isdigit() and int(every) else None
        self._doing = ""

    def ready(self) -> None:
        self._tell("READY=1")

    def follow(self, event: Event) -> None:
        """Say in `systemctl status` what the node does."""
        match event:
            case StateChanged():
                self._doing = f"{event.state}, waits for {event.waiting_for}" if event.waiting_for else event.state
                self._tell(f"STATUS={self._doing}")
                if event.state == "stopping":
                    self._tell("STOPPING=1")
            case OuterStep():
                self._tell(f"STATUS={self._doing}, round {event.round}")

    async def feed(self) -> None:
        """Show that the loop runs, until cancelled; returns at once where nobody watches."""
        while self._address and self._watchdog is not None:
            self._tell("WATCHDOG=1")
            await trio.sleep(self._watchdog * _SHARE)

    def _tell(self, line: str) -> None:
        if not self._address:
            return
        # "@name" is in Linux's abstract namespace, which begins with a zero byte
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.setblocking(False)
            notify.sendto(line.encode(), address)
