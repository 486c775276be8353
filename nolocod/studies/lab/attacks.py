"""`nolocod lab attacks`: what hostile partners do to learning, with the defences of `[trust]` and without.

The rule: a quarter of the replicas is hostile. Every attack has the same seed, tokens and pairs' draw as the run
in which the same honest replicas are among themselves; each alone and all mixed, defended and not.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.errors import TrainerError
from nolocod.run import presets
from nolocod.run.manifest import RETIRED, Trust
from nolocod.studies.lab.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.run.manifest import Manifest

    Log = Results["AttackTrial", "AttackOutcome"]

PAGE = "attacks.md"
NONE, MIXED = "none", "all mixed"
OFF = presets.UNDEFENDED
DEFENCES = {"none": OFF, "clip": msgspec.structs.replace(OFF, clip=1.5), "as by default": Trust()}
"""Reputation and probation are nothing alone: they follow from what the others refuse, and change the clip radius."""


@dataclass(frozen=True)
class AttackTrial:
    """One run: `honest` replicas and `hostile` ones that do `attack`."""

    attack: str
    trust: Trust = OFF
    honest: int = 24
    hostile: int = 8
    seed: int = 1
    head_start: int = 30
    """Outer steps that one replica takes alone before the others go on from its weights: a swarm in mid-run."""
    rounds: int = 20
    """Outer steps that all take from there."""
    phase: int = 20
    hidden: int = 32
    learning_rate: float = 4e-3

    def manifest(self) -> Manifest:
        run = presets.local_run(
            presets.llama(self.hidden, 2, 2, self.hidden * 11 // 4),
            rounds=self.head_start + self.rounds,
            inner_steps=self.phase,
            seed=self.seed,
            own_text=False,
        )
        change = msgspec.structs.replace
        inner = change(
            run.inner, learning_rate=self.learning_rate, sequence=32, warmup_rounds=0.06 * (self.head_start + self.rounds)
        )
        return change(run, inner=inner, trust=self.trust, evaluation=change(run.evaluation, batches=64))


@dataclass(frozen=True)
class AttackOutcome:
    """Held-out losses in nats per token at the end, of honest replicas, or None where weights are not finite any more; shares
    of exchanges that honest replicas refused; the mean weight of partners' differences among honest replicas; shares of honest
    replicas' outer steps with a hostile partner, and alone."""

    mean: float | None
    worst: float | None
    refused_hostile: float
    refused_honest: float
    weight: float
    captured: float
    alone: float


def perform(trial: AttackTrial) -> AttackOutcome:
    """Train. One thread for each process."""
    import torch  # the package is imported without it

    from nolocod.studies.lab.adversarial import ATTACKS, AdversarialReplicas

    torch.set_num_threads(1)
    chosen = [name for name in ATTACKS if trial.attack in (name, MIXED)]
    with tempfile.TemporaryDirectory(prefix="nolocod-lab-") as cache:
        hostile = trial.hostile if chosen else 0
        replicas = AdversarialReplicas(trial.manifest(), trial.honest, hostile, chosen, Path(cache))
        replicas.begin_at(trial.head_start)
        try:
            end = replicas.train()
            mean, worst = (loss if math.isfinite(loss) else None for loss in (end.mean, end.worst))
        except TrainerError:  # its weights are not finite any more
            mean = worst = None
    refused = (replicas.share_refused("hostile"), replicas.share_refused("honest"))
    return AttackOutcome(mean, worst, *refused, statistics.mean(replicas.weights), *replicas.shares())


_PAGE = """# What hostile partners do to learning

Made by `nolocod lab attacks --into docs`. A quarter of the replicas is hostile, and everything else is the product's own:
model, messages, judgement, outer step, reputation. Attackers know more than real ones could: they see the victim's message
before they make theirs, know its clip radius, act as one, and are first wherever a node takes offers: what bounds them then
is whom it draws and admits. Invented members, false ages and floods are the simulator's (`nolocod simulate hostile`). How the
defences work, and what goes through them: [security.md](security.md). The outer step has a testnet's
alpha, beta and gamma, 0.2, 1 and 1; a run file's default, 0.5, 0.7 and 0.7, was not tried.

Defended is a run with {trust}, as runs are by default; undefended one without any. In both, messages of another size are
refused, and so are values that are not finite: that cannot be switched off. A refused partner costs a try, and another one
is asked.

| attack | what it is |
|---|---|
{kinds}

{table}
"""


def _settings(trust: Trust) -> str:
    settings = msgspec.structs.asdict(trust)
    return ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in settings.items() if name not in RETIRED)


def log(kept: Path) -> Log:
    """The trials in the file `kept`."""
    return Results(kept, (AttackTrial, AttackOutcome))


def perform_all(trials: Iterable[AttackTrial], found: Log, workers: int, tell: Callable[[str], None]) -> None:
    """Do those that were not done yet."""

    def done(number: int, count: int, trial: AttackTrial, outcome: AttackOutcome) -> None:
        defence = next(name for name, trust in DEFENCES.items() if trust == trial.trust)
        loss = "not finite" if outcome.mean is None else f"{outcome.mean:.4f}"
        tell(f"{number} of {count}: attack {trial.attack}, defence {defence}, seed {trial.seed}: {loss}")

    found.perform(trials, perform, workers, done)


@dataclass(frozen=True)
class Study:
    """What is done on each seed: every attack alone and all mixed, defended and not; and, without attackers, what each
    defence costs."""

    like: AttackTrial
    seeds: tuple[int, ...]

    def trials(self) -> list[AttackTrial]:
        pairs = [(attack, trust) for attack in self.attacks for trust in (OFF, Trust())]
        pairs += [(NONE, trust) for trust in DEFENCES.values()]
        return [self._trial(attack, trust, seed) for seed in self.seeds for attack, trust in pairs]

    @property
    def attacks(self) -> list[str]:
        from nolocod.studies.lab.adversarial import ATTACKS  # torch: the package is imported without it

        return [*ATTACKS, MIXED]

    def _trial(self, attack: str, trust: Trust, seed: int) -> AttackTrial:
        return replace(self.like, attack=attack, trust=trust, seed=seed)

    def to_text(self, log: Log) -> str:
        """Two tables in Markdown."""
        like = self.like
        seeds = ", ".join(map(str, self.seeds))
        lines = [
            f"{like.honest} honest replicas and {like.hostile} hostile ones, {like.rounds} outer steps of {like.phase} inner "
            f"ones, from weights that had {like.head_start} alone; seeds {seeds}.",
            "Loss: the honest replicas' mean at the end, in nats per token, mean of the seeds; beside it how much more that is "
            "than of the same replicas without attackers and without defences, on the worst seed.\n",
            "| attack | undefended | | defended | | hostile refused | honest refused | steps with attackers | alone |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for attack in self.attacks:
            cells = [*self._losses(attack, OFF, log), *self._losses(attack, Trust(), log), *self._refused(attack, Trust(), log)]
            lines.append(f"| {' | '.join([attack, *cells])} |")
        lines += [
            "\nWithout attackers, what each defence costs:\n",
            "| defence | loss | | honest refused | mean weight of a partner's difference |",
            "|---|---|---|---|---|",
        ]
        for defence, trust in DEFENCES.items():
            refused = self._refused(NONE, trust, log)[1]
            weight = statistics.mean(one.weight for one in self._found(NONE, trust, log))
            lines.append(f"| {' | '.join([defence, *self._losses(NONE, trust, log), refused, f'{weight:.3f}'])} |")
        return "\n".join(lines)

    def to_page(self, log: Log) -> str:
        """docs/attacks.md."""
        from nolocod.studies.lab.adversarial import ATTACKS  # as above

        kinds = "\n".join(f"| {name} | {what} |" for name, what in ATTACKS.items())
        return _PAGE.format(kinds=kinds, table=self.to_text(log), trust=_settings(Trust()))

    def _found(self, attack: str, trust: Trust, log: Log) -> list[AttackOutcome]:
        return [log[self._trial(attack, trust, seed)] for seed in self.seeds]

    def _losses(self, attack: str, trust: Trust, log: Log) -> list[str]:
        """The mean loss, and by how much it is worse than without attackers, on the worst seed."""
        reference = self._found(NONE, OFF, log)
        pairs = [
            (one.mean, other.mean)
            for one, other in zip(self._found(attack, trust, log), reference, strict=True)
            if one.mean is not None and other.mean is not None
        ]
        if len(pairs) < len(self.seeds):
            return ["not finite", "broken"]
        worst = max(100 * (one / other - 1) for one, other in pairs)
        return [f"{statistics.mean(one for one, _ in pairs):.4f}", f"{worst:+.2f} %" if worst < RUINED else "broken"]

    def _refused(self, attack: str, trust: Trust, log: Log) -> list[str]:
        """Shares of the messages of hostile and of honest partners, and of the outer steps with attackers and alone."""
        found = self._found(attack, trust, log)
        shares = [(one.refused_hostile, one.refused_honest, one.captured, one.alone) for one in found]
        return [f"{statistics.mean(some):.1%}" for some in zip(*shares, strict=True)]


RUINED = 100.0
"""Percent: beyond it the number says nothing any more."""
FULL = Study(AttackTrial(NONE), (1, 2))
REDUCED = Study(AttackTrial(NONE, honest=6, hostile=2, head_start=15, rounds=10), (1,))
