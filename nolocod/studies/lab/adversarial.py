"""Replicas under attack: some of them are hostile, and what becomes of the others is measured.

The rule: attackers have all that a real one could have, and more: they know the model, see the victim's message before they
make their own (a real one commits to the hashes of its own first), know the victim's clip radius, act as one, and are always
there and always first. Honest replicas, their judgement of messages, their peer scores, and whom they draw and admit are the
product's own. A refused partner costs a try, and another is taken, as outer.loop does.
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
from nolocod.p2p.membership.peer_selection import PeerSelection
from nolocod.proto.types import Member, Standing
from nolocod.studies.lab.methods import Method
from nolocod.studies.lab.multi_replica import MultiReplica, Point

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.replica import Replica

Kind = Literal["honest", "hostile"]
Attack = Literal["not finite", "huge", "sign flip", "noise", "drift", "stale", "clock", "stall"]
ATTACKS: dict[Attack, str] = {
    "not finite": "NaN in every value",
    "huge": "a million radii away, in a direction of chance",
    "sign flip": "trains as all do, and sends its change with the sign turned",
    "noise": "the victim's own message and noise of three radii, new each time",
    "drift": "the victim's own message and exactly a radius, always in the same direction",
    "stale": "the weights with which the attack began, and the victim's round: no work done",
    "clock": "an honest message, and a round as far ahead as is let through",
    "stall": "takes the exchange, and gives nothing until the victim has to go on alone",
}
_RADIUS = 1.5
"""Of the usual distance: what attackers take for the clip radius, so that attacks on runs without one are the same."""


class AdversarialReplicas(MultiReplica):
    """The last replicas are the attackers, and take `attacks` in turn."""

    def __init__(self, manifest: Manifest, honest: int, attackers: int, attacks: Sequence[Attack], cache: Path) -> None:
        super().__init__(manifest, Method("adversarial", "pairs"), honest + attackers, cache)
        trust = manifest.trust
        self._names = [PeerId(f"replica {index}") for index in range(honest + attackers)]
        self._scores = [Reputation(lambda _: None, trust.probation, trust.reputation) for _ in range(honest)]
        self._selections = [PeerSelection(self._names[index], self._rng, score) for index, score in enumerate(self._scores)]
        self._staleness = manifest.outer.staleness
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
        self.partners: Counter[Kind | Literal["none"]] = Counter()
        """Of the outer steps of honest replicas."""
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

    def shares(self) -> tuple[float, float]:
        """Of the honest replicas' outer steps: those with attackers, and those alone."""
        whole = max(1, self.partners.total())
        return self.partners["hostile"] / whole, self.partners["none"] / whole

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
        """Every active honest replica takes an outer step: with an attacker if one is admitted, as all of them offer to it as
        soon as it takes offers; or with whom it draws, if that one is free and takes it; or alone."""
        count, hostile = len(self._honest), range(len(self._honest), len(self._replicas))
        waiting = [index for index in free if index < count]
        self._rng.shuffle(waiting)
        captors = [self._rng.sample(hostile, len(hostile)) for _ in waiting]
        waiting = [
            one for one, some in zip(waiting, captors, strict=True) if not any(self._captured(one, other) for other in some)
        ]
        while waiting:
            one = waiting.pop()
            draw, own = self._selections[one].draw, self._replicas[one].standing
            avoid = {name for other, name in enumerate(self._names) if other == one or self._banned(one, other)}
            while (name := draw(self._members(), own, self._staleness, avoid)) is not None:
                avoid.add(name)
                other = self._names.index(name)
                if other >= count:
                    done = self._attacked(one, other)
                else:
                    done = other in waiting and self._takes(other, one, late=True) and self._pair(*sorted((one, other)))
                if done:
                    self._remember(one, other, offered=False)
                    if other < count:
                        waiting.remove(other)
                        self._remember(other, one, offered=True)
                    break
            else:
                self._replicas[one].solo()
                self.partners["none"] += 1

    def _captured(self, victim: int, attacker: int) -> bool:
        """Whether `victim` took the offer of `attacker`, and the exchange was committed."""
        if not self._takes(victim, attacker, late=False) or not self._attacked(victim, attacker):
            return False
        self._remember(victim, attacker, offered=True)
        return True

    def _takes(self, own: int, other: int, *, late: bool) -> bool:
        standing, members = self._replicas[own].standing, self._members()
        admitted = self._selections[own].admits(self._names[other], members, standing, self._staleness, late=late)
        return admitted and not self._banned(own, other)

    def _remember(self, own: int, other: int, *, offered: bool) -> None:
        self._selections[own].met(self._names[other], self._members(), offered=offered)
        self.partners["hostile" if other >= len(self._honest) else "honest"] += 1

    def _members(self) -> list[Member]:
        """Everybody, each verified at an address of its own; attackers say that they are where one wants them."""
        ahead = max(replica.standing.round for replica in self._honest)
        rounds = [
            replica.standing.round if index < len(self._honest) else ahead for index, replica in enumerate(self._replicas)
        ]
        said = [Standing(number, 0, 0.0) for number in rounds]
        both = zip(self._names, said, strict=True)
        return [Member(name, one, "training", (), "", 0.0, None, group=name, verified=True) for name, one in both]

    def _banned(self, own: int, other: int) -> bool:
        return self._scores[own].banned(self._names[other], self._times[own]) > 0

    def _judge(self, own: int, other: int, conduct: Conduct) -> None:
        self._times[own] += 60
        self._scores[own].judge(self._names[other], conduct, self._times[own])

    def _pair(self, first: int, second: int) -> bool:
        both = ((first, second), (second, first))
        for index in (first, second):
            self._replicas[index].prepare(self._boxes[index], 0)
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
        if attack == "stall":
            self._judge(victim, attacker, Conduct.WITHHELD)
            replica.solo()
            return True
        replica.prepare(self._boxes[victim], 0)
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
            case "not finite" | "clock" | "stall":
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
        hostile.prepare(box, 0)
        if attack == "not finite":
            box[HEADER:].fill_(255)

    def _random_direction(self) -> Tensor:
        drawn = torch.randn(self._drift.shape, generator=self._chance)
        return drawn.div_(drawn.norm())
