"""Commands of a run's owner: found it, keep its network private, say who may be a member."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import NotRunningError, UsageError
from nolocod.node import data_directory
from nolocod.node.base import link_base
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest
from nolocod.units import parse_line, parse_span

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.identity import Identity
    from nolocod.run.manifest import Manifest, Sealed


def add_to(commands: Commands) -> None:
    """create, network-key, invite, revoke."""
    create = commands.add_here("create", _create, "Check a run file, sign it, and print the run id.", "nolocod create run.toml")
    create.add_argument("run_file", type=Path, metavar="RUN.toml", help="every key is in docs/run-file.md")
    create.add_argument("--plan", action="store_true", help="only print what a node needs: memory, disk, bytes, time")
    create.add_argument(
        "--devices", "--device", default="auto", metavar="NAMES", help="with --plan: as `start` takes them (%(default)s)"
    )
    about = "with --plan: the speed of the line, down and up, or one for both (%(default)s)"
    create.add_argument("--line", default="100Mbit", metavar="DOWN/UP", help=about)
    create.add_argument(
        "--measure", action="store_true", help="with --plan: train the model here for a moment, and tell what it took"
    )
    create.add_argument(
        "--data", type=Path, metavar="PATH", help="with --measure: the text, where the run leaves it to each node"
    )
    create.add_argument("--json", action="store_true", help="print one JSON object")
    about = "Make the key of a private network. All its nodes need the same file."
    key = commands.add("network-key", _network_key, about, "nolocod network-key team.key")
    key.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    about = "Print a token with which somebody can join the run of this data directory."
    invite = commands.add_here("invite", _invite, about, "nolocod invite --expires 12h")
    invite.add_argument(
        "--expires", default="30d", metavar="SPAN", help="membership ends after this time: 12h, 30d, 2w (%(default)s)"
    )
    invite.add_argument("--peer", default="", metavar="PEER", help="only this peer id may use the token")
    invite.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="put this address into the token, instead of the running node's",
    )
    invite.add_argument("--list", action="store_true", help="list the invitations that exist; make none")
    invite.add_argument("--json", action="store_true", help="print one JSON object (with --list: one per line)")
    revoke = commands.add_here("revoke", _revoke, "Revoke invitations, or the membership of peers.", "nolocod revoke 3f9a0c1d")
    revoke.add_argument("names", nargs="+", metavar="INVITATION|PEER", help="as `invite --list` shows it, or a peer id")


def _create(options: argparse.Namespace) -> None:
    if options.plan:
        _plan(options)
        return
    paths = DataDir(options.data_dir)
    manifest, folder = _checked(options)
    sealed = data_directory.keep(paths, manifest)
    if manifest.base is not None and folder is not None:
        link_base(manifest.base, folder, paths.base)
    if options.json:
        print(json.dumps({"run_id": sealed.run_id, "run_name": sealed.manifest.name, "owner": sealed.manifest.owner}))
        return
    print(f"run {sealed.manifest.name}, signed by {sealed.manifest.owner}")
    print(f"run id {sealed.run_id}")
    more = " --data PATH" if sealed.manifest.data.from_node else ""
    print(f"first node: nolocod start --data-dir {options.data_dir}{more}")


def _checked(options: argparse.Namespace) -> tuple[Manifest, Path | None]:
    """What the run file says, as nodes can train it, and the folder of the model that it starts from."""
    from nolocod.trainer import founding

    return founding.read(options.run_file, lambda line: print(line, file=sys.stderr))


def _plan(options: argparse.Namespace) -> None:
    """What libraries take of memory is seen by importing first what the network process has, and then what the trainer has."""
    down, up = parse_line(options.line, "--line")
    from nolocod.trainer import memory

    bare = memory.held()
    from nolocod.node.config import NodeConfig
    from nolocod.node.daemon import Node  # noqa: F401 - what the network process has in memory

    network = memory.held()
    manifest, base = _checked(options)
    from nolocod.commands import terminal
    from nolocod.trainer.capture import Plan
    from nolocod.trainer.devices import find_devices, is_sharded
    from nolocod.trainer.estimate import Machine, estimate, needs_on
    from nolocod.trainer.faster import on_processor
    from nolocod.trainer.model import fast_kind
    from nolocod.trainer.opening import open_shared  # noqa: F401 - and the trainer
    from nolocod.trainer.speed import speed

    devices = find_devices(options.devices)
    trainer = bare + memory.held() - network
    run, on_cpu = estimate(manifest, base, fast_kind(devices[0]), devices), devices[0].type == "cpu"
    held = memory.held()
    on_processor(Plan(manifest.codec, manifest.outer, ()), run.trained)  # it compiles what a trainer of the run would
    trainer += memory.held() - held
    machine = Machine(0.0, down, up, network=network, trainer=trainer, processes=len(devices), on_cpu=on_cpu)
    if is_sharded(options.devices):
        machine = replace(machine, shards=len(devices))
    measured = None
    if options.measure:
        import trio

        from nolocod.trainer.measure import measure

        measured = trio.run(measure, manifest, options.devices, options.data, base, options.data_dir)
        machine = replace(machine, step=measured.step, disk=measured.disk)
    else:  # processes on the CPU share its cores
        machine = replace(machine, step=run.step_seconds(speed(devices[0])) / (1 if on_cpu else len(devices)))
    needs = needs_on(run, machine, NodeConfig.grace)
    if options.json:
        told = {"run": asdict(run), "machine": asdict(machine), "needs": asdict(needs), "devices": [*map(str, devices)]}
        print(json.dumps(told | {"measured": asdict(measured) if measured else None}))
        return
    terminal.show(terminal.plan_table(manifest, run, machine, needs, measured))


def _network_key(options: argparse.Namespace) -> None:
    from nolocod.run import credentials

    credentials.make_network_key(options.file)
    print(f"{options.file}: give it to those who may be in the network, and to nobody else")


def _invite(options: argparse.Namespace) -> None:
    import msgspec

    from nolocod.observe.status import client
    from nolocod.p2p.transport.multiaddrs import split
    from nolocod.run import credentials

    paths = DataDir(options.data_dir)
    if options.list:
        for note in credentials.issued(paths):
            told = f"{note.id}  until {_day(note.expires)}  {note.peer or 'anybody'}"
            print(json.dumps(msgspec.structs.asdict(note)) if options.json else told)
        return
    bootstrap = options.bootstrap
    for address in bootstrap:
        split(address)
    if not bootstrap:
        try:
            bootstrap = client.read(data_directory.find_running(paths)).addresses
        except NotRunningError:
            print("No node runs here: who uses the token needs --bootstrap as well.", file=sys.stderr)
    sealed, owner = _owned(options)
    grant = credentials.Grant(time.time(), parse_span(options.expires, "--expires"), options.peer, tuple(bootstrap))
    note, token = credentials.issue(paths, sealed, owner, grant)
    if options.json:
        print(json.dumps(msgspec.structs.asdict(note) | {"token": token}))
        return
    print(f"invitation {note.id}, until {_day(note.expires)}, for {note.peer or 'whoever holds the token'}", file=sys.stderr)
    if sealed.manifest.access == "open":
        print('The run has access = "open": membership needs no invitation, and nobody can be revoked.', file=sys.stderr)
    print(token)


def _revoke(options: argparse.Namespace) -> None:
    from nolocod.run import credentials

    sealed, owner = _owned(options)
    revoked = credentials.revoke(DataDir(options.data_dir), sealed, owner, options.names)
    print(f"version {revoked.version}: {len(revoked.invitations)} invitations and {len(revoked.peers)} peers are revoked")
    print("A running node of this data directory tells the others.")


def _owned(options: argparse.Namespace) -> tuple[Sealed, Identity]:
    """The run of the data directory, and the identity that may have founded it."""
    from nolocod.identity import load_or_create

    if (sealed := stored_manifest(DataDir(options.data_dir))) is None:
        raise UsageError(f"{options.data_dir} belongs to no run.", remedy="Create one with `nolocod create RUN.toml`.")
    return sealed, load_or_create(DataDir(options.data_dir).identity)


def _day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))
