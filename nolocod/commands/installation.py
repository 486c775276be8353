"""Commands about the installed program: whether the run needs a newer one, and what a shell completes."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from nolocod import __version__
from nolocod.commands import bootstrap_option
from nolocod.errors import NoBootstrapError, NotRunningError, UsageError, VersionError
from nolocod.identity import PeerId
from nolocod.paths import DataDir
from nolocod.proto.envelope import MAJOR
from nolocod.run.manifest import RunId, stored_manifest
from nolocod.units import release_numbers

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from nolocod.commands import Commands
    from nolocod.run.manifest import Sealed
    from nolocod.watch.observer import Seeker


def add_to(commands: Commands, parser: ArgumentParser) -> None:
    """update, completion; `parser` has all commands."""
    about = "Tell whether a run needs a newer version than this one, and the command that installs it. It installs nothing."
    update = commands.add_here("update", _update, about, "nolocod update --json")
    text = "the run, by its name, link or the address of one of its nodes (that of the data directory)"
    update.add_argument("name", nargs="?", metavar="NAME|LINK", help=text)
    bootstrap_option(update)
    update.add_argument("--json", action="store_true", help="print one JSON object")
    complete, about = partial(_complete, parser), "Print a script that completes commands and flags in your shell."
    completion = commands.add("completion", complete, about, "nolocod completion bash")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="docs/volunteer.md says where the script goes")


def _complete(parser: ArgumentParser, options: Namespace) -> None:
    import shtab

    def with_files(parser: ArgumentParser) -> ArgumentParser:
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's own way to be told
            elif isinstance(action.choices, dict):
                list(map(with_files, action.choices.values()))
        return parser

    print(shtab.complete(with_files(parser), options.shell))


def _update(options: Namespace) -> None:
    reason, run = "", "the run"
    releases: tuple[str, ...] = ()
    try:
        sealed, releases = _asked(options, DataDir(options.data_dir))
        run = f"run {sealed.manifest.name} ({sealed.run_id[:12]})"
        if sealed.manifest.protocol > MAJOR:
            reason = f"it speaks protocol version {sealed.manifest.protocol}, and this release {MAJOR}."
    except VersionError as error:  # of a manifest or a protocol that this release cannot read
        reason = error.cause
    known = sorted(filter(release_numbers, releases), key=release_numbers)
    usual = known[(len(known) - 1) // 2] if known else ""  # the median: a few who lie change nothing
    newer = usual if release_numbers(usual) > release_numbers(__version__) else ""
    command = shlex.join(updating(Path(sys.prefix)))
    if options.json:
        told = {"installed": __version__, "run": run, "needed": bool(reason), "reason": reason, "newer": newer}
        print(json.dumps(told | {"releases": releases, "command": command}))
        return
    if reason:
        print(f"nolocod {__version__}: {run} needs a newer version: {reason}")
    elif newer:
        print(f"nolocod {__version__}: good for {run}, but half of its members have {newer} or newer.")
    else:
        members = f"; its members have {', '.join(dict.fromkeys(releases))}" if releases else "; no member answered"
        print(f"nolocod {__version__}: good for {run}{members}.")
    if reason or newer:
        print("update it, and start the node again:", f"  {command}", sep="\n")


def _asked(options: Namespace, paths: DataDir) -> tuple[Sealed, tuple[str, ...]]:
    """The run, and the releases of its members, as one of its nodes tells it."""
    import trio

    from nolocod.commands.registry import found_by
    from nolocod.run import credentials
    from nolocod.run.announcements import Announcement
    from nolocod.watch.runs import as_stranger, live

    run_id, addresses = "", tuple(options.bootstrap)
    stored = None if options.name or addresses else stored_manifest(paths)
    if options.name:
        run_id, addresses = found_by(options.name, addresses, paths)
    elif stored is not None:
        run_id, addresses = stored.run_id, _known(paths)
    elif not addresses:
        raise UsageError(f"{paths.root} belongs to no run.", remedy="Name one: its name, link, or the address of a node.")

    async def look(seeker: Seeker) -> tuple[Sealed, tuple[str, ...]]:
        sealed = await seeker.find(RunId(run_id))
        owner = PeerId(sealed.manifest.owner)
        said = Announcement(run_id=sealed.run_id, owner=owner, version=0, expires=0, addresses=addresses)
        return sealed, (await live(seeker, said)).releases

    prologue = credentials.prologue(credentials.network_key(paths, None))
    try:
        found: tuple[Sealed, tuple[str, ...]] = trio.run(as_stranger, addresses, look, prologue)
        return found
    except NoBootstrapError:
        if stored is None:
            raise
        return stored, ()


def _known(paths: DataDir) -> tuple[str, ...]:
    """The node that runs here, or else those that it knew last."""
    from nolocod.node import data_directory
    from nolocod.p2p.discovery.address_book import AddressBook

    with suppress(NotRunningError):
        return data_directory.find_running(paths).addresses
    book = AddressBook(paths.peers, lambda _: None).recent()[:8]
    return tuple(f"{addresses[0]}/p2p/{peer}" for peer, addresses in book if addresses)


def updating(prefix: Path) -> list[str]:
    """The command that updates an installation there, in the way in which it was made."""
    if (prefix / "uv-receipt.toml").exists():
        return ["uv", "tool", "upgrade", "nolocod"]
    if (prefix / "pipx_metadata.json").exists():
        return ["pipx", "upgrade", "nolocod"]
    package = distribution("nolocod")
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return ["git", "-C", unquote(urlsplit(origin["url"]).path), "pull", "--ff-only"]
    if (package.read_text("INSTALLER") or "").strip() == "uv":
        return ["uv", "pip", "install", "--python", sys.executable, "--upgrade", "nolocod"]
    return [sys.executable, "-m", "pip", "install", "--upgrade", "nolocod"]
