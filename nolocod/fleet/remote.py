"""What is done on a fleet's hosts, by the system's ssh: a script for sh goes in, a node's report comes out.

The rule: the remote shell gets one constant command, `sh -s`. All else is a script on its standard input (host.sh), below
assignments whose values are quoted here. Nobody is asked for a password, and each host has its deadline.
"""

from __future__ import annotations

import subprocess
from importlib import resources
from shlex import join, quote
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from nolocod.errors import HostError, NotRunningError, UsageError, on_one_line
from nolocod.observe.status import client

if TYPE_CHECKING:
    from nolocod.fleet.hosts import Fleet, Host

Action = Literal["up", "status", "update", "down"]
_MARK = "--- nolocod fleet"
"""Before the report: shells may greet on standard output (host.sh)."""
_CONNECT = 10
_REASON = 300
"""Characters of what a host says has failed."""
_RECENT = 600.0
"""Seconds for which an error is shown."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One host. `reason` says what failed, and is empty where nothing did; all else is as the node's report says it."""

    host: str
    state: str = ""
    version: str = ""
    peer_id: str = ""
    round: int | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    partner: str = ""
    errors: tuple[str, ...] = ()
    """Codes of the last ten minutes, newest first."""
    reason: str = ""


async def on_each(fleet: Fleet, action: Action, install: str, *, at_once: int, seconds: float) -> list[Row]:
    """Do it on all hosts, in their order, on `at_once` of them at a time; each has so many seconds.

    `install` is a shell command for hosts without nolocod (up) or for all (update). An update goes no further once a host has
    failed, so that a bad release does not take the whole fleet.
    """
    rows: dict[str, Row] = {}
    waiting = iter(fleet.hosts)

    async def work() -> None:
        for host in waiting:
            if action == "update" and any(row.reason for row in rows.values()):
                rows[host.name] = Row(host=host.name, reason="left as it was, because another host failed")
                continue
            rows[host.name] = await _on(fleet, host, action, install, seconds)

    async with trio.open_nursery() as nursery:
        for _ in range(min(at_once, len(fleet.hosts))):
            nursery.start_soon(work)
    return [rows[host.name] for host in fleet.hosts]


async def _on(fleet: Fleet, host: Host, action: Action, install: str, seconds: float) -> Row:
    try:
        said = await ask(fleet, host, script(fleet, host, action, install, seconds), seconds)
        return row(host, said.encode()) if action != "down" else Row(host=host.name, state="down")
    except (HostError, NotRunningError) as error:
        return Row(host=host.name, reason=error.cause)


async def ask(fleet: Fleet, host: Host, text: str, seconds: float) -> str:
    """What the script `text` prints after the mark. HostError if it fails, or takes longer, or ssh does not get there."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}", "-o", "ServerAliveInterval=5"]
    config = ["-F", str(fleet.ssh_config)] if fleet.ssh_config else []
    command = ["ssh", *options, *config, "--", host.ssh, "sh -s"]
    done: subprocess.CompletedProcess[bytes] | None = None
    with trio.move_on_after(seconds):
        try:
            done = await trio.run_process(command, stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False)
        except FileNotFoundError as error:
            raise UsageError("this machine has no ssh.", remedy="Install OpenSSH's client.") from error
    if done is None:
        raise HostError(f"no answer within {seconds:.0f} s")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise HostError(on_one_line(RuntimeError(" ".join(lines)), _REASON) or f"ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace").rpartition(_MARK)[2]


def row(host: Host, raw: bytes) -> Row:
    """Of a node's report. NotRunningError if it is none."""
    report = client.decode(raw)
    return Row(
        host=host.name, state=report.state, version=report.version, peer_id=report.peer_id, round=report.round,
        tokens_per_second=report.tokens_per_second, loss=report.loss, partner=report.partner,
        errors=tuple(dict.fromkeys(error.code for error in report.errors if error.age < _RECENT)),
    )  # fmt: skip


def script(fleet: Fleet, host: Host, action: Action, install: str, seconds: float) -> str:
    """For sh on the host: values, each quoted, and what is done with them."""
    program, folder = path(fleet.program), path(host.data_dir)
    data = f" --data={path(host.data)}" if host.data else ""
    launch = [
        "# The node of this data directory, as `nolocod fleet` wrote it down: `sh fleet.sh` starts it.",
        'cd "$HOME" || exit',
        'PATH="$HOME/.local/bin:$PATH"',
        f"exec {program} join --data-dir={folder}{data} {join(host.join)} >>{folder}/node.log 2>&1",
    ]
    values = {"action": action, "unit": f"nolocod-{host.name}", "install": install, "launch": "\n".join(launch)}
    lines = [f"program={program}", f"dir={folder}", f"seconds={max(1, int(seconds) - 5)}"]
    lines += [f"{name}={quote(text)}" for name, text in values.items()]
    lines.append(f"set -- {join(f'{key}={text}' for key, text in host.limits.items())}")
    return "\n".join([*lines, resources.files(__package__).joinpath("host.sh").read_text(encoding="utf-8")])


def path(text: str) -> str:
    """A path of the host, quoted but for the home that it may begin with."""
    home, slash, rest = text.partition("/")
    return f'"$HOME"/{quote(rest)}' if home == "~" and slash else quote(text)
