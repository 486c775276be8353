"""`nolocod bench exchange`: one paired outer step between two nodes, part by part.

Each node is a network process and a trainer process. A repetition starts on both at once; what is timed runs
unwatched, and a further exchange, which is not timed, is watched for memory.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.disk import write_whole
from nolocod.errors import RunFileError, UsageError
from nolocod.node import data_directory
from nolocod.paths import DataDir
from nolocod.run.manifest import Evaluation, Inner, Manifest, Outer
from nolocod.studies import daemons
from nolocod.studies.benchmarks import probe
from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.parties import Pair, pair, python

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.studies.benchmarks.base import Options

_LOAD_SECONDS = 300.0
_STEP_SECONDS = 240.0
_VOCABULARY = 256
_MOST = 2_000_000_000


PARTS = {
    "snapshot": ("snapshot_ended", "snapshot in both outboxes"),
    "verified": ("verified", "both inboxes verified"),  # each chunk checked against its signed hash
    "inspected": ("inspected", "both inspected"),
    "committed": ("committed", "committed, receipts on disk"),
    "applied": ("ended", "new weights on both"),
}
"""Of an outer step: what the nodes call its end, and what people are told."""


@dataclass(frozen=True)
class Step:
    """One paired outer step. Seconds since both were told to go until a part's end; the later of the two nodes counts."""

    snapshot: float
    verified: float
    inspected: float
    committed: float
    applied: float
    carried: int
    """Bytes that the loopback device carried, both ways, TCP/IP headers included."""
    cpu: dict[str, float]
    """Processor seconds of both nodes, by kind of process."""


@dataclass(frozen=True)
class ExchangeResult:
    parameters: int
    codec: str
    steps: list[Step]
    memory: float
    """The most that a node held during an exchange beyond what it held before its first, in float32 models."""
    private: bool
    """Whether `carried` is this measurement's alone."""

    @property
    def carried_per_node(self) -> float:
        return statistics.median(step.carried for step in self.steps) / 2

    def to_text(self) -> str:
        lines = [f"{self.parameters:,} parameters, {self.codec}, {len(self.steps)} outer steps; seconds since the start:"]
        for name, (_, title) in PARTS.items():
            lines.append(f"  {title:<30} {spread([getattr(step, name) for step in self.steps])}")
        kinds = sorted({kind for step in self.steps for kind in step.cpu})
        for kind in kinds:
            lines.append(f"  processor, both {kind}s".ljust(33) + spread([step.cpu.get(kind, 0.0) for step in self.steps]))
        whose = "" if self.private else " (of the whole machine: no private network could be had)"
        lines.append(f"  on the wire, per node          {self.carried_per_node / 1e6:.1f} MB{whose}")
        lines.append(f"  extra memory at its peak       {self.memory:.2f} float32 models")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def exchange(options: Options, say: Callable[[str], None]) -> ExchangeResult:
    """Take `options.pairs` outer steps after one that is not counted. Raises BenchError if one fails."""
    with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as folder:
        folders = [Path(folder) / f"node-{rank}" for rank in (0, 1)]
        found(options, folders)
        with pair([node_command(rank, path) for rank, path in enumerate(folders)]) as nodes:
            loaded = nodes.ask("prepare", _LOAD_SECONDS, training=options.training)
            connect(nodes)
            one_step(nodes)
            steps = []
            for number in range(1, options.pairs + 1):
                steps.append(one_step(nodes))
                say(f"{number}: inboxes verified after {steps[-1].verified:.3f} s, new weights after {steps[-1].applied:.3f} s")
            model = 4 * loaded[0]["parameters"]
            most = max(extra_memory(nodes)) / model
            private = nodes.network is not None
            return ExchangeResult(loaded[0]["parameters"], options.codec, steps, most, private)


def found(options: Options, folders: list[Path]) -> None:
    """Sign the run, and give it to both nodes."""
    sealed = daemons.found(run_of(options), folders[0])
    data_directory.make(DataDir(folders[1]))
    write_whole(DataDir(folders[1]).manifest, sealed.to_bytes())


def node_command(rank: int, folder: Path) -> list[str]:
    return python("nolocod.studies.benchmarks.exchange_node", str(rank), str(folder))


def connect(nodes: Pair) -> None:
    """Make the two known to each other."""
    addresses = [answer["address"] for answer in nodes.ask("listen", _STEP_SECONDS)]
    nodes.ask("connect", _STEP_SECONDS, addresses=addresses)


def one_step(nodes: Pair) -> Step:
    """Take one outer step."""
    nodes.ask("arm", _STEP_SECONDS)
    carried, used = nodes.carried(), _cpu(nodes)
    answers = nodes.ask("go", _STEP_SECONDS)
    cpu = {kind: seconds - used.get(kind, 0.0) for kind, seconds in _cpu(nodes).items()}
    began = min(float(answer["began"]) for answer in answers)
    seconds = {name: max(float(answer[end]) for answer in answers) - began for name, (end, _) in PARTS.items()}
    return Step(**seconds, carried=nodes.carried() - carried, cpu=cpu)


def extra_memory(nodes: Pair, before: list[int] | None = None) -> list[int]:
    """Take one more outer step; by how many bytes each node's memory was at most above `before`.

    Without it: what it was just before, the boxes not counted, which keep the memory of the exchange before.
    """
    nodes.ask("arm", _STEP_SECONDS)
    if before is None:
        before = [probe.memory(party.pid) - probe.boxes(party.pid) for party in nodes.parties]
    with probe.watched(nodes.parties[0].pid) as first, probe.watched(nodes.parties[1].pid) as second:
        nodes.ask("go", _STEP_SECONDS)
    return [peak.highest - was for peak, was in zip((first, second), before, strict=True)]


def _cpu(nodes: Pair) -> dict[str, float]:
    total: dict[str, float] = {}
    for party in nodes.parties:
        for kind, seconds in probe.cpu(party.pid).items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def run_of(options: Options) -> Manifest:
    """A run whose phases are one inner step, just enough for its replicas to differ."""
    try:
        return Manifest(
            name="bench",
            model=model_of(options.parameters),
            inner=Inner(steps=1, batch=1, sequence=8, learning_rate=1e-4, warmup_rounds=0.0),
            outer=Outer(patience=3600.0, blocking=not options.training),
            evaluation=Evaluation(every=1_000_000, batches=1),
            codec=options.codec,  # type: ignore[arg-type] # checked by the manifest itself
        )
    except ValueError as error:
        raise RunFileError(f"{error}.") from error


def model_of(parameters: int) -> dict[str, Any]:
    """A Llama over bytes with about as many parameters (within a thousandth above 10 M)."""
    if not 10_000 <= parameters <= _MOST:
        raise RunFileError(f"--parameters {parameters} is not between 10k and {_MOST // 1_000_000_000}b.")
    hidden, layers = next(shape for least, shape in _SHAPES if parameters >= least)
    # embedding and last norm; then per layer four square projections, three of the feed-forward, two norms
    rest = (parameters - hidden * (_VOCABULARY + 1)) / layers - 4 * hidden**2 - 2 * hidden
    heads = max(1, hidden // 64)
    return {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": max(8, round(rest / (3 * hidden))),
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }


_SHAPES = (
    (1_000_000_000, (2048, 20)),
    (300_000_000, (1024, 24)),
    (50_000_000, (1024, 8)),
    (5_000_000, (512, 4)),
    (500_000, (128, 2)),
    (0, (32, 1)),
)
"""(least parameters, (hidden size, layers))."""


def parse_parameters(text: str) -> int:
    """Read "100m", "2.5m", "800k" or a plain number; UsageError otherwise."""
    factor = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}.get(text[-1:].lower(), 1)
    try:
        return round(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise UsageError(f"--parameters {text!r} is not a number such as 100m.") from None
