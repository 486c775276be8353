"""The command for who has many machines."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import HostError, UsageError

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.fleet.remote import Action

_WITHIN = {"up": 120.0, "status": 30.0, "update": 900.0, "down": 120.0}
"""Seconds that a host has; with --install as many as an update."""


def add_to(commands: Commands) -> None:
    """fleet."""
    fleet = commands.add(
        "fleet",
        _fleet,
        "Bring up, show, update or stop the nodes of many machines over ssh. A host that fails is a row with its reason.",
        "nolocod fleet hosts.toml up --install 'uv tool install --upgrade nolocod'",
    )
    add = fleet.add_argument
    add("hosts", type=Path, metavar="HOSTS.toml", help="the hosts, and which run they join")
    add("action", choices=list(_WITHIN), help="update installs and restarts a few hosts at a time, and ends at a failure")
    add("--install", default="", metavar="COMMAND", help="how nolocod gets onto a host: up where it lacks, update everywhere")
    add("--at-once", type=int, metavar="N", help="hosts at the same time (16; update: a quarter of them)")
    add("--within", type=float, metavar="SECONDS", help="that each host has (up and down 120, status 30, update 900)")
    add("--json", action="store_true", help="print one JSON object per host")


def _fleet(options: argparse.Namespace) -> None:
    action: Action = options.action
    within = _WITHIN["update" if options.install else action] if options.within is None else options.within
    if action != "up" and bool(options.install) != (action == "update"):
        raise UsageError("--install COMMAND is for up, and needed for update.")
    if not (1 <= within < math.inf and (options.at_once is None or options.at_once > 0)):  # NaN is not either
        raise UsageError("--within and --at-once are numbers from 1.")
    import msgspec
    import trio

    from nolocod.commands import terminal
    from nolocod.fleet import hosts, remote
    from nolocod.observe.status.terminal_table import fleet_table

    fleet = hosts.read_fleet(options.hosts)
    at_once = options.at_once or (max(1, len(fleet.hosts) // 4) if action == "update" else 16)
    rows = trio.run(partial(remote.on_each, fleet, action, options.install, at_once=at_once, seconds=within))
    if options.json:
        print(*(msgspec.json.encode(row).decode() for row in rows), sep="\n", flush=True)
    else:
        terminal.show(fleet_table((row.host, row.report, row.reason) for row in rows))
    if failed := [row.host for row in rows if row.reason]:
        raise HostError(f"{len(failed)} of {len(rows)} hosts: {', '.join(failed)}.")
