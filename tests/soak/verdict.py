"""What a soak's samples and receipts say: what grew, who trained, and whether both sides of every exchange agree.

The rule: no processes here, figures only. Growth is told of lives that were there all the time from the end of the
warm-up to the end: their last quarter against their first quarter after the warm-up. Of memory the median counts. Tasks and
files are a tenth more while an exchange is under way, so of these the lowest tenth counts: what a node has that rests.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from nolocod.p2p.exchange import receipt_audit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.proto.receipt import Receipt

Figure = Literal["memory", "tasks", "files", "disk", "log"]


@dataclass(frozen=True)
class Sample:
    """One node at one moment: bytes, counts, nats per token. `life` counts its processes from 1."""

    at: float
    node: int
    life: int
    memory: int
    tasks: int
    files: int
    round: int
    inner_steps: int
    paired: int
    committed: int
    checkpoint: int | None
    loss: float | None
    training: bool
    disk: int = 0
    """Bytes in its directory ..."""
    log: int = 0
    """... and in its log."""


@dataclass
class Agreement:
    """What the nodes' receipts say together."""

    receipts: int = 0
    exchanges: int = 0
    faults: list[str] = field(default_factory=list)
    one_sided: int = 0
    """Exchanges of which one side has a receipt and the other, which was killed, has none."""


def growth(samples: Sequence[Sample], figure: Figure, warm: float, end: float) -> float | None:
    """The growth of `figure` after `warm`, as a share (0.02 is two in a hundred): the median over the lives that were
    there throughout. None if there are none."""
    shares = []
    quarter = (end - warm) / 4
    for life in {(sample.node, sample.life) for sample in samples}:
        its = [sample for sample in samples if (sample.node, sample.life) == life]
        first = [getattr(one, figure) for one in its if warm <= one.at < warm + quarter]
        last = [getattr(one, figure) for one in its if end - quarter <= one.at <= end]
        if first and last and its[0].at <= warm:
            shares.append(_usual(figure, last) / _usual(figure, first) - 1)
    return statistics.median(shares) if shares else None


def _usual(figure: Figure, values: Sequence[int]) -> float:
    return sorted(values)[len(values) // 10] if figure in ("tasks", "files") else statistics.median(values)


def bytes_an_hour(samples: Sequence[Sample], figure: Figure) -> float:
    """By how much `figure` grew in an hour, on the node where it grew most: from its first sample to its last, whatever its
    lives."""
    most = 0.0
    for node in {sample.node for sample in samples}:
        its = sorted((one.at, getattr(one, figure)) for one in samples if one.node == node)
        (began, first), (ended, last) = its[0], its[-1]
        most = max(most, 3600 * (last - first) / (ended - began) if ended > began else 0.0)
    return most


def agree(stores: Mapping[PeerId, Path], run_id: str, never_killed: Collection[PeerId]) -> tuple[Agreement, dict[PeerId, int]]:
    """Compare the receipts of all nodes: each verifies, and both partners hold the same one. How many each holds."""
    found = Agreement()
    held: dict[PeerId, dict[bytes, Receipt]] = {}
    for peer, path in stores.items():
        verdict = receipt_audit.verify(receipt_audit.stored(path), run_id)
        found.faults += verdict.faults
        found.faults += [str(proof) for proof in verdict.proofs]
        held[peer] = {receipt.session: receipt for receipt in verdict.receipts}
        found.receipts += len(verdict.receipts)
    sessions: set[bytes] = set()
    for peer, receipts in held.items():
        for session, receipt in receipts.items():
            sessions.add(session)
            partner = receipt.answerer if peer == receipt.offerer else receipt.offerer
            other = held.get(partner, {}).get(session)
            if peer not in (receipt.offerer, receipt.answerer):
                found.faults.append(f"{peer} holds a receipt of others, {session.hex()}")
            elif other is None and {peer, partner} <= set(never_killed):
                found.faults.append(f"{peer} has a receipt of {session.hex()}, and {partner}, which lived, has none")
            elif other is None:
                found.one_sided += 1
            elif other.content != receipt.content:
                found.faults.append(f"{peer} and {partner} hold different receipts of {session.hex()}")
    found.exchanges = len(sessions)
    return found, {peer: len(receipts) for peer, receipts in held.items()}


def unproved(samples: Sequence[Sample], receipts: Mapping[int, int]) -> list[str]:
    """Nodes that reported more committed exchanges than they hold receipts; `receipts` by node, of those that lived on."""
    told: dict[int, int] = {}
    for sample in samples:
        if sample.node in receipts:
            told[sample.node] = max(told.get(sample.node, 0), sample.committed)
    return [
        f"node {node} told of {count} exchanges and holds {receipts[node]} receipts"
        for node, count in sorted(told.items())
        if count > receipts[node]
    ]


def stood_still(samples: Sequence[Sample], nodes: Collection[int], begin: float, end: float, most: float) -> list[int]:
    """Those of `nodes` that took no inner step for longer than `most` seconds between `begin` and `end`."""
    still = []
    for node in nodes:
        moved, before = [begin], None
        for at, steps in sorted((one.at, one.inner_steps) for one in samples if one.node == node and begin <= one.at <= end):
            if steps != before:
                moved.append(at)
            before = steps
        if any(later - earlier > most for earlier, later in pairwise([*moved, end])):
            still.append(node)
    return still
