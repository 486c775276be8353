"""The command about what nodes gave: own and others', shown, exported and verified."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import NotRunningError, UsageError
from nolocod.paths import DataDir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from nolocod.commands import Commands
    from nolocod.observe.events import Contribution
    from nolocod.proto.receipt import Receipt


def add_to(commands: Commands) -> None:
    """contributions."""
    about = "Show what this node and others gave to the run, counted from receipts that both partners signed."
    given = commands.add_here("contributions", _contributions, about, "nolocod contributions --export mine.contributions")
    add = given.add_mutually_exclusive_group().add_argument
    add("--export", type=Path, metavar="FILE", help="write what this node gave to a file that anybody can verify")
    add("--verify", type=Path, metavar="FILE", help="verify such a file, of any node, with nothing else")
    add("--badge", type=Path, metavar="FILE", help="write a badge (SVG) that says what this node gave")
    given.add_argument("--json", action="store_true", help="print one JSON object")


def _contributions(options: argparse.Namespace) -> None:
    if options.verify is not None:
        _verify(options.verify, as_json=options.json)
        return
    paths = DataDir(options.data_dir)
    if options.export is not None:
        _export(paths, options.export, as_json=options.json)
        return
    run_name, own, others = _known(paths)
    if options.badge is not None:
        from nolocod.disk import write_whole
        from nolocod.observe.status.badge import svg

        write_whole(options.badge, svg(run_name, own))
    if options.json:
        import msgspec

        print(msgspec.json.encode({"run_name": run_name, "own": own, "contributors": others}).decode())
        return
    print(f"this node, to {run_name}: {_line(own) if own else 'no exchange yet'}")
    for one in others:
        print(f"  …{one.peer_id[-8:]}  {_line(one)}  {one.name}".rstrip())


def _line(one: Contribution) -> str:
    from nolocod.observe.status.badge import told

    return f"{told(one)}, {one.exchanges} exchanges known, {one.partners} partners"


def _known(paths: DataDir) -> tuple[str, Contribution | None, Sequence[Contribution]]:
    """The run's name, what this node gave, and who gave most: as the running node knows, or else as its disk does."""
    from nolocod.node import data_directory
    from nolocod.observe.status import client

    with suppress(NotRunningError):
        report = client.read(data_directory.find_running(paths))
        return report.run_name, report.given, report.contributors
    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.contributions import Tally, points

    (run_name, _), own, receipts = _own(paths)
    tally = Tally(PeerId(own))
    tally.add_all(map(points, receipts))
    found = tally.contributions()
    return run_name, next((one for one in found if one.peer_id == own), None), [one for one in found if one.tokens]


def _own(paths: DataDir) -> tuple[tuple[str, str], str, list[Receipt]]:
    """The run's name and id, this node, and the receipts of the run on its disk, all signatures checked."""
    from nolocod.identity import load
    from nolocod.p2p.exchange import receipt_audit
    from nolocod.run.manifest import stored_manifest

    if (sealed := stored_manifest(paths)) is None:
        raise UsageError(f"{paths.root} belongs to no run.", remedy="Join one first (`nolocod join`).")
    files = [*receipt_audit.stored(paths.contributions), *receipt_audit.stored(paths.receipts)]
    receipts = receipt_audit.verify(files, sealed.run_id).receipts
    return (sealed.manifest.name, sealed.run_id), load(paths.identity).peer_id, receipts


def _export(paths: DataDir, out: Path, *, as_json: bool) -> None:
    from nolocod.identity import load
    from nolocod.node.data_directory import called
    from nolocod.p2p.exchange import contribution_file

    (run_name, run_id), _, receipts = _own(paths)
    identity = load(paths.identity)
    if not (shown := contribution_file.thinned(receipts, run_id, identity.peer_id)):
        raise UsageError("this node has no receipt that counts yet.", remedy="Let it train until its first exchanges.")
    contribution_file.write(out, identity, (run_id, run_name), called(paths), shown)
    _verify(out, as_json=as_json)


def _verify(path: Path, *, as_json: bool) -> None:
    import msgspec

    from nolocod.observe.words import plain
    from nolocod.p2p.exchange.contribution_file import read

    head, given = read(path)
    if as_json:
        print(json.dumps({"run_id": head.run_id, "run_name": head.run_name} | msgspec.structs.asdict(given)))
        return
    name = f", called {head.name}" if head.name else ""
    print(f"{path}: verified. {head.peer_id}{name}")
    print(f"gave to run {plain(head.run_name[:64])} ({plain(head.run_id[:12])}): {_line(given)}")
