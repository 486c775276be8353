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
    """`every`: inner steps between outer steps, in units of the trial's."""

    name: str
    scheme: Scheme
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    nesterov: bool = False
    """Whether slow weights go as far as momentum will take them next (scheme "all")."""
    every: float = 1
    codec: Codec = "float32"
    turns: int = 1
    """Parts of the model that are exchanged in turn; 0: as many as a run file has that does not say."""
    busy: bool = False
    """Whether the line carries one exchange after the other, so that each part is merged when the next is sent."""
    clip: float = 0.0
    """The clip radius (manifest.Trust); what other methods have against hostile members is not ours to choose."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """As in a run file, and so is the schedule."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    tuned_as: str = ""
    """The method whose learning rate it takes; its own where this is empty."""
    at_each_count: bool = True
    """Whether it is trained at every count of replicas, or at the lowest alone."""

    def sent(self, replicas: int, phase: int) -> float:
        """Bytes that a node sends per parameter and `phase` inner steps: messages to partners, or a ring's all-reduce."""
        ring = 2 * (replicas - 1) / replicas * CODEC_BYTES[self.codec]
        match self.scheme:
            case "pairs":
                return CODEC_BYTES[self.codec] / self.every
            case "all":
                return ring / self.every
            case "gradients":
                return ring * phase
            case "none":
                return 0.0


_PAPER = Method("NoLoCo, the paper's", "pairs", alpha=0.5, beta=0.7, gamma=0.7, at_each_count=False)
OURS = replace(_PAPER, name="ours", every=0.48, codec="modulo8", turns=0, clip=1.5, at_each_count=True)
"""A run file's defaults: the paper's outer step, a byte where its pairs send eight, twice as often, an eighth of the model at a
time."""
BUSY = replace(OURS, name="ours, on a busy line", busy=True, tuned_as=OURS.name)
FOUR_BITS = replace(
    OURS, name="ours, in four bits, twice as often", every=0.24, codec="modulo4", tuned_as=OURS.name, at_each_count=False
)
"""With as many bytes: what an outer step needs half of is taken twice."""
FIVE = replace(OURS, name="ours, in five turns", every=0.5, turns=5, tuned_as=OURS.name)
"""Of five inner steps each."""
FIVE_BUSY = replace(FIVE, name="ours, in five turns, on a busy line", busy=True)
BEFORE = replace(FIVE, name="release 0.1's", turns=1, clip=0.0, optimizer="adamw", schedule="cosine", tuned_as="")
BEFORE_BUSY = replace(BEFORE, name="release 0.1's, on a busy line", busy=True, tuned_as=BEFORE.name)
"""But that only the partner's part comes late, as it does now whatever the run says."""
_WHOLE = replace(FIVE, name="ours, in one part", turns=1, tuned_as=OURS.name, at_each_count=False)
_DILOCO = Method("DiLoCo", "all", alpha=0.3, beta=0.7, at_each_count=False)
OFTEN = replace(
    _DILOCO, name="DiLoCo, with our alpha, as often", alpha=0.5, every=0.5, tuned_as=_DILOCO.name, at_each_count=True
)
METHODS = (
    Method("data parallel", "gradients"),
    _DILOCO,
    replace(_DILOCO, name="DiLoCo, Nesterov 0.9", alpha=0.9, gamma=0.3, nesterov=True),
    OFTEN,
    _PAPER,
    OURS,
    BUSY,
    FIVE,
    FIVE_BUSY,
    BEFORE,
    BEFORE_BUSY,
    Method("pair averaging", "pairs", at_each_count=False),
    Method("none", "none", at_each_count=False),  # replicas do not know how many there are
)
_PAIR_AVERAGING = replace(FIVE, name="pair averaging, as ours is sent", alpha=0.0, beta=1.0, gamma=1.0)
VARIANTS = (
    FOUR_BITS,
    _WHOLE,
    replace(_WHOLE, name="ours, in one part, on a busy line", busy=True),
    replace(_WHOLE, name="ours, with the paper's bytes", every=0.26),
    replace(FIVE, name="ours, alpha 0.2, beta and gamma 1", alpha=0.2, beta=1, gamma=1, at_each_count=False),
    replace(FIVE, name="ours, beta 1, gamma 0.75", beta=1, gamma=0.75, at_each_count=False),
    replace(_PAIR_AVERAGING, tuned_as="pair averaging", at_each_count=False),
)
BY_NAME = {method.name: method for method in (*METHODS, *VARIANTS)}
