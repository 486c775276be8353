"""Commands about receipts: what exchanges left behind, signed by both partners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.commands import Commands
from nolocod.errors import ReceiptError, UsageError
from nolocod.node import data_directory
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    import argparse

    from nolocod.p2p.exchange.receipt_audit import Verdict


def add_to(commands: Commands) -> None:
    """receipts."""
    about = "List, verify and show receipts: what both partners signed about each exchange."
    receipts = Commands.of(commands.add("receipts", _which, about, "nolocod receipts list"))
    listed = receipts.add_here("list", _list, "List this node's receipts, oldest first.", "nolocod receipts list --json")
    listed.add_argument("--json", action="store_true", help="print one JSON object per receipt")
    about = "Verify receipts offline: those of the files, or all of this node."
    checked = receipts.add_here("verify", _verify, about, "nolocod receipts verify one.receipt")
    checked.add_argument("files", nargs="*", type=Path, metavar="FILE")
    checked.add_argument("--manifest", type=Path, metavar="FILE", help="fail receipts of any other run than this manifest's")
    checked.add_argument("--json", action="store_true", help="print one JSON object")
    about = "Show one receipt. Written to a file, anybody can verify it without anything else."
    shown = receipts.add_here("show", _show, about, "nolocod receipts show 7c41 --out one.receipt")
    shown.add_argument("session", metavar="SESSION", help="as `list` shows it; the first characters are enough")
    shown.add_argument("--out", type=Path, metavar="FILE", help="write the receipt to this file, for others")


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
