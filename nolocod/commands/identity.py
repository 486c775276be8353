"""Commands about who a node is, and what it can prove: its identity, its backup, its receipts."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.commands import Commands
from nolocod.errors import ReceiptError, UsageError
from nolocod.node import data_directory
from nolocod.run.manifest import stored_manifest
from nolocod.run.paths import DataDir

if TYPE_CHECKING:
    import argparse

    from nolocod.p2p.exchange.receipt_audit import Verdict


def add_to(commands: Commands) -> None:
    """id, receipts."""
    own = commands.add_here("id", _id, "Print this node's peer id; makes the identity if there is none.")
    below = Commands.of(own, here=True)
    for name, run, text in (
        ("backup", _backup, "Write this node's identity to a file that a passphrase protects."),
        ("restore", _restore, "Make this node the one of a backup; never in place of another identity."),
    ):
        command = below.add_here(name, run, text)
        command.add_argument("file", type=Path, metavar="FILE")
        if name == "backup":
            command.add_argument("--no-passphrase", action="store_true", help="whoever can read the file is this node")
    receipts = Commands.of(commands.add("receipts", _which, "What exchanges left behind, signed by both partners."))
    listed = receipts.add_here("list", _list, "The receipts of this node, oldest first.")
    listed.add_argument("--json", action="store_true", help="one JSON object per receipt")
    checked = receipts.add_here("verify", _verify, "Check receipts offline: those of a file, or all of this node.")
    checked.add_argument("files", nargs="*", type=Path, metavar="FILE")
    checked.add_argument("--manifest", type=Path, metavar="FILE", help="the manifest of the run that they must be of")
    checked.add_argument("--json", action="store_true", help="one JSON object")
    shown = receipts.add_here("show", _show, "One receipt; as a file, anybody can verify it with nothing else.")
    shown.add_argument("session", metavar="SESSION", help="as `list` shows it; its first characters are enough")
    shown.add_argument("--out", type=Path, metavar="FILE", help="write it there, for others")


def _id(options: argparse.Namespace) -> None:
    from nolocod.identity import load_or_create

    paths = DataDir(options.data_dir)
    data_directory.make(paths)
    print(load_or_create(paths.identity).peer_id)


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
        raise UsageError("the passphrase is empty.", remedy="Type one, or say --no-passphrase to leave a backup open.")
    return passphrase


def _which(_options: argparse.Namespace) -> None:
    raise UsageError("receipts needs one of list, verify and show.", remedy="See `nolocod receipts --help`.")


def _stored(options: argparse.Namespace) -> Verdict:
    from nolocod.p2p.exchange import receipt_audit

    return receipt_audit.verify(receipt_audit.stored(DataDir(options.data_dir).receipts))


def _list(options: argparse.Namespace) -> None:
    from nolocod.p2p.exchange import receipt_audit

    for receipt in _stored(options).receipts:
        print(json.dumps(receipt_audit.as_fields(receipt)) if options.json else receipt_audit.summary(receipt))


def _verify(options: argparse.Namespace) -> None:
    from nolocod.p2p.exchange import receipt_audit

    files = options.files or receipt_audit.stored(DataDir(options.data_dir).receipts)
    verdict = receipt_audit.verify(files, _run_of(options))
    if options.json:
        print(
            json.dumps(
                {
                    "verified": [receipt_audit.as_fields(receipt) for receipt in verdict.receipts],
                    "faults": verdict.faults,
                    "proofs": [{"peer_id": proof.peer, "says": str(proof)} for proof in verdict.proofs],
                }
            )
        )
    else:
        if options.files:
            for receipt in verdict.receipts:
                print(receipt_audit.summary(receipt))
        print(f"{len(verdict.receipts)} verified, {len(verdict.faults)} not")
        for proof in verdict.proofs:
            print(f"PROOF: {proof}")
    if verdict.faults:
        more = f" And {len(verdict.faults) - 1} more." if len(verdict.faults) > 1 else ""
        raise ReceiptError(verdict.faults[0] + more)


def _run_of(options: argparse.Namespace) -> str | None:
    """The run that receipts must be of: the manifest's that was named, or for this node's own receipts its run."""
    from nolocod.run.manifest import unseal

    if options.manifest is not None:
        return unseal(data_directory.read_foreign(options.manifest)).run_id
    sealed = None if options.files else stored_manifest(DataDir(options.data_dir))
    return None if sealed is None else sealed.run_id


def _show(options: argparse.Namespace) -> None:
    from nolocod.p2p.exchange import receipt_audit

    receipt = receipt_audit.find(_stored(options).receipts, options.session)
    if options.out is not None:
        receipt_audit.export(receipt, options.out)
        print(f"{options.out}: anybody can check it with `nolocod receipts verify`")
        return
    print(json.dumps(receipt_audit.as_fields(receipt), indent=2))
