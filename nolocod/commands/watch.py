"""Commands for those who look at a run without training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.commands import bootstrap_option
from nolocod.commands.node import is_run_id
from nolocod.commands.registry import found_by
from nolocod.errors import UsageError
from nolocod.p2p.settings import Access, MeshSettings
from nolocod.paths import DataDir
from nolocod.units import Address

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.observe.events import Event
    from nolocod.run.manifest import Sealed


def add_to(commands: Commands) -> None:
    """watch."""
    about = "Watch a run without training: serve a page that shows the whole swarm."
    watch = commands.add(
        "watch", _watch, about, "nolocod watch --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW… --http 127.0.0.1:8080"
    )
    add = watch.add_argument
    add("run", nargs="?", default="", metavar="RUN", help="the run's id, or the first 12 digits; its link or name (any run)")
    bootstrap_option(watch)
    add("--network-key", type=Path, metavar="FILE", help="the key of a private network; it is kept for later")
    add("--invite", default="", metavar="TOKEN", help="the token from the owner of a run by invitation")
    add(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("NOLOCOD_HOME", "~/.nolocod")).expanduser() / "watch",
        metavar="DIR",
        help="the observer's identity and what it remembers of runs ($NOLOCOD_HOME/watch, or ~/.nolocod/watch)",
    )
    add("--http", default="127.0.0.1:0", metavar="HOST:PORT", help="serve the run's page and metrics here (%(default)s)")
    add(
        "--http-token", type=Path, metavar="FILE", help="the token that readers of the page need (http.token; none on loopback)"
    )
    add(
        "--proxy-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer also to this host name, under which a reverse proxy publishes the page; repeatable",
    )
    add("--json", action="store_true", help="print the run as one JSON object after ten seconds, and serve nothing")


def _watch(options: argparse.Namespace) -> None:
    mesh, http = _mesh(options), Address.parse(options.http, "--http")
    from nolocod.p2p import lean

    lean.leave_out()
    import msgspec
    import trio

    from nolocod.node.data_directory import hold
    from nolocod.watch import service

    with hold(mesh.paths):
        if options.json:
            print(msgspec.json.encode(trio.run(service.report_once, mesh, _complain)).decode())
            return
        config = service.WatchConfig(mesh, http, options.http_token, tuple(options.proxy_host))
        trio.run(service.watch, config, _complain, _welcome)


def _mesh(options: argparse.Namespace) -> MeshSettings:
    run, bootstrap = options.run, tuple(options.bootstrap)
    if run and not is_run_id(run):
        run, bootstrap = found_by(run, bootstrap, DataDir(options.data_dir))
    if not (bootstrap or options.invite):
        remedy = "Give the address of any node of the run, or its link or name."
        raise UsageError("watch needs --bootstrap or --invite.", remedy=remedy)
    access = Access(options.network_key, None, options.invite)
    return MeshSettings(options.data_dir, bootstrap, run.lower(), access=access)


def _welcome(sealed: Sealed, http: str) -> None:
    print(f"run {sealed.manifest.name} ({sealed.run_id[:12]}): http://{http}", flush=True)


def _complain(event: Event) -> None:
    from nolocod.observe.events import Troubled

    if isinstance(event, Troubled):
        print(f"{event.code} {event.message}", file=sys.stderr, flush=True)
