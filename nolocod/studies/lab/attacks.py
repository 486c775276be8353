"""`nolocod lab attacks`: what hostile partners do to learning, with the defences of `[trust]` and without.

The rule: a quarter of the nodes is hostile, in the simulator, where all but time, the network and the attackers is the
product's own. Every attack has the seed, the text and the speeds of the run in which the same honest nodes are among
themselves; each alone and all mixed, defended and not. Attackers always flood, invent members, lie about ages and come first.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.errors import SimulationError
from nolocod.run import presets
from nolocod.run.manifest import Outer, Trust
from nolocod.studies.lab.results import Results
from nolocod.studies.sim.replica import OuterSettings
from nolocod.studies.sim.scenarios import Plan, Scenario
from nolocod.studies.sim.swarm import simulate_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.run.manifest import Manifest
    from nolocod.studies.sim.learner import LearningSwarm
    from nolocod.studies.sim.swarm import Report

    Log = Results["AttackTrial", "AttackOutcome"]

NONE, MIXED = "none", "all mixed"
OFF = presets.UNDEFENDED


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
    phase: int = 24
    step_seconds: float = 2.5
    """Virtual ones: a phase takes a minute."""
    hidden: int = 32

    def manifest(self) -> Manifest:
        run = presets.local_run(
            presets.llama(self.hidden, 2, 2, self.hidden * 11 // 4), rounds=self.head_start + self.rounds,
            inner_steps=self.phase, seed=self.seed, own_text=False,
        )  # fmt: skip
        change = msgspec.structs.replace
        inner = change(run.inner, learning_rate=4e-3, sequence=32, warmup_rounds=0.06 * run.outer.rounds)
        outer = Outer(rounds=run.outer.rounds, turns=run.outer.turns)  # as a run file that says no more
        return change(run, inner=inner, outer=outer, trust=self.trust, evaluation=change(run.evaluation, batches=64))

    @property
    def _run(self) -> Manifest:
        """As the nodes have it: a round is a turn."""
        return self.manifest().in_turns()

    @property
    def attacks(self) -> list[str]:
        from nolocod.studies.sim.learner import ATTACKS  # torch: the package is imported without it

        return [name for name in ATTACKS if self.attack in (name, MIXED)]

    @property
    def plan(self) -> Plan:
        nodes, trust = self.honest + bool(self.attacks) * self.hostile, self.trust
        rounds = self._run.outer.rounds
        return Plan("attacks", nodes, rounds, self.seed, trust.probation, trust.reputation, cheap=True)

    @property
    def scenario(self) -> Scenario:
        run = self._run
        outer = OuterSettings(turns=run.outer.turns, inner_steps=run.inner.steps, step_seconds=self.step_seconds)
        return Scenario(outer, hostile=1 - self.honest / self.plan.nodes, staleness=run.outer.staleness)


@dataclass(frozen=True)
class AttackOutcome:
    """What became of the honest nodes."""

    loss: float | None
    """Held out, in nats per token, their mean at the end; None where weights are not finite any more."""
    captured: float
    """A share of their outer steps, as the next: those with attackers, and those alone."""
    alone: float
    bans: int
    harm: tuple[int, int, int]
    """Nodes that ended, that were reset, that were starved (learner.py)."""


def simulated(trial: AttackTrial, cache: Path, scenario: Scenario | None = None) -> tuple[Report, LearningSwarm]:
    """A swarm in its end, and what is told of it. `scenario`: in place of the trial's own."""
    from nolocod.studies.sim.learner import LearningSwarm  # torch: the package is imported without it

    made = partial(LearningSwarm, trial.manifest(), trial.head_start, trial.attacks, cache)
    return simulate_in(made, trial.plan, scenario or trial.scenario)


def perform(trial: AttackTrial) -> AttackOutcome:
    """Simulate; SimulationError if the swarm broke a rule. One thread for each process."""
    with tempfile.TemporaryDirectory(prefix="nolocod-lab-") as cache:
        report, swarm = simulated(trial, Path(cache))
    if report.broken and not swarm.ended:
        raise SimulationError(f"{report.broken} things do not hold, the first: {report.violations[0]}.")
    loss, steps = statistics.mean(swarm.losses() or [math.nan]), max(1, report.paired + report.solo)
    harm = swarm.ended, len(swarm.behind), len(swarm.starved())
    shares = report.hostile / steps, report.solo / steps
    return AttackOutcome(loss if math.isfinite(loss) else None, *shares, report.bans, harm)


def log(kept: Path) -> Log:
    """The trials in the file `kept`."""
    return Results(kept, (AttackTrial, AttackOutcome))


def perform_all(trials: Iterable[AttackTrial], found: Log, workers: int, tell: Callable[[str], None]) -> None:
    """Do those that were not done yet."""

    def done(number: int, count: int, trial: AttackTrial, outcome: AttackOutcome) -> None:
        defended = "undefended" if trial.trust == OFF else "defended"
        loss = "not finite" if outcome.loss is None else f"{outcome.loss:.4f}"
        told = f"{loss}, {outcome.captured:.1%} with attackers, {outcome.alone:.1%} alone, harm {outcome.harm}"
        tell(f"{number} of {count}: attack {trial.attack}, {defended}, seed {trial.seed}: {told}")

    found.perform(trials, perform, workers, done)


@dataclass(frozen=True)
class Study:
    """No attack, every attack alone, and all mixed: defended on all `seeds`, undefended on the first."""

    like: AttackTrial
    seeds: tuple[int, ...]

    def trials(self) -> list[AttackTrial]:
        """What matters most comes first."""
        asked = [NONE, *reversed(self.attacks)]
        return [trial for trust in (Trust(), OFF) for attack in asked for trial in self._trials(attack, trust)]

    @property
    def attacks(self) -> list[str]:
        return [*replace(self.like, attack=MIXED).attacks, MIXED]

    def _trials(self, attack: str, trust: Trust) -> list[AttackTrial]:
        seeds = self.seeds[:1] if trust == OFF else self.seeds
        return [replace(self.like, attack=attack, trust=trust, seed=seed) for seed in seeds]

    def failures(self, log: Log) -> list[str]:
        """What attackers did to defended nodes that they must not be able to."""
        found = []
        for attack in self.attacks:
            _, cost, harm = self._told(attack, Trust(), log)
            if cost > BOUND or any(harm):
                found.append("{}: {:+.2f} % of loss, {} nodes ended, {} reset, {} starved".format(attack, cost, *harm))
        return found

    def to_text(self, log: Log) -> str:
        """A table in Markdown."""
        like = self.like
        lines = [
            f"{like.honest} honest nodes and {like.hostile} hostile ones, {like.rounds} rounds of {like.phase} inner steps and "
            f"{like.phase * like.step_seconds:.0f} s, from weights that had {like.head_start} alone; defended with seeds "
            f"{', '.join(map(str, self.seeds))}, undefended with the first.\n",
            "| attack | undefended | | harm | defended | | harm | with attackers | alone | bans |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for attack in [NONE, *self.attacks]:
            cells, found = [attack], [log[trial] for trial in self._trials(attack, Trust()) if trial in log]
            for trust in (OFF, Trust()):
                if any(trial not in log for one in (NONE, attack) for trial in self._trials(one, trust)):
                    cells += ["not run", "", ""]
                    continue
                loss, cost, harm = self._told(attack, trust, log)
                cells += [f"{loss:.4f}", f"{cost:+.2f} %"] if loss < _LOST else ["no model is left", ""]
                cells.append(", ".join(map(str, harm)))
            shares = [statistics.mean(some) for some in zip(*((one.captured, one.alone) for one in found), strict=True)]
            cells += [*(f"{share:.1%}" for share in shares), f"{sum(one.bans for one in found)}"] if shares else [""] * 3
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _told(self, attack: str, trust: Trust, log: Log) -> tuple[float, float, tuple[int, ...]]:
        """The mean loss, by how many percent the worst is above that without attackers, and all harm."""
        found, calm = ([log[trial] for trial in self._trials(one, trust)] for one in (attack, NONE))
        losses = [one.loss or math.inf for one in found]
        cost = max(100 * (loss / (other.loss or 1) - 1) for loss, other in zip(losses, calm, strict=True))
        return statistics.mean(losses), cost, tuple(map(sum, zip(*(one.harm for one in found), strict=True)))


_LOST = 100.0
"""Nats per token: what is told of a loss above that."""
BOUND = 3.0
"""Percent of their loss that attackers may cost defended nodes."""
FULL = Study(AttackTrial(NONE), (1, 2))
REDUCED = Study(AttackTrial(NONE, honest=6, hostile=2, head_start=15, rounds=10), (1,))
