"""The card of an exported model: what it was made of, by whom it was signed, and what became of it.

The rule: each line comes from what is signed or stored: the manifest, the last checkpoint, and receipts that verify. What a
command measures later (`nolocod eval --into`) lies beside the card, in eval.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod import __version__
from nolocod.disk import write_whole
from nolocod.p2p.exchange import receipt_audit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.paths import DataDir
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.checkpoint import State
    from nolocod.watch.gather import Weights


def of_checkpoint(paths: DataDir, sealed: Sealed, state: State) -> list[str]:
    """What a card says of a model from the checkpoint with `state`."""
    standing = state.standing
    verdict = receipt_audit.verify(receipt_audit.stored(paths.receipts), sealed.run_id)
    partners = {side.peer_id for receipt in verdict.receipts for side in receipt.parsed.sides} - {state.peer_id}
    return [
        _rounds(sealed, (standing.round,)),
        f"| tokens | {standing.tokens:,} behind these weights: this node's, and of the weights that it took over |",
        f"| training loss | {standing.loss:.4f} nats per token, lately |",
        f"| exchanges | {len(verdict.receipts)}, each signed by this node and its partner; partners: {len(partners)} |",
        f"| receipts' digest | `{receipt_audit.digest(verdict.receipts)}` |",
        f"| written by | `{state.peer_id}` |",
        "",
        "Anybody can check the receipts that lead to the digest with `nolocod receipts verify FILE`.",
    ]


def of_members(sealed: Sealed, members: Sequence[Weights]) -> list[str]:
    """What a card says of the mean of the weights of `members`."""
    peers = ", ".join(f"`{one.peer}`" for one in members)
    return [_rounds(sealed, [one.round for one in members]), f"| weights | the mean of {len(members)} nodes': {peers} |", ""]


def _rounds(sealed: Sealed, numbers: Sequence[int]) -> str:
    outer, inner = sealed.manifest.outer, sealed.manifest.inner
    goal = f" of {outer.rounds // outer.turns}" if outer.rounds else ""
    rounds = " to ".join(str(number // outer.turns) for number in sorted({min(numbers), max(numbers)}))
    return f"| rounds | {rounds}{goal}, of {inner.steps * outer.turns} inner steps with {inner.tokens_per_step:,} tokens each |"


def write(sealed: Sealed, told: Sequence[str], out: Path) -> None:
    """Write README.md, the card, to the folder `out` of a model; `told`: what `of_checkpoint` or `of_members` gives."""
    manifest = sealed.manifest
    base, data = manifest.base, manifest.data
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- nolocod"]
    if base is not None and base.source:
        front += [f"base_model: {base.source}"]
    sets = [f"{f'{weight:g} of ' * bool(data.mixture)}`{part.dataset}` of the hub, {part.split}" for part, weight in data.parts]
    source = "; ".join(sets) if data.source == "hub" else data.source + ", each node's own" * data.from_node
    if base is None:
        began = f"Weights drawn from seed {manifest.seed}."
    elif base.source:
        began = f"`{base.source}` at revision `{base.revision}`, {len(base.files)} files pinned by hash."
    else:
        began = f"A published model of {len(base.files)} files, pinned by hash in the run's manifest."
    adapter = [] if (one := manifest.adapter) is None else [f"| trained | {one.kind}, rank {one.rank}, alpha {one.alpha:g} |"]
    lines = [
        *front, "---", "", f"# {manifest.name}", "",
        f"Trained by volunteers with nolocod {__version__} (NoLoCo, arXiv 2506.10911): no coordinator, no all-reduce.", "",
        "| | |", "|---|---|",
        f"| run | `{sealed.run_id}` |",
        f"| begun with | {began} |", *adapter,
        f"| data | {source} |",
        *told,
        "What was evaluated stands in eval.md beside this page, if it was "
        "(`nolocod eval --model DIR --tasks NAME --into DIR`).", "",
        "Licence: that of the base model and of the data; this page does not know it.", "",
    ]  # fmt: skip
    write_whole(out / "README.md", "\n".join(lines).encode())
