"""Replicas under attack: some of them are hostile, and what becomes of the others is measured.

The rule: attackers have all that a real one could have, and more: they know the model, see the victim's message before
they make their own (a real one commits to the hashes of its own first), know the victim's clip radius, and act as one.
Honest replicas, their judgement of messages and their peer scores are the product's own. A refused partner costs a try,
and another is taken, as outer.loop does.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import torch

from nolocod.errors import RejectedTensorError
from nolocod.identity import PeerId
from nolocod.outer import step
from nolocod.outer.codec.base import HEADER
from nolocod.p2p.membership.peer_scoring import Conduct, Reputation
from nolocod.proto.types import Subject
from nolocod.studies.lab.methods import Method
from nolocod.studies.lab.multi_replica import MultiReplica, Point

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.replica import Replica

Kind = Literal["honest", "hostile"]
Attack = Literal["not finite", "huge", "sign flip", "noise", "drift", "stale", "clock"]
ATTACKS: dict[Attack, str] = {
    "not finite": "NaN in every value",
    "huge": "a million radii away, in a direction of chance",
    "sign flip": "trains as all do, and sends its change with the sign turned",
    "noise": "the victim's own message and noise of three radii, new each time",
    "drift": "the victim's own message and exactly a radius, always in the same direction",
    "stale": "the weights with which the attack began, and the victim's round: no work done",
    "clock": "an honest message, and a round as far ahead as is let through",
}
TRIES = 3
"""Partners that a node asks in one outer step before it takes it alone."""
_RADIUS = 1.5
"""Of the usual distance: what attackers take for the clip radius, so that attacks on runs without one are the same."""


class AdversarialReplicas(MultiReplica):
    """The last replicas are the attackers, and take `attacks` in turn."""

    def __init__(self, manifest: Manifest, honest: int, attackers: int, attacks: Sequence[Attack], cache: Path) -> None:
        super().__init__(manifest, Method("adversarial", "pairs"), honest + attackers, cache)
        trust = manifest.trust
        self._names = [PeerId(f"replica {index}") for index in range(honest + attackers)]
        self._scores = [Reputation(lambda _: None, trust.probation, trust.reputation) for _ in range(honest)]
        self._times = [0.0] * honest
        """Of each honest replica: a minute passes with every exchange."""
        self._attacks = attacks
        self._honest = self._replicas[:honest]
        self._turn = 0
        size = self._replicas[0].layout.size
        generator = torch.Generator().manual_seed(manifest.seed)
        self._chance = generator
        self._beginning = self._replicas[0].phi.clone()
        self._drift = torch.randn(size, generator=generator)
        self._drift /= self._drift.norm()
        self.weights: list[float] = []
        """What each partner's difference counted for, of all exchanges of honest replicas with one another."""
        self.met: Counter[Kind] = Counter()
        """Messages that honest replicas judged."""
        self.refused: list[tuple[Kind, RejectedTensorError]] = []
        """Those that they refused."""

    def begin_at(self, rounds: int) -> None:
        """Let one replica train for so many rounds alone, and all go on from where it is: a swarm in mid-run."""
        first = self._replicas[0]
        for _ in range(rounds):
            for _ in range(self.manifest.inner.steps):
                first.step()
            first.solo()
        for replica in self._replicas[1:]:
            replica.theta.copy_(first.theta)
            replica.phi.copy_(first.phi)
            moments = {name: one.clone() for name, one in first.inner.moments().items()}
            replica.inner.restore(moments, first.inner.optimizer_steps)
            replica.standing = first.standing
        first.delta.zero_()
        self._beginning.copy_(first.phi)

    def share_refused(self, kind: Kind) -> float:
        return sum(refused == kind for refused, _ in self.refused) / max(1, self.met[kind])

    def train(self) -> Point:
        """To the goal; the held-out losses of the honest replicas at the end."""
        goal = self.manifest.outer.rounds
        while any(replica.standing.round < goal for replica in self._honest):
            active = [replica for replica in self._replicas if replica.standing.round < goal]
            for replica in active:
                if replica in self._honest or {"sign flip", "clock"} & set(self._attacks):
                    for _ in range(self.manifest.inner.steps):
                        replica.step()
            self._meet([index for index, replica in enumerate(self._replicas) if replica in active])
        self._replicas = self._honest
        return self._point(goal)

    def _meet(self, free: list[int]) -> None:
        """Every active replica takes an outer step, with the first of a few partners that it does not refuse."""
        order = self._rng.sample(free, len(free))
        while order:
            one = order.pop()
            for other in order[-TRIES:][::-1]:
                if self._exchange(*sorted((one, other))):
                    order.remove(other)
                    break
            else:
                if self._replicas[one] in self._honest:
                    self._replicas[one].solo()

    def _exchange(self, first: int, second: int) -> bool:
        """Whether it was committed; honest replicas have the lower indices."""
        count = len(self._honest)
        if first >= count:
            return True  # two attackers leave each other alone
        if self._banned(first, second) or (second < count and self._banned(second, first)):
            return False
        return self._attacked(first, second) if second >= count else self._pair(first, second)

    def _banned(self, own: int, other: int) -> bool:
        return self._scores[own].banned(self._names[other], self._times[own]) > 0

    def _judge(self, own: int, other: int, conduct: Conduct) -> None:
        self._times[own] += 60
        self._scores[own].judge(self._names[other], conduct, self._times[own])

    def _pair(self, first: int, second: int) -> bool:
        both = ((first, second), (second, first))
        for index in (first, second):
            self._replicas[index].prepare(self._boxes[index], Subject())
        accepted = [self._inspected(own, other, "honest") for own, other in both]
        if all(accepted):
            rounds = [self._replicas[other].standing.round for _, other in both]
            for (own, other), number in zip(both, rounds, strict=True):
                applied = self._replicas[own].apply(self._boxes[own], self._boxes[other], number)
                self.weights.append(applied.weight)
                self._judge(own, other, Conduct.COMMITTED)
        return all(accepted)

    def _inspected(self, own: int, other: int, kind: Kind) -> bool:
        self.met[kind] += 1
        probation = self._scores[own].probation(self._names[other])
        try:
            self._replicas[own].inspect(self._boxes[own], self._boxes[other], probation=probation)
        except RejectedTensorError as error:
            self.refused.append((kind, error))
            self._judge(own, other, Conduct.REJECTED)
            return False
        return True

    def _attacked(self, victim: int, attacker: int) -> bool:
        replica, hostile = self._replicas[victim], self._replicas[attacker]
        attack = self._attacks[self._turn % len(self._attacks)]
        self._turn += 1
        replica.prepare(self._boxes[victim], Subject())
        self._write(attack, hostile, replica, self._boxes[attacker])
        committed = self._inspected(victim, attacker, "hostile")
        if committed:
            ahead = self.manifest.outer.staleness if attack == "clock" else 0
            replica.apply(self._boxes[victim], self._boxes[attacker], replica.standing.round + ahead)
            self._judge(victim, attacker, Conduct.COMMITTED)
        # it knows the victim's weights, and stays beside them
        hostile.phi.copy_(replica.phi)
        hostile.theta.copy_(replica.theta)
        hostile.delta.copy_(replica.delta)
        hostile.standing = replica.standing
        hostile.pass_boundary()
        hostile.standing = replica.standing
        return committed

    def _write(self, attack: Attack, hostile: Replica, victim: Replica, box: Tensor) -> None:
        """Write the attacker's message into its `box`."""
        settings = self.manifest.outer
        theirs = step.message(victim.phi, victim.theta, settings)
        change = hostile.theta - hostile.phi
        radius = _RADIUS * victim.usual_distance()
        match attack:
            case "not finite" | "clock":
                wanted = step.message(hostile.phi, hostile.theta, settings)
            case "huge":
                wanted = theirs + 1e6 * radius * self._random_direction()
            case "sign flip":
                wanted = settings.gamma * hostile.phi - settings.beta * change
            case "noise":
                wanted = theirs + 3 * radius * self._random_direction()
            case "drift":
                wanted = theirs + radius * self._drift
            case "stale":
                wanted = settings.gamma * self._beginning
        hostile.theta.copy_(step.sent(hostile.phi, wanted, settings))
        hostile.prepare(box, Subject())
        if attack == "not finite":
            box[HEADER:].fill_(255)

    def _random_direction(self) -> Tensor:
        drawn = torch.randn(self._drift.shape, generator=self._chance)
        return drawn.div_(drawn.norm())
