"""Commands about the registry of runs: announce one, list them, find one by its name or its link."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from nolocod.commands import bootstrap_option
from nolocod.errors import HttpTokenError, NoSuchRunError, NotRunningError, UsageError, WrongRunError
from nolocod.paths import DataDir
from nolocod.units import parse_span

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from nolocod.commands import Commands
    from nolocod.errors import RemoteError
    from nolocod.identity import PeerId
    from nolocod.run.announcements import Announcement
    from nolocod.watch.observer import Seeker
    from nolocod.watch.runs import Found


def add_to(commands: Commands) -> None:
    """announce, runs."""
    about = "Announce the run of this data directory, so that others find it by its name. Its owner can do that."
    example = 'nolocod announce --description "Verse, small, for anybody" --licence Apache-2.0 --contact me@example.org'
    announce = commands.add_here("announce", _announce, about, example)
    add = announce.add_argument
    add("--description", default="", metavar="TEXT", help="what the run is for, in a sentence or two")
    add("--licence", default="", metavar="NAME", help="of the weights")
    add("--contact", default="", metavar="TEXT", help="where people reach you")
    add(
        "--address",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="where newcomers find the run, up to 4 times (the running node's addresses)",
    )
    add("--expires", default="14d", metavar="SPAN", help="announce it for so long, at most 30d (%(default)s)")
    add("--withdraw", action="store_true", help="take the announcement back")
    bootstrap_option(announce, "tell this node too, of any run: a run with its first node only is known to nobody; repeatable")
    add("--json", action="store_true", help="print one JSON object")
    about = "List the runs that are announced."
    runs = commands.add_here("runs", _runs, about, "nolocod runs --fits --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…")
    bootstrap_option(runs, "ask this node, of any run; repeatable (see docs/registry.md)")
    runs.add_argument("--fits", action="store_true", help="only runs that need no more memory than this machine has")
    runs.add_argument("--json", action="store_true", help="print one JSON object per run")


def bootstraps(given: Sequence[str], paths: DataDir) -> tuple[str, ...]:
    """Those that were given; or those of the file `bootstraps`, one a line, what follows a # being a comment; or the node that
    runs in this data directory."""
    if given:
        return tuple(given)
    try:
        lines = (paths.root / "bootstraps").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{paths.root / 'bootstraps'} cannot be read ({error}).") from error
    if found := tuple(text for line in lines if (text := line.split("#", 1)[0].strip())):
        return found
    from nolocod.node import data_directory

    with suppress(NotRunningError):
        return data_directory.find_running(paths).addresses
    remedy = f"Give --bootstrap, or write addresses into {paths.root / 'bootstraps'}, one a line."
    raise UsageError("no node is known that could be asked for runs.", remedy=remedy)


def found_by(name: str, given: Sequence[str], paths: DataDir) -> tuple[str, tuple[str, ...]]:
    """The id of the announced run of this name, or of the link, and addresses of its nodes; of an address no id.

    Raises NoSuchRunError, NoBootstrapError, or UsageError if several runs have the name.
    """
    from nolocod.run import announcements

    if name.startswith("/"):  # of whatever run this node is in
        return "", (name, *given)
    if name.startswith("nolocod:"):
        run_id, address = announcements.read_link(name)
        return run_id, (address, *given)
    fitting = [one.said for one in listed(bootstraps(given, paths)) if name in (one.said.name, one.said.run_id)]
    if not fitting:
        raise NoSuchRunError(f"no run of the name {name[:64]!r} is announced.")
    if len({said.run_id for said in fitting}) > 1:
        ids = ", ".join(f"{said.run_id[:12]} by {said.owner[-8:]}" for said in fitting)
        raise UsageError(f"several runs are called {name}: {ids}.", remedy="Join one by its link, or by --run and --bootstrap.")
    return fitting[0].run_id, tuple({address: None for said in fitting for address in said.addresses})


def listed(addresses: Sequence[str]) -> list[Found]:
    import trio

    from nolocod.watch.runs import as_stranger, find_runs

    return trio.run(as_stranger, addresses, find_runs)


def _runs(options: argparse.Namespace) -> None:
    from nolocod.p2p import lean

    lean.leave_out()
    found = listed(bootstraps(options.bootstrap, DataDir(options.data_dir)))
    if options.fits:
        from nolocod.watch.runs import fits

        found = [one for one in found if fits(one.said)]
    for one in found:
        live = {"nodes": one.nodes, "round": one.round, "loss": one.loss}
        print(json.dumps(_fields(one.said) | live) if options.json else line(one))
    if not found and not options.json:
        print("No run is announced that fits." if options.fits else "No run is announced.", file=sys.stderr)


def line(one: Found) -> str:
    from nolocod.observe.words import amount

    said = one.said
    goal = f" of {said.rounds}" if said.rounds else ""
    now = "no node answers" if one.nodes is None else f"{one.nodes} nodes or more, round {one.round}{goal}"
    needs = f"{said.parameters / 1e6:.3g} M parameters, {amount(said.memory)} of memory"
    about = " · ".join(text for text in (said.description, said.licence, said.contact) if text)
    lines = [f"{said.name}  {said.run_id[:12]}  {now}", f"    {said.model}, {needs}, access {said.access}"]
    return "\n".join([*lines, *([f"    {about}"] if about else [])])


def _fields(said: Announcement) -> dict[str, object]:
    from nolocod.run.announcements import link

    told = {name: value for name, value in vars(said).items() if name != "raw"}
    return told | {"links": [text for address in said.addresses if (text := link(said.run_id, address))]}


def _announce(options: argparse.Namespace) -> None:
    from nolocod.disk import write_private
    from nolocod.identity import load
    from nolocod.run.announcements import LONGEST, Announcement, sign
    from nolocod.run.manifest import stored_manifest

    paths, now = DataDir(options.data_dir), time.time()
    if (sealed := stored_manifest(paths)) is None:
        raise UsageError(f"{options.data_dir} belongs to no run.", remedy="Create one with `nolocod create RUN.toml`.")
    owner, manifest = load(paths.identity), sealed.manifest
    if manifest.owner != owner.peer_id:
        raise WrongRunError(f"run {manifest.name} belongs to {manifest.owner}.", remedy="Only its owner can announce it.")
    if (lasts := parse_span(options.expires, "--expires")) > LONGEST:
        raise UsageError(f"--expires {options.expires} is longer than {LONGEST / 86400:.0f}d.")
    addresses = _addresses(options.address, paths)
    from nolocod.trainer.estimate import estimate  # imports torch

    needs = estimate(manifest, paths.base if manifest.base else None)
    said = sign(
        Announcement(
            run_id=sealed.run_id,
            owner=owner.peer_id,
            version=now,
            expires=now + lasts,
            addresses=addresses,
            withdrawn=options.withdraw,
            name=manifest.name,
            description=options.description,
            model=str(manifest.model["model_type"]),
            parameters=needs.parameters,
            memory=needs.on_device + needs.activations + needs.on_host,
            message=needs.message,
            rounds=manifest.outer.rounds,
            data=manifest.data.source,
            access=manifest.access,
            licence=options.licence,
            contact=options.contact,
        ),
        owner,
    )
    write_private(paths.announcement, said.raw)
    untold = _tell(said, options.bootstrap)
    if options.json:
        print(json.dumps(_fields(said) | {"not_told": {peer: str(error) for peer, error in untold.items()}}))
        return
    for peer, error in untold.items():
        print(f"{peer[-8:]} was not told: {error.cause}", file=sys.stderr)
    if said.withdrawn:
        print(f"{said.name} is withdrawn. The running node of this data directory tells the others.")
        return
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(said.expires))
    print(f"{said.name} is announced until {until}. The running node of this data directory tells the others.")
    print("others join with:", *(f"  nolocod join {text}" for text in _fields(said)["links"]), sep="\n")  # type: ignore[attr-defined]


def _addresses(given: Sequence[str], paths: DataDir) -> tuple[str, ...]:
    from nolocod.node import data_directory
    from nolocod.observe.status import client
    from nolocod.p2p.transport.multiaddrs import split
    from nolocod.run.announcements import MAX_ADDRESSES

    for address in given:
        split(address)
    if given:
        return tuple(given)
    try:
        return client.read(data_directory.find_running(paths)).addresses[:MAX_ADDRESSES]
    except (NotRunningError, HttpTokenError) as error:
        remedy = "Start the node first, or give addresses of the run with --address."
        raise UsageError(f"no node of this run can be named: {error.cause}", remedy=remedy) from error


def _tell(said: Announcement, addresses: Sequence[str]) -> dict[PeerId, RemoteError]:
    """Tell these nodes; whom it could not be told, and why."""
    if not addresses:
        return {}
    import trio

    from nolocod.watch.runs import as_stranger, tell

    async def push(seeker: Seeker) -> dict[PeerId, RemoteError]:
        return await tell(seeker, said)

    return trio.run(as_stranger, addresses, push)
