"""Who exchanged with whom, read from receipts, and done again in a simulation.

The rule: a receipt tells both partners and the round that each was in. That fixes, for every node and round, whether it
offered or answered, and to whom; a round without a receipt was a step alone. Nothing else of the run is known, and nothing
else is made up: speeds and networks are the scenario's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nolocod.errors import ReceiptError
from nolocod.p2p.exchange import receipt_audit
from nolocod.p2p.exchange.receipt_audit import stored
from nolocod.studies.sim.scenarios import Plan
from nolocod.studies.sim.swarm import Report, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import IO

    from nolocod.identity import PeerId
    from nolocod.proto.receipt import Receipt
    from nolocod.studies.sim.node import Script, SimNode
    from nolocod.studies.sim.scenarios import Scenario
    from nolocod.studies.sim.swarm import Swarm


@dataclass(frozen=True, order=True)
class Pair:
    """One committed exchange. Nodes are numbers: real ones in the order of their peer ids."""

    offerer_round: int
    answerer_round: int
    offerer: int
    answerer: int


@dataclass(frozen=True)
class Schedule:
    """All exchanges of a run that are known."""

    nodes: int
    pairs: tuple[Pair, ...]

    @property
    def rounds(self) -> int:
        """The last round that a node reached by an exchange."""
        return max(max(pair.offerer_round, pair.answerer_round) for pair in self.pairs) + 1


def read(paths: Iterable[Path]) -> Schedule:
    """Read the receipts of nodes, each a file or a data directory's store; lines that do not verify are left out.

    ReceiptError if there are none, or of several runs.
    """
    files = [file for path in paths for file in stored(path) or [path]]
    found = (line.receipt for file in files for line in receipt_audit.read(file))
    receipts = {receipt.session: receipt for receipt in found if receipt is not None}
    if not receipts:
        raise ReceiptError("the files hold no receipt that verifies.", remedy="Name the `receipts` of data directories.")
    runs = {receipt.parsed.run_id for receipt in receipts.values()}
    if len(runs) > 1:
        raise ReceiptError(f"they are of {len(runs)} runs.", remedy="Give the receipts of one run at a time.")
    return schedule(receipts.values())


def schedule(receipts: Iterable[Receipt]) -> Schedule:
    """The schedule that `receipts` tell of."""
    known = list(receipts)
    peers = sorted({peer for receipt in known for peer in (receipt.offerer, receipt.answerer)})
    return Schedule(len(peers), tuple(sorted(_pairs(known, peers))))


def _pairs(receipts: Iterable[Receipt], peers: list[PeerId]) -> Iterator[Pair]:
    numbers = {peer: number for number, peer in enumerate(peers)}
    for receipt in receipts:
        offerer, answerer = (side.standing.round for side in receipt.parsed.sides)
        yield Pair(offerer, answerer, numbers[receipt.offerer], numbers[receipt.answerer])


def replay(schedule: Schedule, scenario: Scenario, seed: int, log: IO[bytes] | None = None) -> tuple[Report, tuple[Pair, ...]]:
    """Simulate the same exchanges; also returns those of the schedule that did not come about, which should be none."""
    nodes: list[SimNode] = []

    def prepare(swarm: Swarm) -> None:
        nodes.extend(swarm.nodes)
        scripts: list[Script] = [{} for _ in nodes]
        for pair in schedule.pairs:
            scripts[pair.offerer][pair.offerer_round] = nodes[pair.answerer].peer_id, True
            scripts[pair.answerer][pair.answerer_round] = nodes[pair.offerer].peer_id, False
        for node, script in zip(nodes, scripts, strict=True):
            node.follow(script)

    plan = Plan("replay", schedule.nodes, schedule.rounds, seed)
    report = simulate(plan, replace(scenario, staleness=1 << 30, patience=1e9), log, prepare)
    receipts = (receipt for node in nodes for receipt in node.receipts.kept.values())
    done = set(_pairs(receipts, [node.peer_id for node in nodes]))
    return report, tuple(pair for pair in schedule.pairs if pair not in done)
