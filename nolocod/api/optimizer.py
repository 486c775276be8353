"""NoLoCo as a torch optimizer: the caller's own one, with outer steps among its steps.

The rule: all that a scheduler, a trainer or a gradient scaler reads and sets is the caller's optimizer's; only its steps are
counted here, and between two of them the swarm is served (arXiv 2506.10911).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nolocod.errors import UsageError
from nolocod.trainer.own import OwnReplica, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from nolocod.api.swarm import Swarm


class NoLoCo(torch.optim.Optimizer):
    """Trains `parameters` with `optimizer`, and takes outer steps with the swarm's nodes beside.

    `parameters` are those of the run's model in its order: `model.parameters()`, or `model.named_parameters()`, whose names are
    compared too. They must be on their device already. `evaluate` gives a held-out loss of them, in nats; without it a donor's
    weights are not tried before they are kept. Returns once the parameters hold the run's weights: the founder's own, a
    donor's, or the last checkpoint's with the state of `optimizer`. Raises ParametersDifferError, NoDonorError, CheckpointError
    and what else a start of the daemon does.
    """

    _step_supports_amp_scaling = False  # torch.amp.GradScaler is to unscale, whatever `optimizer` could do itself

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        swarm: Swarm,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.swarm = swarm
        given = named(parameters)
        self._replica = swarm.begin(lambda sealed, base: OwnReplica(sealed, base, given, optimizer, evaluate))

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | float | None = None) -> Any:  # noqa: ANN401
        """Take an inner step as the optimizer does, and what the swarm asked for since the last one.

        `loss`, or what `closure` returns, is shown as this node's training loss. It is read twice a second. DaemonEndedError
        once, after the inner step, if the daemon has ended; who catches it trains on alone.
        """
        returned = self.optimizer.step(closure)
        self.swarm.stepped(self._replica, returned if loss is None else loss)
        return returned

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own; what the swarm needs is in the data directory's checkpoints."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError("a run's parameters stay the same.", remedy="Give all of them before NoLoCo is made.")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - parameter groups, state, hooks: nothing of these is kept here
        if name == "optimizer":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)
