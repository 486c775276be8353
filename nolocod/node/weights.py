"""Where a node's weights come from: its last checkpoint, a donor that trains, or the run's seed.

The rule: what a donor gives is tried on this node's own held-out text, and compared with samples of other donors'
weights, before it is kept. Donors count as independent where they are of several address groups; where all are of one (a
home, a test network), each counts. Weights that replace our own have to be hardly worse than these, and other donors that
there are have to agree; if not, ours are kept.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from nolocod.errors import (
    CheckpointError,
    FarWeightsError,
    HarmfulTensorError,
    NoDonorError,
    OwnTensorsError,
    RejectedTensorError,
)
from nolocod.identity import short
from nolocod.observe.events import Emit, InnerSteps, OuterStep, StateChanged, Troubled, WeightsComing, WeightsLoaded
from nolocod.p2p.membership.run_clock import median_round
from nolocod.paths import newest_round
from nolocod.proto.built import differences
from nolocod.proto.envelope import MAX_NUMBER
from nolocod.proto.types import Built, Standing

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.errors import RemoteError
    from nolocod.identity import PeerId
    from nolocod.node.peers import Peers
    from nolocod.observe.events import Event
    from nolocod.proto.types import Member
    from nolocod.run.manifest import Manifest
    from nolocod.trainer.process import Setup, TrainerProcess

_DONOR_PATIENCE = 120.0
"""Seconds that a newcomer waits for a peer with weights."""
_LOOK_SECONDS = 0.5
_ASK_AGAIN = 5.0
"""Between two rounds of asking donors of whom none gave its weights: the dead among them leave the list."""
_HINTED = 10.0
"""Seconds that a newcomer waits for those to be verified that are only heard of, where these tell of outer steps."""
_FETCH_AGAIN, _FETCH_SHARE = 60.0, 4.0
"""A node that fetched trains on for so many seconds before it fetches again, and so many times as long as that took: it is
too slow for this run's pace, or its line is."""
_FASTER = 30.0
"""No run goes so many times as fast as a node that keeps pairing in it could go alone."""
_HARDER, _MORE = 1.5, 0.5
"""How much more than the members' median loss, times and plus, is taken for a harder text and not for bad weights."""
_LOST = 0.2
"""By how many nats per token others' weights may be worse than our own on our text: ours learned from text like it."""
_WORSE = 0.1
"""By how many nats per token the loss of weights may be above that of others that were far off: those are more likely
the text's own, and the donors that agree are wrong together."""


@dataclass(frozen=True)
class SessionSettings:
    """What is the same for all trainers of this node, one after another. Times in seconds."""

    setup: Setup
    manifest: Manifest
    incoming: Path
    """The folder for what donors give."""
    may_seed: bool
    """Begin from the run's initial weights when nobody has others."""
    checkpoint_every: float | None
    """At the first outer step after this; None: 60 s, or longer for a large model (disk.rest_after)."""
    grace: float
    """How long a stop waits for an exchange under way."""
    goal: int
    """The round in which the run ends, as its owners have it now; 0 for never."""


class Weights:
    """The weights of one trainer, which it may have to fetch."""

    def __init__(self, settings: SessionSettings, trainer: TrainerProcess, peers: Peers, emit: Emit) -> None:
        self._settings = settings
        self._trainer = trainer
        self._peers = peers
        self._emit = emit
        self.fetch_again_at = -math.inf
        """When a donor may be asked to replace our own."""
        self._fetch_seconds = 0.0  # of the last fetch
        self._coming: tuple[int, float] = 0, -math.inf  # bytes of weights that are here, and when some came last
        self._loaded = self._adopted = False
        self._rejected: PeerId | None = None
        """Whose weights the trainer holds although they were found too bad."""
        self._saved_round = newest_round(settings.setup.checkpoints)
        self._staleness = settings.manifest.outer.staleness
        self._built = Built()  # what our libraries make of the run's model
        self._size = 0  # of weights as a donor gives them, in bytes
        self._paired: tuple[int, float, float] | None = None
        """Our round after our last paired outer step, and when that was: by trio's clock, and by the time of day."""
        self._phase = math.inf
        """The shortest time for a round's inner steps that we measured, in seconds."""
        self._ours = math.inf
        """The held-out loss of the weights of ours that a donor's are to replace."""

    def follow(self, event: Event) -> None:
        """Learn how fast rounds can go, and whether a donor's weights come."""
        if isinstance(event, OuterStep) and event.kind == "paired":
            self._paired = event.round, trio.current_time(), time.time()
        elif isinstance(event, WeightsComing) and event.here != self._coming[0]:
            self._coming = event.here, trio.current_time()
        elif isinstance(event, InnerSteps) and event.steps > 0:
            self._phase = min(self._phase, self._settings.manifest.inner.steps * event.seconds / event.steps)

    def go_on_from(self, before: Weights) -> None:
        """Know what was learnt with the trainer before: how far the run can be by now."""
        self._paired, self._phase = before._paired, before._phase

    def _furthest(self) -> float:
        """The last round that the run can be in by now: its members were near us at our last paired outer step, and none is
        `_FASTER` times as fast as we are. Infinite while we do not know."""
        if self._paired is None or self._phase == math.inf:
            return math.inf
        round_number, at, wall = self._paired
        seconds = max(trio.current_time() - at, time.time() - wall)  # a machine that slept knows it by the latter only
        return round_number + self._staleness + _FASTER * seconds / self._phase

    def _counted(self) -> list[Member]:
        """Those whose word counts here: verified, and few of one address group."""
        return [member for member in self._peers.live() if member.verified]

    @property
    def standing(self) -> Standing:
        """Before the weights are loaded: the round of the checkpoint that they will come from."""
        return self._trainer.standing if self._loaded else Standing(self._saved_round, 0, 0.0)

    def is_behind(self) -> bool:
        """Whether the others would refuse us as too far behind."""
        return self._median_round() - self.standing.round > self._staleness

    async def load(self) -> int:
        """Have the trainer build model and data, and bring in the weights to begin with.

        Those of the last checkpoint; else a donor's; else, if nobody has taken an outer step, the seed's. A donor's are
        fetched last, so that they are old by the transfer and not by the loading too. Returns the checkpoint's round, or 0.
        """
        self._emit(StateChanged("loading", "the trainer to load model and data"))
        loaded = await self._trainer.load(self._settings.setup)
        for trouble in loaded.trouble:
            self._emit(Troubled(CheckpointError.entry.code, trouble))
        self._size, self._built = loaded.snapshot_size, loaded.built
        self._loaded = loaded.source == "checkpoint"  # an older one than the newest by name, if that is damaged
        if loaded.source == "seed":
            await self._fetch(_DONOR_PATIENCE)
            if loaded.trouble and not self._adopted:  # what was learned may be saved yet: nothing is begun over it
                remedy = "Bring one back from a backup, or remove them all to begin anew."
                raise CheckpointError(f"no checkpoint in {self._settings.setup.checkpoints} is whole.", remedy=remedy)
        elif self.is_behind():
            await self.refresh()
        self._loaded = True
        for left in self._settings.incoming.iterdir():  # the part that a fetch left which is not gone on with
            left.unlink()
        self._emit(WeightsLoaded(self.standing.round, "donor" if self._adopted else loaded.source))
        return loaded.standing.round

    async def refresh(self) -> None:
        """Take a donor's weights in place of our own, if one gives them: old ones are better than waiting for others."""
        try:
            if self._donors(self._counted()):
                loss = await self._trainer.evaluate(told=False)
                self._ours = loss if math.isfinite(loss) else math.inf
            await self._fetch(0.0)
        except NoDonorError as error:
            self._emit(Troubled(error.code, f"{error.cause} Training goes on with our own."))
            await self._restore()
        self._ours = math.inf
        self._wait_to_fetch()

    def _wait_to_fetch(self) -> None:
        self.fetch_again_at = trio.current_time() + max(_FETCH_AGAIN, _FETCH_SHARE * self._fetch_seconds)

    async def _restore(self) -> None:
        """Rejected weights took the place of ours: bring back those of the last checkpoint, or the seed's."""
        if self._rejected is not None:
            await self._trainer.load(self._settings.setup)
            self._rejected = None

    async def _fetch(self, patience: float) -> None:
        """Have the weights of a donor, or the seed's where they are the same; NoDonorError when none came for `patience`."""
        misfits: set[PeerId] = set()
        doubted: dict[PeerId, float] = {}  # those whose weights were too bad or far off, by their loss on our own text
        most = self._settings.manifest.trust.donors
        most = most if most > 1 else 0  # of one alone there is nothing to choose
        deadline, hints = trio.current_time() + patience, trio.current_time() + min(patience, _HINTED)
        while True:
            counted = self._counted()
            members = [member for member in counted if self._built.fits(member.built)]
            stranger = counted[0] if counted and not members else None
            # who else is there had the time to be verified; and strangers end nobody who may begin without them
            if stranger is not None and not self._settings.may_seed and trio.current_time() >= hints:
                cause = differences(self._built, stranger.built)
                raise OwnTensorsError(f"{cause} So it is with all {len(counted)} peers that this node met.")
            alike = not self._settings.manifest.is_own and all(self._built.starts_as(member.built) for member in members)
            if members and alike and not any(member.standing.round for member in members):
                if trio.current_time() < hints and any(member.standing.round for member in self._peers.live()):
                    await trio.sleep(_LOOK_SECONDS)  # those who tell of steps may be verified any moment
                    continue
                await self._restore()
                return  # nobody took an outer step yet: the seed makes the very same weights here
            choosing = len(doubted) < most
            donors = [donor for donor in self._donors(members) if donor not in misfits and donor not in doubted]
            if doubted and not (donors and choosing):
                if self._ours < math.inf:
                    raise NoDonorError(f"the weights of {len(doubted)} that gave them were too bad, or far from others'.")
                donors, choosing = [min(doubted, key=lambda donor: doubted[donor])], False
                if donors == [self._rejected]:  # the last that was tried
                    self._keep()
                    return
            if donors:
                try:
                    donor, donated = await self._adopt(donors)
                except NoDonorError as error:
                    for donor in donors:
                        doubted.pop(donor, None)  # the best of them has gone
                    if trio.current_time() >= max(deadline, self._coming[1] + patience):
                        raise
                    self._emit(Troubled(error.code, f"{error.cause} They are asked again."))
                    await trio.sleep(_ASK_AGAIN)
                    continue
                if donated is None:
                    misfits.add(donor)
                    continue
                groups = {member.peer_id: member.group for member in members}
                others = [other for other in donors if other != donor]
                others = [other for other in others if groups[other] != groups[donor]] or others
                loss, objection = await self._examine(donor, others, doubted) if choosing else (0.0, None)
                if objection is None:
                    await self._trainer.place(self._place(donated))  # rounds went by while others gave samples
                    self._keep()
                    for liar in doubted:
                        if choosing and doubted[liar] > _plausible_loss(members):
                            self._peers.doubt(liar)
                    return
                self._emit(Troubled(objection.code, objection.cause))
                self._rejected, doubted[donor] = donor, loss
            elif self._settings.may_seed:
                return
            elif trio.current_time() >= deadline:
                raise NoDonorError(f"no peer with fitting weights was seen in {patience:.0f} s.")
            else:
                self._emit(StateChanged("fetching", "a peer that trains"))
                await trio.sleep(_LOOK_SECONDS)

    def _keep(self) -> None:
        self._adopted, self._rejected = True, None
        self._wait_to_fetch()

    def _place(self, donated: Standing) -> Standing:
        """Where a node with these weights enters the run: they are old by the transfer, so not before the verified members'
        median, where it has all of the window to find its first partner. A donor's word is no reason to run ahead of it."""
        median = math.ceil(self._median_round())
        most = min(median + self._staleness if median else math.inf, self._furthest())
        tokens = min(donated.tokens, MAX_NUMBER // 2)  # with more, ours would soon be a number that partners refuse
        return replace(donated, round=int(max(min(donated.round, most), median)), tokens=tokens)

    async def _adopt(self, donors: list[PeerId]) -> tuple[PeerId, Standing | None]:
        """Fetch and take over the weights of one donor; which, and its standing, if they fit the run's model."""
        self._emit(StateChanged("fetching", f"weights from one of {len(donors)} peers"))
        path = self._settings.incoming / "weights.safetensors"
        began = trio.current_time()
        donor, donated = await self._peers.fetch_weights(donors, path, self._size)
        self._fetch_seconds = trio.current_time() - began
        try:
            await self._trainer.adopt(path, self._place(donated))
            return donor, donated
        except RejectedTensorError as error:
            self._emit(Troubled(error.code, f"weights of {short(donor)}: {error.cause}"))
            return donor, None
        finally:
            path.unlink()

    async def _examine(
        self, donor: PeerId, others: list[PeerId], doubted: dict[PeerId, float]
    ) -> tuple[float, RemoteError | None]:
        """The loss of the weights just taken over on our held-out text, and what speaks against them: that loss, or that
        they are far from those of `others`."""
        # not told: weights that are rejected are not this node's, and those that are kept are measured as training begins
        loss = await self._trainer.evaluate(told=False)
        loss = loss if math.isfinite(loss) else sys.float_info.max
        members = self._counted()
        told = _plausible_loss(members)
        limit = min(told, self._ours + _LOST, *(one + _WORSE for one in doubted.values()), sys.float_info.max)
        if loss >= limit:
            due = f"our held-out loss is {loss:.2f}, and {limit:.2f} at most was due."
            return loss, HarmfulTensorError(f"with the weights of {short(donor)} {due}")
        wanted = self._settings.manifest.trust.donors, self._size
        took = self._fetch_seconds, max((member.standing.step_seconds for member in members), default=0.0)
        samples = await self._peers.sample_weights(others, wanted, self._settings.incoming, took)
        try:
            alone = "no other donor gave a sample to compare them with" if others and self._ours < math.inf else ""
            why = await self._trainer.compare(samples) if samples else alone
        finally:
            for sample in samples:
                sample.path.unlink(missing_ok=True)
        return loss, FarWeightsError(f"weights of {short(donor)}: {why}.") if why else None

    def _donors(self, members: list[Member]) -> list[PeerId]:
        """Those with weights, the furthest first, but one of each address group before a second of any; who tells of a round
        that no partner would follow comes last."""
        having = [member for member in members if member.state in ("training", "finished")]
        edge = statistics.median(member.standing.round for member in having) + self._staleness if having else 0.0
        edge = min(edge, self._furthest())
        return [member.peer_id for member in best_first(having, edge)]

    def _median_round(self) -> float:
        """Of the verified members that train, as far as it can be; 0 without any."""
        return min(median_round(self._peers.live()), self._furthest())


def best_first(members: list[Member], edge: float) -> list[Member]:
    """In the order in which their weights are asked for: the furthest first, but one of each address group before a second of
    any; who tells of a round beyond `edge` comes last."""
    furthest = sorted(members, key=lambda member: (member.standing.round > edge, -member.standing.round))
    seen: Counter[str] = Counter()
    before = {}
    for member in furthest:
        before[member.peer_id] = seen[member.group]
        seen[member.group] += 1
    return sorted(furthest, key=lambda member: (member.standing.round > edge, before[member.peer_id]))


def _plausible_loss(members: list[Member]) -> float:
    """What the held-out loss of good weights stays below, by what members tell of their training losses: our own text may be
    harder than theirs, but not by half. Infinity where nobody tells."""
    told = [member.standing.loss for member in members if member.state in ("training", "finished")]
    told = [loss for loss in told if 0 < loss < math.inf]
    return _HARDER * statistics.median(told) + _MORE if told else math.inf
