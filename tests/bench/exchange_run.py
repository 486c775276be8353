"""The run whose outer steps the contest times, and the two nodes that take them.

The rule: a phase is one inner step, just enough for the replicas to differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nolocod.disk import write_whole
from nolocod.node import data_directory
from nolocod.paths import DataDir
from nolocod.run.manifest import Evaluation, Inner, Manifest, Outer
from nolocod.studies import daemons
from nolocod.trainer.capture import Plan
from tests.bench.parties import python

if TYPE_CHECKING:
    from pathlib import Path

_VOCABULARY = 256
LEAST, MOST = 10_000, 2_000_000_000
"""Parameters that a model may have."""


def found(root: Path, parameters: int, codec: str) -> list[list[str]]:
    """Sign the run, give it to two nodes below `root`, and return the commands that start them."""
    folders = [root / f"node-{rank}" for rank in (0, 1)]
    sealed = daemons.found(run_of(parameters, codec), folders[0])
    data_directory.make(DataDir(folders[1]))
    write_whole(DataDir(folders[1]).manifest, sealed.to_bytes())
    return [python("tests.bench.exchange_node", str(rank), str(folder)) for rank, folder in enumerate(folders)]


def run_of(parameters: int, codec: str) -> Manifest:
    return Manifest(
        name="bench",
        model=model_of(parameters),
        inner=Inner(steps=1, batch=1, sequence=8, learning_rate=1e-4, warmup_rounds=0.0),
        outer=Outer(patience=3600.0),
        evaluation=Evaluation(every=1_000_000, batches=1),
        codec=codec,  # type: ignore[arg-type] # one of the contestants'
    )


def kept(parameters: int, codec: str) -> int:
    """Bytes that a node keeps for its captures from its first exchange on, beside the boxes."""
    return Plan(codec, Outer(), ()).kept.itemsize * parameters  # type: ignore[arg-type] # one of the contestants'


def model_of(parameters: int) -> dict[str, Any]:
    """A Llama over bytes with about as many parameters (within a thousandth above 10 M)."""
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
