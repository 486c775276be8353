"""The owners' command that changes a run while it goes on."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.errors import AmendmentError, DataDirError, HttpTokenError, NotRunningError, UsageError
from nolocod.paths import DataDir, newest_round

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.run.amendments import Amendments
    from nolocod.run.manifest import Sealed
    from nolocod.run.owners import Change

_SOON = 10
"""Rounds ahead of our own from which a change counts, where nothing else is said: all nodes hear of it before."""
_VALUES = ("rounds", "learning_rate", "schedule", "dataset", "subset", "split", "field", "release")


def add_to(commands: Commands) -> None:
    """amend."""
    amend = commands.add_here(
        "amend",
        _amend,
        "Change a run while it goes on, from a round on. Its owners can do that; with no change named, list all of them.",
        'nolocod amend --at 500 --rounds 2000 --learning-rate 3e-4 --note "we go on"',
    )
    add = amend.add_argument
    add("--at", type=int, metavar="ROUND", help=f"from which it counts ({_SOON} after the round of the node that runs here)")
    add("--rounds", type=int, metavar="N", help="the goal (outer.rounds); 0 for none")
    add("--end", action="store_true", help="the run ends at --at")
    add("--learning-rate", type=float, metavar="RATE", help="inner.learning_rate")
    add("--schedule", metavar="NAME", help="inner.schedule: wsd, cosine or constant")
    for key in ("dataset", "subset", "split", "field"):
        add(f"--{key}", metavar="NAME", help=f"data.{key}, of a run that trains on a data set of the hub")
    add("--release", metavar="VERSION", help="older releases of nolocod train no more then")
    add("--bootstrap", action="append", default=[], metavar="MULTIADDR", help="a further address of the run; repeatable")
    add("--pause", action="store_true", help="all nodes wait")
    add("--resume", action="store_true", help="they go on, at once")
    add("--note", default="", metavar="TEXT", help="to people")
    add("--drop", action="store_true", help="take back what does not count yet, and do not add to it")
    add("--sign", type=Path, metavar="FILE", help="sign what another owner wrote, where a run needs several")
    add("--out", type=Path, metavar="FILE", help="where to write what needs another owner's signature (amendment)")
    add("--json", action="store_true", help="print one JSON object")


def _amend(options: argparse.Namespace) -> None:
    from nolocod import identity
    from nolocod.run import amendments
    from nolocod.run.manifest import stored_manifest

    paths = DataDir(options.data_dir)
    if (sealed := stored_manifest(paths)) is None:
        raise DataDirError(f"{paths.root} belongs to no run.", remedy="Name the --data-dir of a node of the run.")
    known = _known(paths, sealed)
    if options.sign is not None:
        raw = amendments.sign(_read(options.sign), sealed, identity.load(paths.identity))
    elif (changes := _changes(options, paths, sealed, known)) is not None:
        raw = amendments.propose(sealed, known.version + 1, changes, identity.load(paths.identity))
    else:
        _tell(options, sealed, known, "")
        return
    made, asked = amendments.read(raw, sealed, complete=False), amendments.needed(sealed.manifest)
    if not known.before(made, sealed.manifest.owner):
        raise AmendmentError(f"it is version {made.version}, and version {known.version} is known.", remedy="Make it anew.")
    from nolocod.disk import write_whole

    left, out = asked - len(made.signers), options.out or options.sign or Path("amendment")
    write_whole(out if left > 0 else paths.amendments, raw)
    how = f"Signatures that are missing: {left}. Another owner signs with: nolocod amend --sign {out}"
    _tell(options, sealed, made, how if left > 0 else "A node that runs here tells the others within seconds.")


def _changes(options: argparse.Namespace, paths: DataDir, sealed: Sealed, known: Amendments) -> list[Change] | None:
    """All changes with the one that is asked for; None if none is."""
    import msgspec

    from nolocod.run.owners import Change

    said: dict[str, Any] = {key: value for key in _VALUES if (value := getattr(options, key)) is not None}
    if options.pause and options.resume:
        raise UsageError("a run cannot wait and go on.", remedy="Give --pause or --resume.")
    if options.pause or options.resume:
        said["paused"] = options.pause
    if options.bootstrap:
        from nolocod.p2p.transport.multiaddrs import split

        for text in options.bootstrap:
            split(text)  # it raises for what is none
        said["bootstrap"] = tuple(options.bootstrap)
    if not (said or options.end or options.drop):
        return None
    number = _round(paths)
    turns = sealed.manifest.outer.turns
    force = known.in_force((newest_round(paths.checkpoints) if number is None else number) // turns)
    later = () if options.drop else known.changes[len(force) :]
    if options.drop and not (said or options.end):
        if not force or len(force) == len(known.changes):
            raise AmendmentError("nothing is there that could be taken back.")
        return [*force]
    begun = force[-1].at if force else 0
    at = options.at
    if at is None and options.resume:  # rounds stand still: it counts as soon as it is heard
        at = max([begun, *(one.at for one in later if one.paused)])
    elif at is None:
        if number is None:
            raise UsageError("no node runs here that could tell the round.", remedy="Give --at ROUND.")
        at = max(number // turns + _SOON, begun)
    said |= {"at": at, "note": options.note, **({"rounds": at} if options.end else {})}
    try:
        return [*force, *sorted([*later, msgspec.convert(said, Change)], key=lambda one: one.at)]
    except msgspec.ValidationError as error:
        raise AmendmentError(f"{error}") from error


def _round(paths: DataDir) -> int | None:
    """The round of the node that runs in this data directory; None if none does."""
    from nolocod.node import data_directory
    from nolocod.observe.status import client

    with suppress(NotRunningError, HttpTokenError):
        return client.read(data_directory.find_running(paths)).round
    return None


def _known(paths: DataDir, sealed: Sealed) -> Amendments:
    from nolocod.p2p.membership.amended import AmendedRun

    return AmendedRun(sealed, paths.amendments, lambda: 0, lambda _: None).known


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AmendmentError(f"{path} cannot be read ({error.strerror}).", remedy="Name the file of an amendment.") from error


def _tell(options: argparse.Namespace, sealed: Sealed, known: Amendments, follows: str) -> None:
    """Print what is changed, and what is to be done."""
    rows = [{"from round": change.at, "change": change.words} for change in known.changes]
    if options.json:
        facts = {"run_id": sealed.run_id, "version": known.version, "signed_by": known.signers, "changes": rows}
        print(json.dumps(facts | {"follows": follows}))
        return
    print(f"run {sealed.manifest.name} ({sealed.run_id[:12]}): {'changed' if rows else 'as it was founded'}")
    for row in rows:
        print(f"  from round {row['from round']} on: {row['change']}")
    if follows:
        print(follows)
