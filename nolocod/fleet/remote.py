"""What is done on a fleet's hosts, by the system's ssh: a script for sh goes in, a node's report comes out.

The rule: the remote shell gets one constant command, `sh -s`. All else is a script on its standard input (host.sh), below
assignments whose values are quoted here. Nobody is asked for a password, and each host has its deadline.
"""

from __future__ import annotations

from importlib import resources
from shlex import join, quote
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from nolocod.errors import HostError, NotRunningError, UsageError, on_one_line
from nolocod.observe.status import client
from nolocod.observe.status.report import StatusReport  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from nolocod.fleet.hosts import Fleet, Host

Action = Literal["up", "status", "update", "down"]
_MARK = "--- nolocod fleet"
"""Before the report: shells may greet on standard output (host.sh)."""
_CONNECT = 10
_REASON = 300
"""Characters of what a host says has failed."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One host. `reason` says what failed there; where nothing did, a node without a report is down, as it was told to be."""

    host: str
    report: StatusReport | None = None
    reason: str = ""


async def on_each(fleet: Fleet, action: Action, install: str, *, at_once: int, seconds: float) -> list[Row]:
    """Do it on all hosts, in their order, on `at_once` of them at a time; each has so many seconds.

    `install` is a shell command for hosts without nolocod (up) or for all (update). An update goes no further once a host has
    failed, so that a bad release does not take the whole fleet.
    """
    rows: dict[str, Row] = {}
    waiting = iter(fleet.hosts.items())

    async def work() -> None:
        for name, host in waiting:
            if action == "update" and any(row.reason for row in rows.values()):
                rows[name] = Row(host=name, reason="left as it was, because another host failed")
                continue
            try:
                said = await ask(fleet, host, script(fleet, name, action, install, seconds), seconds)
                rows[name] = Row(host=name, report=None if action == "down" else client.decode(said.encode()))
            except (HostError, NotRunningError) as error:
                rows[name] = Row(host=name, reason=error.cause)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(work)
    return [rows[name] for name in fleet.hosts]


async def ask(fleet: Fleet, host: Host, text: str, seconds: float) -> str:
    """What the script `text` prints after the mark. HostError if it fails, or takes longer, or ssh does not get there."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}", "-o", "ServerAliveInterval=5"]
    config = ["-F", fleet.ssh_config] if fleet.ssh_config else []
    command = ["ssh", *options, *config, "--", host.ssh, "sh -s"]
    with trio.move_on_after(seconds) as within:
        try:
            done = await trio.run_process(command, stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False)
        except FileNotFoundError as error:
            raise UsageError("this machine has no ssh.", remedy="Install OpenSSH's client.") from error
    if within.cancelled_caught:
        raise HostError(f"no answer within {seconds:.0f} s")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise HostError(on_one_line(RuntimeError(" ".join(lines)), _REASON) or f"ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace").rpartition(_MARK)[2]


def script(fleet: Fleet, name: str, action: Action, install: str, seconds: float) -> str:
    """For sh on the host `name`: values, each quoted, and what is done with them (host.sh).

    `launch` becomes fleet.sh, which becomes the daemon; `unit` is systemd's name for it; "$@" are limits.
    """
    host = fleet.hosts[name]
    program, folder = _path(fleet.nolocod), _path(host.data_dir)
    data = f" --data={_path(host.data)}" if host.data else ""
    launch = [
        "# The node of this data directory, as `nolocod fleet` wrote it down: `sh fleet.sh` starts it.",
        'cd "$HOME" || exit',
        'PATH="$HOME/.local/bin:$PATH"',
        f"exec {program} join --data-dir={folder}{data} {join(host.flags)} >>{folder}/node.log 2>&1",
    ]
    values = {"action": action, "unit": f"nolocod-{name}", "install": install, "launch": "\n".join(launch)}
    lines = [f"program={program}", f"dir={folder}", f"seconds={max(1, int(seconds) - 5)}"]
    lines += [f"{key}={quote(text)}" for key, text in values.items()]
    lines.append(f"set -- {join(f'{key}={text}' for key, text in host.limits.items())}")
    return "\n".join([*lines, resources.files(__package__).joinpath("host.sh").read_text(encoding="utf-8")])


def _path(text: str) -> str:
    """A path of the host, quoted but for the home that it may begin with."""
    home, slash, rest = text.partition("/")
    return f'"$HOME"/{quote(rest)}' if home == "~" and slash else quote(text)
