"""When an outer step is due, and how it is taken: draw, offer, answer, apply, or solo. Who is drawn: peer_selection.

The rule: training never waits here. In the last inner step before a boundary (enough of them since the last outer step)
this node looks for a partner, so that weights are copied right at the boundary. A node that will then be past half of its
inner steps accepts the offer of another whose turn it is (`Mesh.admits`); and when patience ends without a partner, the step
is taken solo. Nothing is applied unless the exchange was committed on both sides. The trainer and the mesh are two protocols
(sides.py) and time is trio's clock, so the simulator runs this very file.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import RefusedError
from nolocod.identity import short
from nolocod.observe.events import Emit, Event, ExchangeEnded, ExchangeStarted, InnerSteps, OuterStep, StateChanged
from nolocod.outer.phase import Phase, at_once
from nolocod.outer.sides import TrainerSide
from nolocod.outer.wasted import WastedTime
from nolocod.proto.types import Accept, Answer, Applied, Busy, Ended, Offer, Refuse, Standing, parts_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.outer.sides import Mesh, Trainer

_BUSY_SECONDS = 1.0
"""What a peer is told when we are in another exchange: about as long as one takes."""
_CLOSED_SECONDS = 5.0
"""What a peer is told when we are stopping, or fetching weights."""
_AVOID_SECONDS = 30.0
"""How long a partner that refused or failed is not asked again, at most: one inner phase."""
_LOOK_AGAIN = 0.5
"""The longest pause between two looks for a partner: members come and go meanwhile."""
_OWN_TRIES = 3
"""Draws of our own that must fail before more offers are taken than are due (`Mesh.admits`)."""
_LATELY = 3600.0
"""For so long who was let down by a partner looks for one for two phases at most. While it looks the others take outer steps;
that, and the steps that attackers cost, put it behind them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.05
"""Of an inner phase: between a partner that is busy and the next one, doubled with each. Who offers is busy itself, so where
all hurry from one to the next nobody finds anybody."""
_PARTNERS = 64
"""Of whom it is remembered how long an exchange takes."""
_FAR = 2 / 3
"""Of the rounds at which others refuse us."""


@dataclass(frozen=True)
class LoopSettings:
    """The run's settings of the loop (manifest: `inner.steps` and `[outer]`)."""

    inner_steps: int
    staleness: int
    patience: float
    goal: int
    """Outer steps at which the run ends; 0 for never."""
    step_tokens: int
    """Of an inner step."""
    parts: int
    """Of the model, which are exchanged in turn."""

    def reached(self, standing: Standing) -> bool:
        return 0 < self.goal <= standing.round


class OuterLoop:
    """Drives outer steps for one trainer, as offerer (`run`) and as answerer (proto.types.Answerer)."""

    def __init__(
        self, own: PeerId, trainer: Trainer, mesh: Mesh, settings: LoopSettings, emit: Emit, probation: Callable[[PeerId], bool]
    ) -> None:
        """`probation`: whether a partner is so new to us that its messages count for less (manifest.Trust)."""
        self._own = own
        self._trainer = trainer
        self._mesh = mesh
        self._settings = settings
        self._emit = emit
        self._probation = probation
        self._local_side: TrainerSide | None = None  # set while an accepted or own exchange is under way
        self._offering_to: PeerId | None = None  # our offer that nobody accepted yet
        self._alone: trio.CancelScope | None = None  # of the step alone that waits for its inner step, or is taken
        self._started = 0.0
        self._idle = trio.Event()
        self._idle.set()
        self._closing = False
        self._busy: dict[PeerId, float] = {}  # until when; worth waiting for
        self._shunned: dict[PeerId, float] = {}  # refused or failed: not worth it
        self._wasted = WastedTime()
        self._phase = Phase(settings.inner_steps, settings.parts, enlarges=trainer.can_enlarge)
        self._pause = 0.0  # after a partner that is busy
        self._part_seconds: dict[PeerId, float] = {}  # of the last exchange with each, for each part that it was about
        self._tries = 0  # our own draws in this step
        self._none_better = False  # the last one found nobody but those who are set apart
        self._failed = False  # in this step an exchange failed while we were wary ...
        self._let_down = False  # ... or at all: it is not waited for as long, for the others are two rounds on by then
        self._let_down_at = -math.inf

    # --- the offering side ------------------------------------------------------------------------

    async def run(self) -> None:
        """Take outer steps until the run's goal is reached, or `close` is called."""
        self._closing = False
        while not (self._closing or self._settings.reached(self._trainer.standing)):
            self._fit_phase()
            await self._trainer.enlarge(self._phase.times)
            await self._trainer.wait_steps(self._phase.steps - 1)
            await self._outer_step()

    async def close(self, grace: float) -> None:
        """Accept nothing more and wait at most `grace` seconds for the exchange under way."""
        self._closing = True
        with trio.move_on_after(grace):
            await self._idle.wait()

    def _fit_phase(self) -> None:
        self._phase.fit(*self._mesh.pace(self._trainer.standing.round, self._phase.own))

    def _missing(self, steps: int) -> int:
        """Inner steps before the one that will be the last of `steps`: an exchange may begin in that."""
        return steps - 1 - self._trainer.steps_since_outer

    async def _outer_step(self) -> None:
        """Offer to one partner after another until a step was taken, by them, by us, or solo."""
        since, began = trio.current_time(), self._trainer.standing.round
        self._pause = _FIRST_PAUSE * self._phase.seconds
        while True:
            while self._local_side is not None:  # looked at again: whoever was told first may have accepted the next one
                await self._idle.wait()
            own = self._trainer.standing
            if self._closing or self._settings.reached(own) or self._missing(self._phase.steps) > 0 or own.round != began:
                return  # taken meanwhile, by us or in an exchange that we accepted: the next one has its own patience
            ahead = self._is_ahead()
            deadline = since + self._search_seconds(ahead=ahead)
            partner = None if (late := trio.current_time() >= deadline) else self._draw(own)
            self._tries = self._tries + 1 if partner is not None else _OWN_TRIES
            if partner is not None:
                if await self._attempt(partner) == "busy":
                    await trio.sleep_until(min(deadline, trio.current_time() + self._pause))
                    longest = _LONGEST_PAUSE / 2 if self._wasted.wary(trio.current_time()) else _LONGEST_PAUSE
                    self._pause = min(2 * self._pause, longest * self._phase.seconds)
            elif late or not (self._busy or ahead):
                await self._solo()
            else:
                await self._look_again(deadline)

    def _is_ahead(self) -> bool:
        """Whether we are before the others by so much that soon they would refuse us."""
        _, lead = self._mesh.pace(self._trainer.standing.round, self._phase.own)
        return lead > _FAR * self._settings.staleness

    def _search_seconds(self, *, ahead: bool) -> float:
        """For how long a partner is looked for. Who is far before the others waits for them: with each step alone it would come
        further out of their reach."""
        if ahead:
            return max(self._settings.patience, self._phase.wait_ahead)
        now, phases = trio.current_time(), math.inf
        if self._let_down:
            phases = 0.25
        elif self._wasted.wary(now):
            phases = 1
        elif now < self._let_down_at + _LATELY:
            phases = 2
        return min(self._settings.patience, phases * self._phase.seconds)

    def _subject(self, partner: PeerId | None) -> int:
        """What our next outer step is about, with `partner` or with nobody."""
        known, parts = self._part_seconds, self._settings.parts
        usual = statistics.median_low(known.values()) if known else 0.0  # by most, not by who may be slow on purpose
        seconds = usual if partner is None else known.get(partner, usual)
        most = at_once(parts, seconds, parts * self._phase.seconds)
        return self._trainer.subject(min(self._phase.due(self._trainer.steps_since_outer), most))

    def _count(self, subject: int) -> int:
        return len(parts_in(subject, self._settings.parts))

    def _draw(self, own: Standing) -> PeerId | None:
        now = trio.current_time()
        self._busy = {peer: until for peer, until in self._busy.items() if until > now}
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        shunned = {*self._shunned, *(peer for peer in self._wasted.peers if self._wasted.by(peer, now))}
        avoided, apart = {*self._busy, *shunned}, self._wasted.apart(now)
        partner, self._none_better = self._mesh.partner(own, avoided, apart), False
        if partner is None and apart and not self._failed:
            self._none_better = self._mesh.partner(own, shunned, apart) is None
        return self._mesh.partner(own, avoided, ()) if self._none_better else partner

    async def _look_again(self, deadline: float) -> None:
        names = ", ".join(short(peer) for peer in self._busy)
        self._emit(StateChanged("training", f"a partner ({names}: busy)" if names else "the others, who are far behind"))
        free = min(self._busy.values(), default=math.inf)
        await trio.sleep_until(min(free, deadline, trio.current_time() + _LOOK_AGAIN))

    async def _attempt(self, partner: PeerId) -> str:
        """Offer to `partner`; returns the outcome."""
        self._offering_to = partner
        local_side = self._engage(partner, initiator=True)
        try:
            subject = self._subject(partner)
            ended = await self._mesh.offer(partner, self._trainer.standing, subject, local_side)
        except BaseException:
            try:
                with trio.CancelScope(shield=True):
                    await self._abandon(local_side)
            finally:
                if local_side.captured:  # it was told as started
                    self._report(Ended("aborted", partner, b"", reason="this node gave it up"), initiator=True)
            raise
        finally:
            self._offering_to = None
        if self._local_side is not local_side:  # both offered at once, and the partner's offer stood: see `decide`
            self._report(ended, initiator=True)
            return ended.outcome
        await self._conclude(ended, local_side, initiator=True)
        self._remember(ended)
        return ended.outcome

    def _remember(self, ended: Ended) -> None:
        """Decide how long this partner is left alone."""
        now = trio.current_time()
        if ended.outcome == "committed":
            self._busy.clear()
        elif ended.outcome == "busy":
            least = 2 * self._pause if self._wasted.wary(now) else 0.05  # others are asked before
            self._busy[ended.partner] = now + max(ended.retry_after, least)
        else:
            until = now + min(_AVOID_SECONDS, self._phase.seconds)
            again = ended.outcome in ("aborted", "in_doubt") and not self._wasted.wary(now)
            kept = self._busy if again else self._shunned
            kept[ended.partner] = until  # what broke once may well work the next time; a refusal stands
            if ended.outcome == "unreachable":
                self._mesh.suspect(ended.partner)

    async def _solo(self) -> None:
        """Take the step alone at the end of the inner step under way, unless somebody offers before."""
        local_side = self._engage(None, initiator=True)
        self._alone = trio.CancelScope()
        try:
            with self._alone as alone:
                subject = self._subject(None)
                number = self._run_round(self._own, self._trainer.standing.round)
                applied = await self._trainer.solo(number, subject, self._phase.steps)
        finally:
            self._alone = None
            self._release(local_side)
        if alone.cancelled_caught:
            return
        self._tries, self._failed, self._let_down = 0, False, False
        self._tell("solo", None, self._count(subject), applied)

    # --- the answering side (proto.types.Answerer) -----------------------------------------------------

    def decide(self, offer: Offer) -> Answer:
        """Answer another node's offer; after Accept this node is engaged until `ended`."""
        own = self._trainer.standing
        apart = abs(own.round - offer.standing.round)
        if self._settings.reached(own):
            return Refuse(RefusedError.entry.code, "this node takes no more outer steps")
        if apart > self._settings.staleness:
            return Refuse(RefusedError.entry.code, f"{apart} rounds apart, the limit is {self._settings.staleness}")
        if self._wasted.by(offer.partner, trio.current_time()):
            return Refuse(RefusedError.entry.code, "exchanges with this peer took long and came to nothing")
        glare = self._offering_to == offer.partner and offer.partner < self._own
        if self._closing:
            return Busy(_CLOSED_SECONDS, "not training now")
        lost = self._let_down or self._wasted.wary(trio.current_time())  # one more that fails would cost an inner step
        waits = self._alone is not None and self._missing(self._phase.steps) >= 0 and not lost  # for its inner step to end
        if self._local_side is not None and not (glare or waits):
            return Busy(_BUSY_SECONDS, "in another exchange")
        missing = self._missing(self._phase.half)
        if missing > 0:
            return Busy(self._phase.after(missing), f"{missing} inner steps before the next exchange")
        late = self._tries >= _OWN_TRIES
        others = set() if late and self._none_better else self._wasted.apart(trio.current_time())
        if not glare and (offer.partner in others or not self._mesh.admits(offer.partner, own, others, late=late)):
            missing = self._missing(self._phase.steps)
            return Busy(self._phase.after(max(missing, 1)), "others come first")
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self._engage(offer.partner, initiator=False)
        return Accept(own)

    @property
    def local_side(self) -> TrainerSide:
        """The local side of the exchange that `decide` accepted last."""
        if self._local_side is None:
            raise AssertionError("asked for the local_side of an exchange that was not accepted")
        return self._local_side

    async def ended(self, ended: Ended) -> None:
        await self._conclude(ended, self.local_side, initiator=False)

    def follow(self, event: Event) -> None:
        """Learn how long an inner step takes."""
        if isinstance(event, InnerSteps) and event.steps > 0:
            # A caller's own loop tells no tokens, and takes no larger steps.
            self._phase.follow(event.tokens / self._settings.step_tokens or event.steps, event.seconds)

    # --- both sides -------------------------------------------------------------------------------

    def _engage(self, partner: PeerId | None, *, initiator: bool) -> TrainerSide:
        def begun() -> None:
            self._offering_to = None  # accepted: from here on nobody else's offer can stand
            if partner is not None:
                self._emit(ExchangeStarted(partner, initiator))

        def probation() -> bool:
            return partner is not None and self._probation(partner)

        lost = self._wasted.wary(now := trio.current_time())
        wary = partner in self._wasted.apart(now) or (probation() and lost)
        credit = 0.0 if lost else 0.25 if probation() else 1.0
        after = self._phase.steps if initiator else self._phase.half
        self._local_side = TrainerSide(
            self._trainer, begun, probation, self._phase.seconds, after=after, wary=wary, credit=credit
        )
        self._started = now
        if self._idle.is_set():
            self._idle = trio.Event()
        return self._local_side

    def _release(self, local_side: TrainerSide) -> None:
        if self._local_side is local_side:
            self._local_side = None
            self._idle.set()

    async def _abandon(self, local_side: TrainerSide) -> None:
        try:
            if local_side.captured:
                await self._trainer.discard()
        finally:
            self._release(local_side)

    async def _conclude(self, ended: Ended, local_side: TrainerSide, *, initiator: bool) -> None:
        """Apply what was committed, drop what was not, and free this node for the next exchange."""
        if ended.outcome != "committed":
            self._failed |= self._wasted.wary(now := trio.current_time())
            if ended.outcome == "aborted":
                self._let_down, self._let_down_at = True, now
            self._wasted.charge(ended.partner, now - self._started, now, busy=ended.outcome == "busy")
            try:
                await self._abandon(local_side)
            finally:
                self._report(ended, initiator=initiator)
            return
        if ended.partner_standing is None:
            raise AssertionError("a committed exchange without the partner's standing")
        self._mesh.met(ended.partner, offered=not initiator)
        parts = self._count(local_side.subject)
        self._learn(ended.partner, parts)
        self._tries, self._failed, self._let_down = 0, False, False
        number = self._run_round(ended.partner, ended.partner_standing.round)
        try:
            with trio.CancelScope(shield=True):  # the partner applies too: a stop must not come between
                applied = await self._trainer.apply(number, ended.skipped)
        finally:
            self._release(local_side)
            self._report(ended, initiator=initiator)
        self._tell("paired", ended.partner, parts, applied)

    def _learn(self, partner: PeerId, parts: int) -> None:
        """How long the exchange that ends took, for each of its parts."""
        self._part_seconds.pop(partner, None)  # it is the latest then
        self._part_seconds[partner] = (trio.current_time() - self._started) / parts
        if len(self._part_seconds) > _PARTNERS:
            del self._part_seconds[next(iter(self._part_seconds))]

    def _run_round(self, peer: PeerId, told: int) -> int:
        believed = self._mesh.believed(peer, told, self._phase.seconds)
        return min(believed, self._trainer.standing.round + self._settings.staleness)

    def _tell(self, kind: Literal["paired", "solo"], partner: PeerId | None, parts: int, done: Applied) -> None:
        self._phase.took(done.inner_steps, parts)
        self._fit_phase()
        self._emit(StateChanged("training"))
        self._emit(OuterStep(done.round, kind, partner, done.inner_steps, done.spread, done.seconds, done.weight))

    def _report(self, ended: Ended, *, initiator: bool) -> None:
        seconds = trio.current_time() - self._started
        told = ended.partner, ended.session.hex(), initiator, ended.outcome, ended.sent, ended.received, seconds
        self._emit(ExchangeEnded(*told, error=ended.error, reason=ended.reason))
