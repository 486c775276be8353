"""`nolocod bench codecs`: what each codec and each way of overlapping costs in bytes and in validation loss.

Several replicas of a tiny model on real text, in one process and in memory, made of the product's own parts; every
variant of a seed trains on the same tokens from the same weights, so that differences are the variant's.
Finished runs are kept as JSON lines and not done again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod import presets

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.benchmarks.base import Options
    from nolocod.manifest import Codec
    from nolocod.trainer.rehearsal import Outcome

REPLICAS = 4
ROUNDS = 30
INNER_STEPS = 20
LEARNING_RATE = 1e-3
"""At the testnet's 3e-3 the same run with other rounding ends as much as 1 % away, which would hide all else."""
SEEDS = (1, 2, 3)
REFERENCE = "float32, blocking"


@dataclass(frozen=True)
class Row:
    """One variant. `late`: inner steps between the snapshot and the merge."""

    name: str
    codec: Codec
    late: int = 0
    fragments: int = 1


ROWS = (
    Row(REFERENCE, "float32"),
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
    """Outcomes by row and seed, in the order of ROWS and SEEDS."""

    outcomes: list[list[Outcome]]

    def difference(self, row: int, seed: int) -> float:
        """Loss of the mean weights against the reference's of the same seed, in percent."""
        return 100 * (self.outcomes[row][seed].averaged / self.outcomes[0][seed].averaged - 1)

    def to_text(self) -> str:
        """A table in Markdown."""
        seeds = range(len(self.outcomes[0]))
        lines = [
            "| variant | bytes per parameter | held-out loss | against the reference | each seed | replicas' own |",
            "|---|---|---|---|---|---|",
        ]
        for index, (row, outcomes) in enumerate(zip(ROWS, self.outcomes, strict=True)):
            differences = [self.difference(index, seed) for seed in seeds]
            bytes_each = statistics.mean(one.bytes_per_parameter for one in outcomes)
            loss, own = (statistics.mean(getattr(one, key) for one in outcomes) for key in ("averaged", "mean"))
            each = ", ".join(f"{one:+.2f} %" for one in differences)
            lines.append(
                f"| {row.name} | {bytes_each:.3f} | {loss:.4f} | {statistics.mean(differences):+.2f} % | {each} | {own:.4f} |"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({row.name: [asdict(one) for one in some] for row, some in zip(ROWS, self.outcomes, strict=True)})


def codecs(options: Options, tell: Callable[[str], None]) -> CodecsResult:
    """Rehearse every row with every seed; what `codecs.jsonl` in the working directory holds already is not done again."""
    import torch  # the network process imports this module's package

    from nolocod.trainer.rehearsal import Outcome

    torch.set_num_threads(options.threads or 1)
    kept = Path("codecs.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {_key(line["row"], line["seed"]): Outcome(**line["outcome"]) for line in lines}
    with tempfile.TemporaryDirectory() as cache:
        for seed in SEEDS:
            for row in ROWS:
                if _key(asdict(row), seed) in done:
                    continue
                outcome = _rehearse(row, seed, Path(cache))
                tell(f"seed {seed}, {row.name}: {outcome.averaged:.4f}, {outcome.bytes_per_parameter:.3f} bytes per parameter")
                done[_key(asdict(row), seed)] = outcome
                with kept.open("a") as handle:
                    handle.write(json.dumps({"row": asdict(row), "seed": seed, "outcome": asdict(outcome)}) + "\n")
    return CodecsResult([[done[_key(asdict(row), seed)] for seed in SEEDS] for row in ROWS])


def _key(row: dict[str, object], seed: int) -> str:
    return json.dumps([row, seed, REPLICAS, ROUNDS, INNER_STEPS, LEARNING_RATE], sort_keys=True)


def _rehearse(row: Row, seed: int, cache: Path) -> Outcome:
    from nolocod.trainer.rehearsal import Rehearsal, Variant

    model = presets.MODELS["tiny"]
    manifest = presets.local_run(model, rounds=ROUNDS, inner_steps=INNER_STEPS, seed=seed, own_text=False)
    slower = msgspec.structs.replace(manifest.inner, learning_rate=LEARNING_RATE)
    manifest = msgspec.structs.replace(manifest, inner=slower)
    return Rehearsal(manifest, Variant(row.name, row.codec, row.late, row.fragments), REPLICAS, cache).run()
