"""Commands about who a node is: its identity, and the backup of it."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.commands import Commands
from nolocod.errors import UsageError
from nolocod.node import data_directory
from nolocod.paths import DataDir

if TYPE_CHECKING:
    import argparse


def add_to(commands: Commands) -> None:
    """id."""
    own = commands.add_here("id", _id, "Print this node's peer id. Makes an identity if there is none.", "nolocod id")
    own.add_argument("--json", action="store_true", help="print one JSON object")
    below = Commands.of(own, here=True)
    about = "Write this node's identity to a file that a passphrase protects."
    backup = below.add_here("backup", _backup, about, "nolocod id backup node.backup")
    backup.add_argument("file", type=Path, metavar="FILE")
    backup.add_argument("--no-passphrase", action="store_true", help="do not encrypt: whoever reads the file is this node")
    about = "Restore an identity from a backup. Never overwrites another identity."
    restore = below.add_here("restore", _restore, about, "nolocod id restore node.backup")
    restore.add_argument("file", type=Path, metavar="FILE")


def _id(options: argparse.Namespace) -> None:
    from nolocod.identity import load_or_create

    paths = DataDir(options.data_dir)
    data_directory.make(paths)
    peer_id = load_or_create(paths.identity).peer_id
    print(json.dumps({"peer_id": peer_id}) if options.json else peer_id)


def _backup(options: argparse.Namespace) -> None:
    from nolocod.identity import load
    from nolocod.node import identity_backup

    identity = load(DataDir(options.data_dir).identity)
    identity_backup.must_be_new(options.file)  # before anybody thinks of a passphrase
    passphrase = None if options.no_passphrase else _new_passphrase()
    identity_backup.write(options.file, identity, passphrase)
    print(f"{options.file}: the identity of {identity.peer_id}")
    if passphrase is None:
        print("It is not encrypted: whoever can read the file is this node.", file=sys.stderr)


def _restore(options: argparse.Namespace) -> None:
    from nolocod.node import identity_backup

    paths = DataDir(options.data_dir)
    stored = identity_backup.read(options.file)
    with data_directory.hold(paths):
        identity_backup.must_be_free(paths.identity)
        identity = stored.open(_passphrase("Passphrase: ") if stored.encrypted else None)
        identity_backup.put_back(identity, paths.identity)
    print(identity.peer_id)


def _new_passphrase() -> str:
    passphrase = _passphrase("Passphrase for the backup: ")
    if sys.stdin.isatty() and getpass.getpass("The same again: ") != passphrase:
        raise UsageError("the two passphrases differ.", remedy="Type the same one twice.")
    return passphrase


def _passphrase(prompt: str) -> str:
    """From the terminal without showing it, or the first line of standard input. UsageError for an empty one."""
    passphrase = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not passphrase:
        raise UsageError("the passphrase is empty.", remedy="Type one, or give --no-passphrase for an open backup.")
    return passphrase
