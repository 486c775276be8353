"""A soak from beginning to end: start all, disturb them, watch, stop, judge.

The rule: the clock is this machine's, everything that is drawn comes from the seed. What the program promises and did
not keep is in `Result.broken`; the rest are figures, to compare with those of a calm run of the same length.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from nolocod.identity import load_or_create
from nolocod.run.manifest import stored_manifest
from nolocod.studies.daemons import DaemonError, end
from tests.soak.faults import Fault, schedule, spared, upload_limits
from tests.soak.fleet import fleet
from tests.soak.verdict import Agreement, Sample, agree, bytes_an_hour, growth, stood_still, unproved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

_POLL = 2.0
_STOP_SECONDS = 60.0
_PAIR_SECONDS = 300.0
"""For all nodes to take their first paired outer step."""
_AWAY = 60.0
_BACK = 60.0
"""Within so many seconds of their start half of the nodes pair again, and the others with them."""
_GROWTH, _LONG = 0.02, 1800.0
"""What may grow after the warm-up, in a soak of so many seconds or more: in shorter ones tables still fill."""
_BYTES_AN_HOUR = 10e6
"""Of a node's files, and of its log: 1.7 GB a week."""
_STILL = 30.0
"""A survivor that takes no inner step for so long has paused."""


@dataclass(frozen=True)
class Options:
    """`seconds` count from the moment at which all have paired; `every` is the mean pause between two faults."""

    nodes: int
    seconds: float
    seed: int
    every: float
    calm: bool
    halve: bool
    step: float = 0.0
    """Seconds of an inner step that are slept, as a GPU would compute."""
    clocks: bool = False


@dataclass
class Result:
    """What `--report` writes. Growth is a share, by figure: 0.02 is two in a hundred."""

    seed: int
    nodes: int
    seconds: float
    kills: int = 0
    freezes: int = 0
    clocks: int = 0
    memory_growth: float | None = None
    task_growth: float | None = None
    file_growth: float | None = None
    memory_mib: float | None = None
    disk_growth: float = 0.0
    """Bytes an hour, on the node where it is most; of its log too."""
    log_growth: float = 0.0
    inner_steps: int = 0
    rounds: list[int] = field(default_factory=list)
    loss: float | None = None
    agreement: Agreement = field(default_factory=Agreement)
    paired_after: list[float] = field(default_factory=list)
    """Halved: seconds from the restart until each node's next paired step."""
    broken: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def to_text(self) -> str:
        agreed = self.agreement
        lines = [
            f"{self.nodes} nodes, {self.seconds:.0f} s, seed {self.seed}: {self.kills} killed, {self.freezes} frozen, "
            f"{self.clocks} clocks set wrong",
            f"growth after a third of the time: memory {_share(self.memory_growth)}, tasks {_share(self.task_growth)}, "
            f"files {_share(self.file_growth)}; most memory {self.memory_mib or 0:.0f} MiB; "
            f"disk {self.disk_growth / 1e6:+.1f} MB an hour, log {self.log_growth / 1e6:+.2f}",
            f"rounds {min(self.rounds, default=0)} to {max(self.rounds, default=0)}, {self.inner_steps} inner steps, "
            f"validation loss {'not measured' if self.loss is None else f'{self.loss:.4f}'}",
            f"{agreed.exchanges} exchanges, {agreed.receipts} receipts verified, {agreed.one_sided} of one side only (the "
            f"other was killed), {len(agreed.faults)} that do not agree",
        ]
        if self.paired_after:
            lines.append(f"half killed at once: all paired {max(self.paired_after):.0f} s after the restart")
        return "\n".join([*lines, *(f"BROKEN: {one}" for one in self.broken)])


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:+.1%}"


class Soak:
    """One soak in the folder `root`; `say` takes lines for people."""

    def __init__(self, options: Options, root: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._began = 0.0
        limits = [""] * options.nodes if options.calm or options.halve else upload_limits(options.seed, options.nodes)
        self._nodes = fleet(root, limits, options.seed, options.step)
        self._samples: list[Sample] = []
        self._last: dict[int, Sample] = {}
        self._result = Result(options.seed, options.nodes, options.seconds)

    def run(self) -> Result:
        """Do it all. Nodes are stopped however it ends."""
        try:
            self._began = time.monotonic()
            for node in self._nodes:
                node.live()
            self._until_paired(_PAIR_SECONDS)
            self._say(f"all {len(self._nodes)} have paired after {self._now:.0f} s")
            self._began = time.monotonic()
            self._samples.clear()
            if self._options.halve:
                self._halve()
                self._result.seconds = self._now
            else:
                self._disturb()
        finally:
            for node in self._nodes:
                if node.lives:
                    node.thaw()
            end(self._nodes, _STOP_SECONDS)
        self._judge()
        return self._result

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _look(self) -> None:
        for node in self._nodes:
            sample = node.sample(self._now)
            if sample is not None:
                self._samples.append(sample)
                self._last[node.number] = sample

    def _until_paired(self, seconds: float) -> None:
        """Wait until each has a paired step; DaemonError tells who has not."""
        missing = {node.number for node in self._nodes}
        ends: list[str] = []
        while missing and not ends and self._now < seconds:
            self._look()
            missing -= {number for number, last in self._last.items() if last.paired > 0}
            ends = [end for node in self._nodes for end in node.unwanted]
            time.sleep(_POLL)
        if missing:
            raise DaemonError(f"nodes {sorted(missing)} took no paired step in {seconds:.0f} s. {' '.join(ends)}")

    # --- random faults ----------------------------------------------------------------------------

    def _disturb(self) -> None:
        options = self._options
        planned = (
            []
            if options.calm
            else schedule(options.seed, options.nodes, 0.0, options.seconds * 0.95, options.every, clocks=options.clocks)
        )
        due = sorted(
            [(fault.at, fault, True) for fault in planned] + [(fault.at + fault.seconds, fault, False) for fault in planned],
            key=lambda one: one[0],
            reverse=True,
        )
        while self._now < options.seconds:
            while due and due[-1][0] <= self._now:
                _, fault, begins = due.pop()
                self._do(fault, begins=begins)
            self._look()
            time.sleep(_POLL)

    def _do(self, fault: Fault, *, begins: bool) -> None:
        node = self._nodes[fault.node]
        if fault.kind == "kill":
            node.kill() if begins else node.live()
        elif fault.kind == "freeze":
            node.freeze() if begins else node.thaw()
        else:
            node.mistake(fault.by if begins else 0.0)
        self._result.clocks += begins and fault.kind == "clock"
        self._result.kills += begins and fault.kind == "kill"
        self._result.freezes += begins and fault.kind == "freeze"
        self._say(f"{self._now:7.0f} s  node {fault.node}: {fault.kind if begins else 'back'}")

    # --- half of them at once ---------------------------------------------------------------------

    def _halve(self) -> None:
        """Kill -9 half at once, start them again after a minute, and see what is lost."""
        lasting = spared(len(self._nodes))
        victims = [node for node in self._nodes if node.number not in lasting]
        self._watch(_AWAY)  # a checkpoint is written about once a minute
        kept = {node.number: self._last[node.number].checkpoint for node in victims}
        for node in victims:
            node.kill()
        self._result.kills = len(victims)
        killed = self._now
        self._say(f"killed {len(victims)} of {len(self._nodes)}")
        self._watch(_AWAY)
        still = stood_still(self._samples, lasting, killed, self._now, _STILL)
        self._result.broken += [f"node {number}, which lived, paused training" for number in still]
        for node in victims:
            node.live()
        self._await_pairs()
        for node in victims:
            before, began = kept[node.number], began_from(node.log.read_text(encoding="utf-8", errors="replace"))
            if before is not None and (began is None or began < before):
                self._result.broken.append(f"node {node.number} lost weights: its checkpoint was of round {before}")

    def _await_pairs(self) -> None:
        """Until each node has taken a further paired step."""
        began, after = self._now, self._result.paired_after
        before = {number: (one.life, one.paired) for number, one in self._last.items()}
        missing = {node.number for node in self._nodes}
        while missing and self._now < began + 4 * _BACK:
            self._look()
            for number in sorted(missing):
                last, (life, paired) = self._last[number], before[number]
                if last.paired > (paired if last.life == life else 0):
                    missing.discard(number)
                    after.append(round(self._now - began, 1))
            time.sleep(_POLL / 4)
        if missing or max(after) > _BACK:
            slow = f"after {max(after, default=0):.0f} s, without {sorted(missing)}"
            self._result.broken.append(f"not all paired again within {_BACK:.0f} s: {slow}")

    def _watch(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._look()
            time.sleep(_POLL)

    # --- the end ----------------------------------------------------------------------------------

    def _judge(self) -> None:
        result, samples, seconds = self._result, self._samples, self._options.seconds
        result.memory_growth, result.task_growth, result.file_growth = (
            growth(samples, figure, seconds / 3, seconds) for figure in ("memory", "tasks", "files")
        )
        for name, share in (("memory", result.memory_growth), ("tasks", result.task_growth)):
            if share is not None and share > _GROWTH and seconds >= _LONG:
                result.broken.append(f"{name} grew by {share:.1%} after the warm-up")
        result.disk_growth, result.log_growth = bytes_an_hour(samples, "disk"), bytes_an_hour(samples, "log")
        if seconds >= _LONG and max(result.disk_growth, result.log_growth) > _BYTES_AN_HOUR:
            result.broken.append("what a node writes grows without end")
        result.memory_mib = max((one.memory for one in samples), default=0) / (1 << 20)
        result.inner_steps = _steps(samples)
        result.rounds = [one.round for _, one in sorted(self._last.items())]
        losses = [one.loss for one in self._last.values() if one.loss is not None]
        result.loss = statistics.median(losses) if losses else None
        peers = [load_or_create(node.paths.identity).peer_id for node in self._nodes]
        lasting = [node for node in self._nodes if node.lives == 1]
        sealed = stored_manifest(self._nodes[0].paths)
        result.agreement, held = agree(
            {peer: node.paths.receipts for peer, node in zip(peers, self._nodes, strict=True)},
            sealed.run_id if sealed else "",
            {peers[node.number] for node in lasting},
        )
        result.broken += result.agreement.faults
        result.broken += unproved(samples, {node.number: held[peers[node.number]] for node in lasting})
        result.broken += [end for node in self._nodes for end in node.unwanted]


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
