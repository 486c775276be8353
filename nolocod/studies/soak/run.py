"""A soak from beginning to end: start all, disturb them, watch, stop, judge.

The rule: the clock is this machine's, everything that is drawn comes from the seed. What the program promises and did
not keep is in `Result.broken`; figures are in the rest, for a comparison with a calm run of the same length.
"""

from __future__ import annotations

import heapq
import json
import re
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import SoakError, UsageError
from nolocod.identity import load_or_create
from nolocod.run.manifest import stored_manifest
from nolocod.studies.soak.faults import Fault, schedule, spared, upload_limits
from nolocod.studies.soak.fleet import Daemon, Fleet
from nolocod.studies.soak.verdict import Agreement, Sample, agree, growth, stood_still, unproved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

_POLL = 2.0
_PAIR_SECONDS = 300.0
"""For all nodes to take their first paired outer step."""
_AWAY = 60.0
_BACK = 60.0
"""Within so many seconds of their start half of the nodes pair again, and the others with them."""
_GROWTH, _LONG = 0.02, 1800.0
"""What may grow after the warm-up, in a soak of so many seconds or more: in shorter ones tables still fill."""
_STILL = 30.0
"""A survivor that takes no inner step for so long has paused."""


@dataclass(frozen=True)
class Options:
    """`seconds` count from the moment at which all have paired; `every` is the mean pause between two faults."""

    nodes: int = 8
    seconds: float = 3600.0
    seed: int = 0
    every: float = 45.0
    calm: bool = False
    halve: bool = False
    model: str = "tiny"

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= 32:
            raise UsageError(f"--nodes {self.nodes} is not between 2 and 32.")
        if not 10 <= self.seconds <= 30 * 86_400:
            raise UsageError("--hours is not between 0.003 (ten seconds) and 720.")


@dataclass
class Result:
    """What `--report` writes. Growth is a share, by figure: 0.02 is two in a hundred."""

    seed: int
    nodes: int
    seconds: float
    kills: int = 0
    freezes: int = 0
    memory_growth: float | None = None
    task_growth: float | None = None
    file_growth: float | None = None
    memory_mib: float | None = None
    inner_steps: int = 0
    rounds: list[int] = field(default_factory=list)
    loss: float | None = None
    agreement: Agreement = field(default_factory=Agreement)
    paired_after: list[float] = field(default_factory=list)
    """Halved: seconds from the restart until each node's next paired step."""
    broken: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class Soak:
    """One soak in the folder `root`; `say` takes lines for people."""

    def __init__(self, options: Options, root: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._root = root
        self._say = say
        self._began = 0.0
        self.samples: list[Sample] = []
        self.last: dict[int, Sample] = {}
        self.result = Result(options.seed, options.nodes, options.seconds)

    def run(self) -> Result:
        """Do it all. Nodes are stopped however it ends."""
        options = self._options
        limits = [""] * options.nodes if options.calm or options.halve else upload_limits(options.seed, options.nodes)
        fleet = Fleet(self._root, limits, options.seed, options.model)
        try:
            for daemon in fleet.daemons:
                daemon.start()
            self._began = time.monotonic()
            self._until_paired(fleet, _PAIR_SECONDS)
            self._say(f"all {options.nodes} have paired after {self._now:.0f} s")
            self._began = time.monotonic()
            self.samples.clear()
            if options.halve:
                self._halve(fleet)
                self.result.seconds = self._now
            else:
                self._disturb(fleet)
        finally:
            fleet.stop()
        self._judge(fleet)
        return self.result

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _look(self, fleet: Fleet) -> None:
        for daemon in fleet.daemons:
            sample = daemon.sample(self._now)
            if sample is not None:
                self.samples.append(sample)
                self.last[daemon.number] = sample

    def _until_paired(self, fleet: Fleet, seconds: float) -> None:
        """Wait until each has a paired step in its present life; SoakError tells who has not."""
        deadline = self._now + seconds
        while self._now < deadline:
            self._look(fleet)
            missing = [one.number for one in fleet.daemons if not self._has_paired(one)]
            if not missing:
                return
            if any(daemon.unwanted for daemon in fleet.daemons):
                break
            time.sleep(_POLL)
        ends = [end for daemon in fleet.daemons for end in daemon.unwanted]
        raise SoakError(f"nodes {missing} took no paired step in {seconds:.0f} s. {' '.join(ends)}", remedy="Read their logs.")

    def _has_paired(self, daemon: Daemon) -> bool:
        last = self.last.get(daemon.number)
        return last is not None and last.life == daemon.lives and last.paired > 0

    # --- random faults ----------------------------------------------------------------------------

    def _disturb(self, fleet: Fleet) -> None:
        options = self._options
        planned = [] if options.calm else schedule(options.seed, options.nodes, 0.0, options.seconds * 0.95, options.every)
        due: list[tuple[float, int, Fault, bool]] = []
        for number, fault in enumerate(planned):
            heapq.heappush(due, (fault.at, number, fault, True))
        while self._now < options.seconds:
            while due and due[0][0] <= self._now:
                _, number, fault, begins = heapq.heappop(due)
                self._do(fleet.daemons[fault.node], fault, begins=begins)
                if begins:
                    heapq.heappush(due, (fault.at + fault.seconds, number, fault, False))
            self._look(fleet)
            time.sleep(_POLL)

    def _do(self, daemon: Daemon, fault: Fault, *, begins: bool) -> None:
        if fault.kind == "kill":
            daemon.kill() if begins else daemon.start()
        else:
            daemon.freeze() if begins else daemon.thaw()
        self.result.kills += begins and fault.kind == "kill"
        self.result.freezes += begins and fault.kind == "freeze"
        self._say(f"{self._now:7.0f} s  node {daemon.number}: {fault.kind if begins else 'back'}")

    # --- half of them at once ---------------------------------------------------------------------

    def _halve(self, fleet: Fleet) -> None:
        """Kill -9 half at once, start them again after a minute, and see what is lost."""
        lasting = spared(self._options.nodes)
        victims = [daemon for daemon in fleet.daemons if daemon.number not in lasting]
        self._watch(fleet, _AWAY)  # a checkpoint is written about once a minute
        kept = {daemon.number: self.last[daemon.number].checkpoint for daemon in victims}
        for daemon in victims:
            daemon.kill()
        self.result.kills = len(victims)
        killed = self._now
        self._say(f"killed {len(victims)} of {self._options.nodes}")
        self._watch(fleet, _AWAY)
        still = stood_still(self.samples, lasting, killed, self._now, _STILL)
        self.result.broken += [f"node {node}, which lived, paused training" for node in still]
        for daemon in victims:
            daemon.start()
        self._await_pairs(fleet)
        for daemon in victims:
            before, began = kept[daemon.number], began_from(daemon.log.read_text(encoding="utf-8", errors="replace"))
            if before is not None and (began is None or began < before):
                self.result.broken.append(f"node {daemon.number} lost weights: its checkpoint was of round {before}")

    def _await_pairs(self, fleet: Fleet) -> None:
        """Until each node has taken a further paired step."""
        began = self._now
        before = {number: (one.life, one.paired) for number, one in self.last.items()}
        missing = {daemon.number for daemon in fleet.daemons}
        while missing and self._now < began + 4 * _BACK:
            self._look(fleet)
            for number in sorted(missing):
                last, (life, paired) = self.last[number], before[number]
                if last.paired > (paired if last.life == life else 0):
                    missing.discard(number)
                    self.result.paired_after.append(round(self._now - began, 1))
            time.sleep(_POLL / 4)
        if missing or max(self.result.paired_after) > _BACK:
            slow = f"after {max(self.result.paired_after, default=0):.0f} s, without {sorted(missing)}"
            self.result.broken.append(f"not all paired again within {_BACK:.0f} s: {slow}")

    def _watch(self, fleet: Fleet, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._look(fleet)
            time.sleep(_POLL)

    # --- the end ----------------------------------------------------------------------------------

    def _judge(self, fleet: Fleet) -> None:
        result, warm, end = self.result, self._options.seconds / 3, self._options.seconds
        result.memory_growth = growth(self.samples, "memory", warm, end)
        result.task_growth = growth(self.samples, "tasks", warm, end)
        result.file_growth = growth(self.samples, "files", warm, end)
        for name, share in (("memory", result.memory_growth), ("tasks", result.task_growth)):
            if share is not None and share > _GROWTH and end >= _LONG:
                result.broken.append(f"{name} grew by {share:.1%} after the warm-up")
        result.memory_mib = max((one.memory for one in self.samples), default=0) / (1 << 20)
        result.inner_steps = _steps(self.samples)
        result.rounds = [one.round for _, one in sorted(self.last.items())]
        losses = [one.loss for one in self.last.values() if one.loss is not None]
        result.loss = statistics.median(losses) if losses else None
        peers = {daemon.number: load_or_create(daemon.paths.identity).peer_id for daemon in fleet.daemons}
        lasting = [daemon.number for daemon in fleet.daemons if daemon.lives == 1]
        sealed = stored_manifest(fleet.daemons[0].paths)
        result.agreement = agree(
            {peers[daemon.number]: daemon.paths.receipts for daemon in fleet.daemons},
            sealed.run_id if sealed else "",
            {peers[number] for number in lasting},
        )
        result.broken += result.agreement.faults
        result.broken += unproved(self.samples, _held(fleet, lasting))
        result.broken += [end for daemon in fleet.daemons for end in daemon.unwanted]


def _steps(samples: Collection[Sample]) -> int:
    """Inner steps of all nodes in all their lives."""
    most: dict[tuple[int, int], int] = {}
    for one in samples:
        most[one.node, one.life] = max(most.get((one.node, one.life), 0), one.inner_steps)
    return sum(most.values())


def began_from(log: str) -> int | None:
    """The round that the last life in a node's log began from: its checkpoint's, or a donor's where the others had gone
    too far meanwhile; None if it began from the seed again, or not at all."""
    begun = re.findall(r"starting from the (\w+)'s weights, round (\d+)", log)
    return int(begun[-1][1]) if begun and begun[-1][0] in ("checkpoint", "donor") else None


def _held(fleet: Fleet, numbers: Collection[int]) -> dict[int, int]:
    from nolocod.p2p.exchange import receipt_audit

    return {
        daemon.number: len(receipt_audit.verify(receipt_audit.stored(daemon.paths.receipts)).receipts)
        for daemon in fleet.daemons
        if daemon.number in numbers
    }


def lines(result: Result, calm: Result | None = None) -> list[str]:
    """The report for people; `calm` is that of a run without faults, to compare with."""
    agreed = result.agreement
    found = [
        f"{result.nodes} nodes, {result.seconds:.0f} s, seed {result.seed}: {result.kills} killed, {result.freezes} frozen",
        f"growth after a third of the time: memory {_share(result.memory_growth)}, tasks {_share(result.task_growth)}, "
        f"files {_share(result.file_growth)}; most memory {result.memory_mib or 0:.0f} MiB",
        f"rounds {min(result.rounds, default=0)} to {max(result.rounds, default=0)}, {result.inner_steps} inner steps, "
        f"validation loss {_number(result.loss)}" + (f" (calm: {_number(calm.loss)})" if calm else ""),
        f"{agreed.exchanges} exchanges, {agreed.receipts} receipts verified, {agreed.one_sided} of one side only (the other "
        f"was killed), {len(agreed.faults)} that do not agree",
    ]
    if result.paired_after:
        found.append(f"half killed at once: all paired {max(result.paired_after):.0f} s after the restart")
    return [*found, *(f"BROKEN: {one}" for one in result.broken)]


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:+.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def read_report(path: Path) -> Result:
    """What `to_json` wrote; UsageError if it is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Result(**{**table, "agreement": Agreement(**table["agreement"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no report of a soak ({error}).") from error
