"""Ours and the neighbours, on a tensor of the same size, in turn.

The rule: a contestant's processes are fresh in every round, alone on the machine and in a network of their own; one
exchange warms up, one is timed, one is watched for memory. One that fails is told as failed, with its error, and
the others go on. Of ours the parts of the timed outer step are told too, and what they took of the processor.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import exchange_run, probe, venvs
from tests.bench.base import BenchError
from tests.bench.parties import Pair, pair

if TYPE_CHECKING:
    from collections.abc import Callable

_WORKERS = Path(__file__).resolve().parent / "workers"
_PREPARE_SECONDS = 120.0
_CONNECT_SECONDS = 180.0
_GO_SECONDS = 180.0

PARTS = {
    "snapshot_ended": "snapshot in both outboxes",
    "verified": "both inboxes verified",  # each chunk checked against its signed hash
    "inspected": "both inspected",
    "committed": "committed, receipts on disk",
    "ended": "new weights on both",
}
"""Of an outer step of ours: what the nodes call its end, and what people are told."""


@dataclass(frozen=True)
class Contestant:
    """One way to exchange a tensor. `environment` "" is ours."""

    name: str
    title: str
    environment: str = ""
    what: str = ""
    """Our codec, or what the neighbour's worker is to do."""
    warm_ups: int = 1


CONTESTANTS = (
    Contestant("gloo", "raw gloo send/recv both ways at once (plaintext)", "gloo", "float32"),
    Contestant("ours-float32", "nolocod float32", what="float32"),
    Contestant("hivemind", "hivemind 1.1.12 all-reduce, uncompressed", "hivemind", "none"),
    Contestant("ours-bfloat16", "nolocod bfloat16", what="bfloat16"),
    Contestant("hivemind-fp16", "hivemind 1.1.12 all-reduce, fp16", "hivemind", "fp16"),
    # its blocks travel in 8 bits once both have learnt how far apart they are
    Contestant("ours-modulo8", "nolocod modulo8", what="modulo8", warm_ups=3),
    Contestant("torchft", "torchft-nightly DiLoCo outer step (plaintext gloo)", "torchft", "diloco"),
    Contestant("lattica", "lattica 1.0.21 RPC both ways", "lattica", "rpc"),
    Contestant("reference", "the paper's pattern in gloo: two tensors to a root and back", "gloo", "reference"),
)


@dataclass
class Figures:
    """One contestant's figures, round by round. Seconds; bytes on the wire of both; memory in float32 tensors."""

    seconds: list[float] = field(default_factory=list)
    """Until the exchange is over: for ours, until both inboxes are verified."""
    step: list[float] = field(default_factory=list)
    """Ours only: until both have new weights."""
    wire: list[int] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)
    """The most memory that a node held beyond what it held before it was connected."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Ours only: until each part of the outer step is over on both."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Ours only: processor seconds of both nodes, by kind of process."""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Contest:
    values: int
    rounds: int
    figures: dict[str, Figures]

    def to_table(self) -> dict[str, Any]:
        return asdict(self)


def run(values: int, rounds: int, only: frozenset[str], say: Callable[[str], None]) -> Contest:
    """Let all contestants (or those named in `only`) run, `rounds` times in turn."""
    chosen = [one for one in CONTESTANTS if not only or one.name in only]
    contest = Contest(values, rounds, {one.name: Figures() for one in chosen})
    for number in range(1, rounds + 1):
        for one in chosen:
            figures = contest.figures[one.name]
            try:
                _one_round(one, values, figures)
            except BenchError as error:
                figures.failures.append(error.cause)
                say(f"round {number}: {one.title}: failed: {error.cause}")
            else:
                wire, extra = figures.wire[-1] / 1e6, figures.extra[-1]
                say(f"round {number}: {one.title}: {figures.seconds[-1]:.3f} s, {wire:.0f} MB, memory +{extra:.2f}")
                for title, seconds in parts_of(asdict(figures)).items():
                    say(f"  {title:<30} {seconds[-1]:.3f} s")
    return contest


def _one_round(one: Contestant, values: int, figures: Figures) -> None:
    if one.environment:
        python = str(venvs.ensure(one.environment))
        worker = str(_WORKERS / f"with_{one.environment}.py")
        with pair([[python, worker, str(rank), one.what] for rank in (0, 1)]) as nodes:
            nodes.ask("prepare", _PREPARE_SECONDS, values=values)
            before = [probe.memory(party.pid) for party in nodes.parties]
            _connect(nodes)
            _measure(nodes, one, values, before, figures)
        return
    with (
        tempfile.TemporaryDirectory(prefix="nolocod-bench-") as name,
        pair(exchange_run.found(Path(name), values, one.what)) as nodes,
    ):
        nodes.ask("prepare", _PREPARE_SECONDS)
        _connect(nodes)
        _measure(nodes, one, values, None, figures)


def _connect(nodes: Pair) -> None:
    """Make the two known to each other."""
    addresses = [answer["address"] for answer in nodes.ask("listen", _CONNECT_SECONDS)]
    nodes.ask("connect", _CONNECT_SECONDS, addresses=addresses)


def _measure(nodes: Pair, one: Contestant, values: int, before: list[int] | None, figures: Figures) -> None:
    for _ in range(one.warm_ups):
        _arm(nodes)
        _go(nodes)
    _arm(nodes)
    carried, used = nodes.carried(), _cpu(nodes)
    answers = _go(nodes)
    carried = nodes.carried() - carried
    cpu = {kind: seconds - used.get(kind, 0.0) for kind, seconds in _cpu(nodes).items()}
    extra = _extra_memory(nodes, before, 0 if one.environment else exchange_run.kept(values, one.what))
    began = min(answer["began"] for answer in answers)
    seconds = {end: max(answer[end] for answer in answers) - began for end in PARTS if end in answers[0]}
    if not one.environment:
        figures.step.append(seconds["ended"])
        for found, of_this in ((figures.parts, seconds), (figures.cpu, cpu)):
            for name, value in of_this.items():
                found.setdefault(name, []).append(value)
    figures.seconds.append(seconds.get("verified", seconds["ended"]))
    figures.wire.append(carried)
    figures.extra.append(max(extra) / (4 * values))


def _arm(nodes: Pair) -> None:
    nodes.ask("arm", _CONNECT_SECONDS)


def _go(nodes: Pair) -> list[dict[str, Any]]:
    answers = nodes.ask("go", _GO_SECONDS)
    if not all(answer["right"] for answer in answers):
        raise BenchError("the exchange ended without an error, and with wrong values.")
    return answers


def _extra_memory(nodes: Pair, before: list[int] | None, kept: int) -> list[int]:
    """Exchange once more; by how many bytes each node's memory was at most above `before`.

    Without it: what it was just before, but for the boxes and `kept` bytes, which lie there since the exchange before.
    """
    _arm(nodes)
    if before is None:
        before = [probe.memory(party.pid) - probe.boxes(party.pid) - kept for party in nodes.parties]
    with probe.watched(nodes.parties[0].pid) as first, probe.watched(nodes.parties[1].pid) as second:
        _go(nodes)
    return [peak.highest - was for peak, was in zip((first, second), before, strict=True)]


def _cpu(nodes: Pair) -> dict[str, float]:
    total: dict[str, float] = {}
    for party in nodes.parties:
        for kind, seconds in probe.cpu(party.pid).items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def parts_of(figures: dict[str, Any]) -> dict[str, list[float]]:
    """The parts of our outer step and what they took of the processor, by title; empty for a neighbour."""
    parts = {title: figures["parts"][end] for end, title in PARTS.items() if end in figures.get("parts", ())}
    return parts | {f"processor, both {kind}s": seconds for kind, seconds in sorted(figures.get("cpu", {}).items())}
