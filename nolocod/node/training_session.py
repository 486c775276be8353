"""One trainer process's session: weights found, rounds driven, checkpoints written.

Training ends in one of four ways: told to stop, the run's goal reached, the gate closed (hours, battery, the
month's bytes), or so far behind the others that it must fetch weights afresh instead of dragging them back.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import trio

from nolocod.errors import (
    CheckpointError,
    DiskFullError,
    FarWeightsError,
    HarmfulTensorError,
    NoDonorError,
    RejectedTensorError,
)
from nolocod.identity import short
from nolocod.observe.events import Emit, Event, InnerSteps, OuterStep, StateChanged, Troubled, WeightsLoaded
from nolocod.outer.loop import Mesh, Pace, Rounds, nobody
from nolocod.proto.types import Standing
from nolocod.trainer.process import Setup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from nolocod.errors import RemoteError
    from nolocod.identity import PeerId
    from nolocod.node.config import NodeConfig
    from nolocod.node.schedule import TrainingHours
    from nolocod.proto.types import Member, Sampled
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.process import TrainerProcess

_DONOR_PATIENCE = 120.0
"""Seconds that a newcomer waits for a peer with weights."""
_LOOK_SECONDS = 0.5
_ASK_AGAIN = 5.0
"""Between two rounds of asking donors of whom none gave its weights: the dead among them leave the list."""
_BEHIND_SECONDS = 5.0
"""Between two looks at how far the others are."""
_FETCH_AGAIN = 60.0
"""A node that falls behind again sooner than this trains on alone: it is too slow for this run's pace."""
_HARDER, _MORE = 1.5, 0.5
"""How much more than the members' median loss, times and plus, is taken for a harder text and not for bad weights."""
_WORSE = 0.1
"""By how many nats per token the loss of weights may be above that of others that were far off: those are more likely
the text's own, and the donors that agree are wrong together."""
_UNDER_WAY = 600.0
"""How long a pause waits for the exchange under way: it is work done, and nobody is in a hurry."""

Reason = Literal["stopped", "finished", "behind", "paused"]


class Swarm(Mesh, Protocol):
    """What a training session needs of the mesh beyond partners."""

    def live(self) -> list[Member]: ...

    async def fetch_weights(self, donors: list[PeerId], into: Path) -> tuple[PeerId, Standing]:
        """Fetch the slow weights of one of `donors` into a file; NoDonorError if none gave them.

        Returns the donor and its standing when it wrote them.
        """
        ...

    async def sample_weights(self, donors: list[PeerId], wanted: tuple[int, int], folder: Path) -> tuple[Sampled, ...]:
        """Fetch into `folder` samples of the weights of the first `donors` that give one.

        `wanted`: how many at most, and the bytes of whole weights.
        """
        ...

    def doubt(self, donor: PeerId) -> None:
        """The weights that `donor` gave were worse than another donor's by more than can be."""
        ...


@dataclass(frozen=True)
class Part:
    """What stays the same for all training sessions of this node, one after another."""

    own: PeerId
    sealed: Sealed
    config: NodeConfig
    swarm: Swarm
    may_seed: bool
    """Begin from the run's initial weights when nobody has others."""
    gate: TrainingHours
    probation: Callable[[PeerId], bool] = nobody
    """Which partners are so new to us that their messages count for less."""

    @property
    def pace(self) -> Pace:
        manifest = self.sealed.manifest
        return Pace(manifest.inner.steps, manifest.outer.staleness, manifest.outer.patience, manifest.outer.rounds)


class TrainingSession:
    """`standing` and `state` are what heartbeats say about this node."""

    def __init__(self, part: Part, trainer: TrainerProcess, emit: Emit) -> None:
        self._part = part
        self._trainer = trainer
        self._emit = emit
        self._loaded = self._adopted = False
        self._refused: PeerId | None = None
        """Whose weights the trainer holds although they were found too bad."""
        self._saved_round = _newest_round(part.config.paths.checkpoints)
        self.kept_round = 0
        """Of the weights that were found on this node's own disk; 0 without any."""
        self._fetched_at = -math.inf
        self._saved_at = trio.current_time()
        self._stepped = trio.Event()
        self._began = trio.Event()
        self.state: Literal["joining", "training", "finished"] = "joining"
        self.rounds = Rounds(part.own, trainer, part.swarm, part.pace, emit, part.probation)

    @property
    def standing(self) -> Standing:
        """Before the weights are loaded: the round of the checkpoint that they will come from."""
        return self._trainer.standing if self._loaded else Standing(self._saved_round, 0, 0.0)

    def follow(self, event: Event) -> None:
        self.rounds.follow(event)
        if isinstance(event, OuterStep):
            self._stepped.set()
        elif isinstance(event, InnerSteps):
            self._began.set()

    # --- weights ------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Have the trainer build model and data, and bring in the weights to begin with.

        Those of the last checkpoint; else a donor's; else, if nobody has taken an outer step, the seed's.
        A donor's are fetched last, so that they are old by the transfer and not by the loading too.
        """
        self._emit(StateChanged("loading", "the trainer: model and data"))
        loaded = await self._trainer.load(self._setup())
        for trouble in loaded.trouble:
            self._emit(Troubled(CheckpointError.entry.code, trouble))
        self.kept_round = loaded.standing.round
        self._loaded = loaded.source == "checkpoint"  # an older one than the newest by name, if that is damaged
        if loaded.source == "seed":
            await self._fetch(_DONOR_PATIENCE)
        elif self.is_behind():
            await self._fetch_if_possible()
        self._loaded = True
        self._emit(WeightsLoaded(self.standing.round, "donor" if self._adopted else loaded.source))

    async def refresh(self) -> None:
        """Take a donor's weights in place of our own, which are too old to be anybody's partner's."""
        self.state = "joining"
        await self._fetch_if_possible()

    async def _fetch_if_possible(self) -> None:
        """Old weights are better than none, and than waiting for others."""
        try:
            await self._fetch(0.0)
        except NoDonorError as error:
            self._emit(Troubled(error.code, f"{error.cause} Training goes on with our own."))
            await self._own_again()
        self._fetched_at = trio.current_time()

    async def _own_again(self) -> None:
        """Weights that were refused took the place of ours: bring back those of the last checkpoint, or the seed's."""
        if self._refused is not None:
            await self._trainer.load(self._setup())
            self._refused = None

    async def _fetch(self, patience: float) -> None:
        """Have the weights of a donor, or the seed's where they are the same; NoDonorError after `patience`."""
        misfits: set[PeerId] = set()
        doubted: dict[PeerId, float] = {}  # those whose weights were too bad or far off, by their loss on our own text
        most = self._part.sealed.manifest.trust.donors
        most = most if most > 1 else 0  # of one alone there is nothing to choose
        deadline = trio.current_time() + patience
        while True:
            members = self._part.swarm.live()
            if members and not any(member.standing.round for member in members):
                await self._own_again()
                return  # nobody took an outer step yet: the seed makes the very same weights here
            looking = len(doubted) < most
            donors = [donor for donor in self._donors(members) if donor not in misfits and donor not in doubted]
            if doubted and not (donors and looking):
                donors, looking = [min(doubted, key=lambda donor: doubted[donor])], False
                if donors == [self._refused]:  # the last that was tried
                    self._adopted, self._refused = True, None
                    return
            if donors:
                try:
                    donor, size = await self._adopt(donors)
                except NoDonorError as error:
                    for donor in donors:
                        doubted.pop(donor, None)  # the best of them has gone
                    if trio.current_time() >= deadline:
                        raise
                    self._emit(Troubled(error.code, f"{error.cause} They are asked again."))
                    await trio.sleep(_ASK_AGAIN)
                    continue
                if size is None:
                    misfits.add(donor)
                    continue
                others = [other for other in donors if other != donor]
                loss, objection = await self._look(donor, size, others, doubted) if looking else (0.0, None)
                if objection is None:
                    self._adopted, self._refused = True, None
                    for liar in doubted:
                        if looking and doubted[liar] > _plausible_loss(members):
                            self._part.swarm.doubt(liar)
                    return
                self._emit(Troubled(objection.code, objection.cause))
                self._refused, doubted[donor] = donor, loss
            elif self._part.may_seed:
                return
            elif trio.current_time() >= deadline:
                raise NoDonorError(f"in {patience:.0f} s no peer with fitting weights was seen.")
            else:
                self._emit(StateChanged("fetching", "a peer that trains"))
                await trio.sleep(_LOOK_SECONDS)

    async def _adopt(self, donors: list[PeerId]) -> tuple[PeerId, int | None]:
        """Fetch and take over the weights of one donor; which, and their bytes. None where they do not fit the run's model."""
        self._emit(StateChanged("fetching", f"weights from one of {len(donors)} peers"))
        path = self._part.config.paths.incoming / "weights.safetensors"
        donor, donated = await self._part.swarm.fetch_weights(donors, path)
        # Where a transfer takes longer than the staleness limit allows, fetching again would take as long
        # again: such a newcomer enters at the edge of the window. A donor's word is no reason to run ahead of it.
        near = math.ceil(self._median_round()), self._part.pace.staleness
        taken = max(min(donated.round, near[0] + near[1]) if near[0] else donated.round, near[0] - near[1])
        try:
            await self._trainer.adopt(path, replace(donated, round=taken))
            return donor, path.stat().st_size
        except RejectedTensorError as error:
            self._emit(Troubled(error.code, f"weights of {short(donor)}: {error.cause}"))
            return donor, None
        finally:
            path.unlink()

    async def _look(
        self, donor: PeerId, size: int, others: list[PeerId], doubted: dict[PeerId, float]
    ) -> tuple[float, RemoteError | None]:
        """The loss of the weights just taken over on our held-out text, and what speaks against them: that loss, or that
        they are far from those of `others`."""
        # not told: weights that are refused are not this node's, and those that are kept are looked at as training begins
        loss = await self._trainer.evaluate(told=False)
        loss = loss if math.isfinite(loss) else sys.float_info.max
        limit = min(_plausible_loss(self._part.swarm.live()), *(one + _WORSE for one in doubted.values()), sys.float_info.max)
        if loss >= limit:
            due = f"our held-out loss is {loss:.2f}, and {limit:.2f} at most was due."
            return loss, HarmfulTensorError(f"with the weights of {short(donor)} {due}")
        wanted = self._part.sealed.manifest.trust.donors, size
        samples = await self._part.swarm.sample_weights(others, wanted, self._part.config.paths.incoming)
        try:
            why = await self._trainer.compare(samples) if samples else ""
        finally:
            for sample in samples:
                sample.path.unlink(missing_ok=True)
        return loss, FarWeightsError(f"weights of {short(donor)}: {why}.") if why else None

    def _donors(self, members: list[Member]) -> list[PeerId]:
        """Those with weights, the furthest first; who tells of a round that no partner would follow comes last."""
        having = [member for member in members if member.state in ("training", "finished")]
        edge = statistics.median(member.standing.round for member in having) + self._part.pace.staleness if having else 0.0
        having.sort(key=lambda member: (member.standing.round > edge, -member.standing.round))
        return [member.peer_id for member in having]

    def _setup(self) -> Setup:
        config = self._part.config
        return Setup(
            manifest=self._part.sealed.to_bytes(),
            peer_id=self._part.own,
            data=config.data,
            device=config.device,
            threads=config.threads,
            checkpoints=config.paths.checkpoints,
            cache=config.paths.cache,
        )

    # --- training -----------------------------------------------------------------------------------

    async def train(self, stop: trio.Event) -> Reason:
        """Train until told to stop, finished, paused or behind; a last checkpoint is written unless behind."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._trainer.wait_dead)
            nursery.start_soon(self._keep_checkpoints)
            nursery.start_soon(self._evaluate_first)
            await self._trainer.train()
            self.state = "training"
            self._emit(StateChanged("training"))
            reason = await self._until_one_ends(stop)
            nursery.cancel_scope.cancel()
        await self._trainer.pause()
        if reason in ("behind", "paused") and stop.is_set():
            reason = "stopped"  # told to while the exchange under way came to its end
            self._emit(StateChanged("stopping", "the checkpoint"))
        if reason == "finished":
            self.state = "finished"
            self._emit(StateChanged("finished", "others that still want our weights"))
            await self._trainer.evaluate()
        if reason == "paused":
            await self._checkpoint()
        elif reason != "behind":
            await self._trainer.checkpoint()
        return reason

    async def rest(self, stop: trio.Event) -> bool:
        """Wait until the gate is open; False if told to stop before. Raises TrainerError if the trainer dies."""
        gate = self._part.gate
        if gate.pause is not None and not stop.is_set():
            self._emit(StateChanged("paused"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._trainer.wait_dead)
                nursery.start_soon(_cancel_after, stop.wait, nursery.cancel_scope)
                await gate.wait_open()
                nursery.cancel_scope.cancel()
        return not stop.is_set()

    async def _evaluate_first(self) -> None:
        """Measure where this node starts from, right after its first inner step: nobody waits for a figure."""
        if not self._began.is_set():
            await self._began.wait()
            await self._trainer.evaluate()

    async def _until_one_ends(self, stop: trio.Event) -> Reason:
        """Drive rounds; return what ended them first, after the exchange under way."""
        ended: list[Reason] = []
        one_ended = trio.Event()

        async def watch(wait: Callable[[], Awaitable[None]], reason: Reason) -> None:
            await wait()
            ended.append(reason)
            one_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, self.rounds.run, "finished")
            nursery.start_soon(watch, stop.wait, "stopped")
            nursery.start_soon(watch, self._fall_behind, "behind")
            nursery.start_soon(watch, self._part.gate.wait_paused, "paused")
            await one_ended.wait()
            if ended[0] == "stopped":  # of the others none stops: a supervisor that hears it soon ends the process
                self._emit(StateChanged("stopping", "the exchange and the inner step under way"))
            if ended[0] == "paused":
                with trio.CancelScope() as patience:
                    nursery.start_soon(_cancel_after, stop.wait, patience)
                    await self.rounds.close(_UNDER_WAY)
            await self.rounds.close(self._part.config.grace)
            nursery.cancel_scope.cancel()
        return ended[0]

    async def _fall_behind(self) -> None:
        """Return when we are behind, at most once in a while."""
        while not (self.is_behind() and trio.current_time() > self._fetched_at + _FETCH_AGAIN):  # noqa: ASYNC110 - nobody tells
            await trio.sleep(_BEHIND_SECONDS)
        self._emit(StateChanged("fetching", "newer weights: too far behind to be a partner"))

    def is_behind(self) -> bool:
        """Whether the others would refuse us as too far behind."""
        return self._median_round() - self.standing.round > self._part.pace.staleness

    def _median_round(self) -> float:
        """Of the members that train; 0 without any."""
        rounds = [member.standing.round for member in self._part.swarm.live() if member.state == "training"]
        return statistics.median(rounds) if rounds else 0.0

    async def _keep_checkpoints(self) -> None:
        """Checkpoint after an outer step, once enough time has passed since the last one."""
        while True:
            await self._stepped.wait()
            self._stepped = trio.Event()
            if trio.current_time() - self._saved_at < self._part.config.checkpoint_every:
                continue
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """One without which this node can go on."""
        try:
            await self._trainer.checkpoint()
        except DiskFullError as error:
            self._emit(Troubled(error.code, f"{error.cause} The next outer step tries again."))
        else:
            self._saved_at = trio.current_time()


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


def _plausible_loss(members: list[Member]) -> float:
    """What the held-out loss of good weights stays below, by what members tell of their training losses: our own text may be
    harder than theirs, but not by half. Infinity where nobody tells."""
    told = [member.standing.loss for member in members if member.state in ("training", "finished")]
    told = [loss for loss in told if 0 < loss < math.inf]
    return _HARDER * statistics.median(told) + _MORE if told else math.inf


def _newest_round(checkpoints: Path) -> int:
    """The round in the name of the newest checkpoint; 0 if there is none."""
    numbers = [path.name.removeprefix("round-") for path in checkpoints.glob("round-*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)
