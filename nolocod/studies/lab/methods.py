"""The methods that are compared, each as a manifest's outer settings and who takes part in an outer step.

The rule: everything but the method is the same for all: model, tokens, their order, inner optimizer, schedule,
number of inner steps. `alpha`, `beta`, `gamma` and `every` are each method's own, as its paper gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nolocod.run.manifest import CODEC_BYTES

if TYPE_CHECKING:
    from nolocod.run.manifest import Codec

Scheme = Literal["pairs", "all", "none", "gradients"]
"""Who takes part in an outer step: random pairs (NoLoCo); all at once (DiLoCo); nobody, each trains alone; or there is
none, and the gradients of all are averaged at every step (synchronous data parallel)."""


@dataclass(frozen=True)
class Method:
    """`every`: inner steps between outer steps, in units of the trial's. `late`: of them, how many a merge comes late."""

    name: str
    scheme: Scheme
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    every: float = 1
    codec: Codec = "float32"
    late: int = 0
    fragments: int = 1
    tuned_as: str = ""
    """The method whose learning rate it takes; its own where this is empty."""
    at_each_count: bool = True
    """Whether it is trained at every count of replicas, or at the lowest alone."""

    def sent(self, replicas: int, phase: int) -> float:
        """Bytes that a node sends per parameter and `phase` inner steps: messages to partners, or a ring's all-reduce of
        float32."""
        ring = 2 * (replicas - 1) / replicas * CODEC_BYTES["float32"]
        match self.scheme:
            case "pairs":
                return CODEC_BYTES[self.codec] / self.every
            case "all":
                return ring / self.every
            case "gradients":
                return ring * phase
            case "none":
                return 0.0


_PAPER = Method("NoLoCo, the paper's", "pairs", alpha=0.5, beta=0.7, gamma=0.7)
OURS = replace(_PAPER, name="NoLoCo, ours", every=0.5, codec="modulo8")
"""A run file's defaults: the paper's outer step, a byte where its pairs send eight, twice as often."""
_OURS = replace(OURS, tuned_as=OURS.name)
METHODS = (
    Method("data parallel", "gradients"),
    Method("DiLoCo", "all", alpha=0.3, beta=0.7, gamma=0.7),
    Method("DiLoCo, half as often", "all", alpha=0.3, beta=0.7, gamma=0.7, every=2, tuned_as="DiLoCo", at_each_count=False),
    _PAPER,
    OURS,
    Method("pair averaging", "pairs", at_each_count=False),
    Method("none", "none", at_each_count=False),  # replicas do not know how many there are
)
VARIANTS = (
    replace(_OURS, name="ours, with the paper's bytes", every=0.26),
    replace(_OURS, name="ours, merged 5 inner steps late", late=5),
    replace(_OURS, name="ours, 5 fragments", fragments=5),
    replace(OURS, name="ours, alpha 0.2, beta and gamma 1", alpha=0.2, beta=1, gamma=1),
    replace(OURS, name="ours, beta 1, gamma 0.75", beta=1, gamma=0.75),
    replace(OURS, name="pair averaging, as ours is sent", alpha=0, beta=1, gamma=1, tuned_as="pair averaging"),
    Method("DiLoCo, with our alpha, as often", "all", alpha=OURS.alpha, beta=OURS.beta, every=OURS.every, tuned_as="DiLoCo"),
)
BY_NAME = {method.name: method for method in (*METHODS, *VARIANTS)}
