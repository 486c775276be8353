"""`nolocod lab attacks`: what hostile partners do to learning, with the defences of `[trust]` and without.

The rule: a quarter of the replicas is hostile. Every attack is fought on the same seed, tokens and pairs' draw as the run
in which the same honest replicas are among themselves; each alone and all mixed, defended and not. A result follows
from its settings alone, which are its key in the file of results: what was done is not done again.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod import presets
from nolocod.errors import TrainerError
from nolocod.identity import PeerId
from nolocod.manifest import Trust
from nolocod.p2p.reputation import Deed, Reputation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.errors import RejectedTensorError
    from nolocod.manifest import Manifest

NONE, MIXED = "none", "all mixed"
OFF = Trust(clip=0, direction=0, accept=0, reputation=False, probation=0)
"""No defence but those of structure, which cannot be switched off."""


@dataclass(frozen=True)
class Battle:
    """One run: `honest` replicas and `hostile` ones that do `attack`."""

    attack: str
    defended: bool
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
    trust: Trust = field(default_factory=Trust)

    @property
    def key(self) -> str:
        return msgspec.json.encode(self, order="deterministic").decode()

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
        return change(
            run, inner=inner, trust=self.trust if self.defended else OFF, evaluation=change(run.evaluation, batches=64)
        )


@dataclass(frozen=True)
class Fought:
    """Held-out losses in nats per token at the end, of honest replicas; shares of exchanges that honest replicas refused;
    the mean weight of partners' differences among honest replicas."""

    mean: float
    worst: float
    refused_hostile: float
    refused_honest: float
    weight: float


class _Opinion:
    """One node's reputation (trainer.siege.Opinion), on a clock that moves by a minute with every exchange."""

    def __init__(self, trust: Trust) -> None:
        self._reputation = Reputation(lambda _: None, trust.probation, trust.reputation)
        self._now = 0.0

    def probation(self, peer: int) -> bool:
        return self._reputation.probation(_name(peer))

    def banned(self, peer: int) -> bool:
        return self._reputation.banned(_name(peer), self._now) > 0

    def committed(self, peer: int) -> None:
        self._judge(peer, Deed.COMMITTED)

    def rejected(self, peer: int, error: RejectedTensorError) -> None:
        self._judge(peer, Deed.REJECTED)

    def _judge(self, peer: int, deed: Deed) -> None:
        self._now += 60
        self._reputation.judge(_name(peer), deed, self._now)


def _name(peer: int) -> PeerId:
    return PeerId(f"replica {peer}")


def fight(battle: Battle) -> Fought:
    """Train. One thread for each process."""
    from nolocod.trainer.rehearsal import Point, use_threads  # torch: the package is imported without it
    from nolocod.trainer.siege import ATTACKS, Siege

    use_threads(1)
    manifest = battle.manifest()
    chosen = [name for name in ATTACKS if battle.attack in (name, MIXED)]
    opinions = [_Opinion(manifest.trust) for _ in range(battle.honest)]
    with tempfile.TemporaryDirectory(prefix="nolocod-lab-") as cache:
        siege = Siege(manifest, opinions, battle.hostile if chosen else 0, chosen, Path(cache))
        siege.begin_at(battle.head_start)
        try:
            end = siege.fight()
        except TrainerError:  # its weights are not finite any more
            end = Point(0, math.inf, math.inf, math.inf, math.inf)
    shares = {kind: siege.rejected[kind] / max(1, siege.met[kind]) for kind in siege.met}
    mean, worst = (loss if math.isfinite(loss) else math.inf for loss in (end.mean, end.worst))
    return Fought(mean, worst, shares["hostile"], shares["honest"], statistics.mean(siege.weights))


_PAGE = """# What hostile partners do to learning

Made by `nolocod lab attacks`. A quarter of the replicas is hostile, and everything else is the product's own: model,
messages, judgement, outer step, reputation. Attackers know more than real ones could: they see the victim's message before
they make theirs, know its clip radius, and act as one. How the defences work, and what goes through them:
[security.md](security.md).

Defended is a run with {trust}; undefended one without any. In both, messages of another size are refused, and so are values
that are not finite: that cannot be switched off. A refused partner costs a try, and another one is asked.

| attack | what it is |
|---|---|
{kinds}

{table}
"""


def _settings(trust: Trust) -> str:
    return ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in msgspec.structs.asdict(trust).items())


class Log:
    """The results of battles, in the file `kept`, one JSON line each, and in memory."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._found: dict[str, Fought] = {}
        if kept.exists():
            for line in kept.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                battle = msgspec.convert(entry["battle"], Battle)
                self._found[battle.key] = Fought(**entry["fought"])

    def __getitem__(self, battle: Battle) -> Fought:
        return self._found[battle.key]

    def perform(self, battles: Iterable[Battle], workers: int, tell: Callable[[str], None]) -> None:
        """Fight those that were not fought yet, `workers` at a time."""
        left = list({battle.key: battle for battle in battles if battle.key not in self._found}.values())
        if not left:
            return
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool(workers) as pool, self._kept.open("a", encoding="utf-8") as handle:
            for number, (battle, fought) in enumerate(pool.imap_unordered(_fought, left), 1):
                self._found[battle.key] = fought
                entry = {"battle": msgspec.to_builtins(battle), "fought": asdict(fought)}
                handle.write(json.dumps(entry) + "\n")
                handle.flush()
                kind = "defended" if battle.defended else "undefended"
                tell(f"{number} of {len(left)}: {battle.attack}, {kind}, seed {battle.seed}: {fought.mean:.4f}")


def _fought(battle: Battle) -> tuple[Battle, Fought]:
    return battle, fight(battle)


@dataclass(frozen=True)
class Study:
    """What is fought: every attack alone and all mixed, defended and not, on each seed."""

    like: Battle
    seeds: tuple[int, ...]

    def battles(self) -> list[Battle]:
        return [
            self.battle(attack, defended, seed) for seed in self.seeds for attack in self.attacks for defended in (False, True)
        ]

    @property
    def attacks(self) -> list[str]:
        from nolocod.trainer.siege import ATTACKS  # torch: the package is imported without it

        return [NONE, *ATTACKS, MIXED]

    def battle(self, attack: str, defended: bool, seed: int) -> Battle:
        return replace(self.like, attack=attack, defended=defended, seed=seed)

    def to_text(self, log: Log) -> str:
        """A table in Markdown."""
        like = self.like
        seeds = ", ".join(map(str, self.seeds))
        lines = [
            f"{like.honest} honest replicas and {like.hostile} hostile ones, {like.rounds} outer steps of {like.phase} inner "
            f"ones, from weights that had {like.head_start} alone; seeds {seeds}.",
            "Loss: the honest replicas' mean, in nats per token; against the same run without attack, the worst seed.\n",
            "| attack | undefended | against none | defended | against none | hostile refused | honest refused |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [self._row(attack, log) for attack in self.attacks]
        return "\n".join(lines)

    def to_page(self, log: Log) -> str:
        """docs/attacks.md."""
        from nolocod.trainer.siege import ATTACKS  # as above

        kinds = "\n".join(f"| {name} | {what} |" for name, what in ATTACKS.items())
        return _PAGE.format(kinds=kinds, table=self.to_text(log), trust=_settings(self.like.trust))

    def _row(self, attack: str, log: Log) -> str:
        cells = [attack]
        for defended in (False, True):
            found = [log[self.battle(attack, defended, seed)].mean for seed in self.seeds]
            calm = [log[self.battle(NONE, False, seed)].mean for seed in self.seeds]
            if math.isfinite(sum(found)):
                cells += [f"{statistics.mean(found):.4f}", f"{self._worse(found, calm):+.2f} %"]
            else:
                cells += ["not finite", "broken"]
        last = [log[self.battle(attack, True, seed)] for seed in self.seeds]
        refused = statistics.mean(one.refused_hostile for one in last)
        cells += ["" if attack == NONE else f"{refused:.0%}", f"{statistics.mean(one.refused_honest for one in last):.1%}"]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def _worse(found: list[float], calm: list[float]) -> float:
        return max(100 * (one / other - 1) for one, other in zip(found, calm, strict=True))


FULL = Study(Battle(NONE, True), (1, 2))
REDUCED = Study(Battle(NONE, True, honest=6, hostile=2, head_start=15, rounds=10), (1,))
