"""`nolocod bench codecs`: what each codec and each way of overlapping costs in bytes and in validation loss.

Several replicas of a tiny model on real text, in one process and in memory, made of the product's own parts; every
variant of a seed trains on the same tokens from the same weights, so that differences are the variant's.
Finished runs are kept as JSON lines beside docs/codecs.md, into which the table is written, and not done again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.run import presets
from nolocod.studies.benchmarks.base import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.run.manifest import Codec
    from nolocod.studies.benchmarks.base import Options
    from nolocod.studies.multi_replica import Outcome

REPLICAS = 4
ROUNDS = 30
INNER_STEPS = 20
LEARNING_RATE = 1e-3
"""At the testnet's 3e-3 the same run with other rounding ends as much as 1 % away, which would hide all else."""
_PAGE, _KEPT, _MARK = Path("docs/codecs.md"), Path("docs/codecs.jsonl"), "<!-- measured -->\n"


_SETTING = f"""\
{REPLICAS} replicas of the `tiny` model (0.1 M parameters over bytes) on the sources of Python's standard library,
{ROUNDS} outer steps of {INNER_STEPS} inner ones (4 sequences of 128 bytes, learning rate {LEARNING_RATE:g}), `[outer]` as in
the testnet's run file, pairs drawn anew for each. The first row is the reference; all rows of a seed train on the same
tokens from the same weights. Loss in nats per byte, of the mean of the replicas' weights; replicas' own: the mean of
theirs. Skipped: blocks beyond their bound."""


@dataclass(frozen=True)
class Row:
    """One variant. `late`: inner steps between the snapshot and the merge."""

    name: str
    codec: Codec
    late: int = 0
    fragments: int = 1


ROWS = (
    Row("float32, blocking", "float32"),
    Row("float32, merged 1 inner step late", "float32", late=1),
    Row("float32, merged 2 inner steps late", "float32", late=2),
    Row("modulo8, blocking", "modulo8"),
    Row("modulo8, merged 2 inner steps late", "modulo8", late=2),
    Row("bfloat16, blocking", "bfloat16"),
    Row("delta4, blocking", "delta4"),
    Row("float32, blocking, 4 fragments", "float32", fragments=4),
    Row("float32, merged 5 inner steps late", "float32", late=5),
)


@dataclass(frozen=True)
class CodecsResult:
    """Outcomes by row and seed, in the order of ROWS; the first row is the reference."""

    outcomes: list[list[Outcome]]

    def to_text(self) -> str:
        """A table in Markdown."""
        lines = [
            "| variant | bytes per parameter | held-out loss | against the reference | each seed | replicas' own | skipped |",
            "|---|---|---|---|---|---|---|",
        ]
        for row, outcomes in zip(ROWS, self.outcomes, strict=True):
            pairs = zip(outcomes, self.outcomes[0], strict=True)
            differences = [100 * (one.averaged / reference.averaged - 1) for one, reference in pairs]
            cells = [
                row.name,
                f"{statistics.mean(one.bytes_per_parameter for one in outcomes):.3f}",
                f"{statistics.mean(one.averaged for one in outcomes):.4f}",
                f"{statistics.mean(differences):+.2f} %",
                ", ".join(f"{one:+.2f} %" for one in differences),
                f"{statistics.mean(one.mean for one in outcomes):.4f}",
                f"{100 * statistics.mean(one.skipped for one in outcomes):.2f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({row.name: [asdict(one) for one in some] for row, some in zip(ROWS, self.outcomes, strict=True)})


def codecs(options: Options, tell: Callable[[str], None]) -> CodecsResult:
    """Rehearse every row with as many seeds as `options.pairs`, and write the table into docs/codecs.md.

    BenchError outside of the source tree's root.
    """
    from nolocod.studies.multi_replica import Outcome, use_threads  # torch: the package is imported without it

    if not _PAGE.exists():
        raise BenchError(f"there is no {_PAGE} here.", remedy="Run it in the root of the source tree.")
    use_threads(options.threads or 1)
    lines = [json.loads(line) for line in _KEPT.read_text().splitlines()] if _KEPT.exists() else []
    done = {json.dumps(line["run"]): Outcome(**line["outcome"]) for line in lines}
    seeds = range(1, options.pairs + 1)
    with tempfile.TemporaryDirectory() as cache:
        for seed, row in itertools.product(seeds, ROWS):
            key = _key(row, seed)
            if key in done:
                continue
            outcome = done[key] = _rehearse(row, seed, Path(cache))
            tell(f"seed {seed}, {row.name}: {outcome.averaged:.4f}, {outcome.bytes_per_parameter:.3f} bytes per parameter")
            with _KEPT.open("a") as handle:
                handle.write(json.dumps({"run": json.loads(key), "outcome": asdict(outcome)}) + "\n")
    result = CodecsResult([[done[_key(row, seed)] for seed in seeds] for row in ROWS])
    head, _, _ = _PAGE.read_text(encoding="utf-8").partition(_MARK)
    _PAGE.write_text(f"{head}{_MARK}\n{_SETTING}\n\n{result.to_text()}\n", encoding="utf-8")
    return result


def _key(row: Row, seed: int) -> str:
    """All that an outcome follows from."""
    setting = {"replicas": REPLICAS, "rounds": ROUNDS, "inner_steps": INNER_STEPS, "learning_rate": LEARNING_RATE}
    return json.dumps({"seed": seed, **asdict(row), **setting})


def _rehearse(row: Row, seed: int, cache: Path) -> Outcome:
    from nolocod.studies.multi_replica import MultiReplica, Variant

    model = presets.MODELS["tiny"]
    manifest = presets.local_run(model, rounds=ROUNDS, inner_steps=INNER_STEPS, seed=seed, own_text=False)
    slower = msgspec.structs.replace(manifest.inner, learning_rate=LEARNING_RATE)
    manifest = msgspec.structs.replace(manifest, inner=slower)
    return MultiReplica(manifest, Variant(row.name, row.codec, row.late, row.fragments), REPLICAS, cache).run()
