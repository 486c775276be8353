"""The methods that are compared, each as a manifest's outer settings and who takes part in an outer step.

The rule: everything but the method is the same for all: model, tokens, their order, inner optimizer, schedule,
number of inner steps. `alpha`, `beta`, `gamma` and `every` are each method's own, as its paper gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.manifest import Codec
    from nolocod.trainer.rehearsal import Scheme


@dataclass(frozen=True)
class Method:
    """`every`: inner steps between outer steps, in units of the trial's. `late`: of them, how many a merge comes late."""

    name: str
    scheme: Scheme
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    every: int = 1
    codec: Codec = "float32"
    late: int = 0
    fragments: int = 1
    tuned_as: str = ""
    """The method whose learning rate it takes; its own where this is empty."""
    at_each_count: bool = True
    """Whether it is trained at every count of replicas, or at the lowest alone."""


METHODS = (
    Method("data parallel", "gradients"),
    Method("DiLoCo", "all", alpha=0.3, beta=0.7, gamma=0.7),
    Method("DiLoCo, half as often", "all", alpha=0.3, beta=0.7, gamma=0.7, every=2, tuned_as="DiLoCo", at_each_count=False),
    Method("NoLoCo, the paper's", "pairs", alpha=0.5, beta=0.7, gamma=0.7),
    Method("NoLoCo, ours", "pairs", alpha=0.2),
    Method("pair averaging", "pairs"),
    Method("none", "none", at_each_count=False),  # replicas do not know how many there are
)
VARIANTS = (
    Method("ours, merged 5 inner steps late", "pairs", alpha=0.2, late=5, tuned_as="NoLoCo, ours"),
    Method("ours, 4 fragments", "pairs", alpha=0.2, fragments=4, tuned_as="NoLoCo, ours"),
    Method("ours, 8 bits", "pairs", alpha=0.2, codec="modulo8", tuned_as="NoLoCo, ours"),
    Method("ours, 8 bits, 5 late", "pairs", alpha=0.2, codec="modulo8", late=5, tuned_as="NoLoCo, ours"),
    Method("the paper's, gamma = 1 - alpha^2", "pairs", alpha=0.5, beta=0.7, gamma=0.75, tuned_as="NoLoCo, the paper's"),
)
BY_NAME = {method.name: method for method in (*METHODS, *VARIANTS)}
