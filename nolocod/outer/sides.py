"""What the loop stands between: the trainer, and the peers; and the trainer as it is engaged for one outer step.

The rule: nothing here decides anything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nolocod.identity import PeerId
    from nolocod.proto.types import Applied, Box, Description, Ended, Inspection, Standing


class Trainer(Protocol):
    """The replica, as the loop sees it."""

    @property
    def outbox(self) -> Box: ...
    @property
    def inbox(self) -> Box: ...
    @property
    def standing(self) -> Standing: ...
    @property
    def steps_since_outer(self) -> int: ...
    @property
    def can_enlarge(self) -> bool:
        """Whether `enlarge` may be asked for."""
        ...

    def subject(self, count: int) -> int:
        """What our next outer step should be about, if it is about `count` parts."""
        ...

    async def enlarge(self, times: int) -> None:
        """Take inner steps of so many times the run's tokens from now on."""
        ...

    async def wait_steps(self, count: int) -> None:
        """Return once `count` inner steps were done since the last outer step."""
        ...

    async def capture(self, subject: int, after: int) -> Description:
        """Copy theta at the end of an inner step, once `after` were done since the last outer step."""
        ...

    async def inspect(self, *, probation: bool) -> Inspection:
        """Check the partner's message; one on `probation` has half of the clip radius. RejectedTensorError."""
        ...

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        """Our round becomes the next one, or `run_round` if that is further."""
        ...

    async def solo(self, run_round: int, subject: int, after: int) -> Applied:
        """Take an outer step with nobody, when a `capture` would be."""
        ...

    async def discard(self) -> None: ...


class Mesh(Protocol):
    """The peers, as the loop sees them."""

    def partner(self, own: Standing, avoid: Collection[PeerId], apart: Collection[PeerId]) -> PeerId | None:
        """Draw a live training member within the staleness limit, or None; as if those `apart` were not there."""
        ...

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        """Whether an offer of `peer` may be taken; `late`: our own draws have failed."""
        ...

    def met(self, peer: PeerId, *, offered: bool) -> None:
        """An exchange with `peer` was committed, that it `offered`."""
        ...

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        """The round to which a step with `peer`, who says that it is at `told`, takes us; a round takes `phase` seconds."""
        ...

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        """Tell others that our phases take `phase` seconds; return what the run's take, and by how many rounds one at round
        `number` is before the others. 0 seconds: not known."""
        ...

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: TrainerSide) -> Ended:
        """Run a whole exchange as the one who offers; remote faults are outcomes, not exceptions."""
        ...

    def suspect(self, peer: PeerId) -> None:
        """This peer could not be reached: do not choose it for a while."""
        ...


class TrainerSide:
    """The trainer, engaged for one outer step (proto.types.LocalSide); a solo step has no partner."""

    def __init__(
        self, trainer: Trainer, begun: Callable[[], None], probation: Callable[[], bool], phase: float = math.inf,
        *, after: int = 0, wary: bool = False, credit: float = 1.0,
    ) -> None:  # fmt: skip
        """`begun` is told of the capture, which comes `after` so many inner steps; `probation` says whether the partner's
        message counts for less."""
        self._trainer, self.phase, self.wary, self.credit = trainer, phase, wary, credit
        self._after = after
        self.outbox, self.inbox = trainer.outbox, trainer.inbox
        self._begun = begun
        self._probation = probation
        self.captured = False
        """A capture may lie in the outbox ..."""
        self.subject = 0
        """... of this."""

    async def capture(self, subject: int) -> Description:
        self._begun()
        self.subject = subject
        self.captured = True  # before the await: cancelled in it, the trainer may have taken one
        return await self._trainer.capture(subject, self._after)

    async def inspect(self) -> bytes:
        return (await self._trainer.inspect(probation=self._probation())).skipped
