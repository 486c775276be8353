"""One replica: the model with its fast weights theta, the slow weights phi, the outer momentum delta.

The rule: theta lives on the device, phi and delta in float32 in main memory, and every outer operation goes
through them block by block, so that no further model-sized tensor is made here; what an exchange needs beyond
the two boxes is in capture.py. An outer step is about one fragment: `ages` counts, for each, the inner steps
since its last one.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from nolocod.errors import CheckpointError, RejectedTensorError, TrainerError
from nolocod.outer import step
from nolocod.outer.codec.blocks import PIECE, together
from nolocod.proto.types import Applied, Description, Inspection, Standing, parts_in, whose_turn
from nolocod.run.amendments import at
from nolocod.trainer import checkpoint, compare_donors
from nolocod.trainer.built import built_of, check_kept
from nolocod.trainer.bus import sent
from nolocod.trainer.capture import Capture, Plan, Weights, nothing
from nolocod.trainer.clipping import Clipping, clip
from nolocod.trainer.compare_donors import donated
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.faster import faster
from nolocod.trainer.inner import learning_rate, recent_rate
from nolocod.trainer.model import ON_CPU, Layout, Place
from nolocod.trainer.on_device import draws
from nolocod.trainer.prefetch import Prefetched
from nolocod.trainer.shards import make_part
from nolocod.trainer.source import open_source
from nolocod.trainer.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.observe.events import SamplesRead, TextSupply
    from nolocod.proto.types import SnapshotParts
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.capture import Bring
    from nolocod.trainer.inner import Steps
    from nolocod.trainer.ranks import Ranks
    from nolocod.trainer.windows import Source


def open_replica(
    sealed: Sealed,
    peer_id: str,
    data: Path | None,
    cache: Path,
    place: Place = ON_CPU,
    tell: Callable[[TextSupply | SamplesRead], None] | None = None,
    ranks: Ranks | None = None,
) -> Replica:
    """The run's replica on the text of the node `peer_id`. Raises what is wrong with the run or the data."""
    tokenizer = make_tokenizer(sealed.manifest.data, place.base)
    source = open_source(sealed.manifest, tokenizer, peer_id, data, cache, tell, place.device)
    return Replica(sealed, tokenizer.vocabulary, source, place, ranks)


class Replica:
    """A model in training. Built with the run's initial weights (trainer/base_model.py); `restore` and `adopt` bring others."""

    inner: Steps
    source: Source
    _ranks: Ranks | None = None
    times = 1
    """An inner step has so many times the run's tokens."""

    def __init__(self, sealed: Sealed, vocabulary: int, source: Source, place: Place, ranks: Ranks | None = None) -> None:
        """Train on the devices of `ranks` too. Raises RunFileError or ModelTooLargeError before anything large is allocated."""
        part = self._part = make_part(sealed.manifest, vocabulary, place, leads=True)
        self.manifest, self.source, self.device, self.name = sealed.manifest, source, part.device, part.name
        self.inner, self.model, self.objective, self.speed = part.inner, part.model, part.objective, part.speed
        self._ranks = ranks
        self._lay_out(sealed, part.layout, part.plan, part.theta, part.bring)
        part.inner.make_room = self.weights.ahead.give_back
        if ranks is not None:
            ranks.lead(part, self.weights)

    def _lay_out(self, sealed: Sealed, layout: Layout, plan: Plan, theta: Tensor, bring: Bring = nothing) -> None:
        """Begin with `theta`, of which the model's parameters are views, at round 0; `bring` as in Weights."""
        self.layout, self.plan = layout, plan
        self.phi = theta.to("cpu", copy=True)
        self.delta, self.built = torch.zeros_like(self.phi), built_of(sealed.manifest, layout, self.phi)
        self.weights = Weights.of(theta, self.phi, self.delta, plan.fragments, bring, faster(plan, self.device))
        self.standing = Standing(0, 0, 0.0)
        self.ages = [0] * len(plan.fragments)
        self.inner_steps, self.rate = 0, 0.0
        self._sealed = sealed
        self._rounding = torch.Generator().manual_seed(sealed.manifest.seed)
        self._capture: Capture | None = None  # the one that is out, if one is ...
        self._since_capture = 0  # ... and the inner steps taken since
        self._capture_rate = 0.0  # ... and what distances from partners follow
        self.clipping = Clipping(sealed.manifest.trust, len(plan.fragments))
        self.clip_change: float | None = None
        """The longest change theta - phi that an outer step takes along, alone too, as phi tells it later; None for any."""

    def draw_as(self, peer_id: str) -> None:
        """Make the random draws of training (dropout, rounding) this node's own: equal ones would add up."""
        torch.manual_seed(draws(self.manifest, peer_id))
        self._rounding.manual_seed(draws(self.manifest, peer_id))

    @property
    def theta(self) -> Tensor:
        """All of it, as inner steps left it."""
        self.weights.bring(slice(0, self.layout.size))
        return self.weights.theta

    @property
    def devices(self) -> tuple[str, ...]:
        """That train."""
        return self._ranks.names if self._ranks is not None else (self.name,)

    @property
    def steps_since_outer(self) -> int:
        """Inner steps since the last outer step, whatever its fragment."""
        return min(self.ages)

    # --- inner

    def step(self) -> None:
        """Take one inner step."""
        self.rate = learning_rate(at(self._sealed, self.standing.round), self.standing.round, self.steps_since_outer)
        self.train_on()
        inner = self.manifest.inner
        taken = [self.source.take(inner.batch * inner.accumulation) for _ in range(self.times)]
        windows = torch.from_numpy(np.concatenate(taken) if len(taken) > 1 else taken[0])
        (self._ranks or self._part).step(windows, self.rate)
        self.count()

    def count(self) -> None:
        """An inner step was taken."""
        self.ages = [age + 1 for age in self.ages]
        self._since_capture += 1
        self.inner_steps += 1
        self.standing = replace(self.standing, tokens=self.standing.tokens + self.tokens_per_step)

    @property
    def tokens_per_step(self) -> int:
        return self.times * self.manifest.inner.tokens_per_step

    def train_on(self) -> None:
        """Let inner steps follow, a capture being out: theta gets our own part of the outer step."""
        if self._capture is not None:
            self._capture.start()

    def report(self) -> float:
        """Return the mean loss since the last report and make it the standing's; TrainerError if training broke."""
        loss = self.inner.report()
        if math.isfinite(loss):
            self.standing = Standing(self.standing.round, self.standing.tokens, loss)
        return self.standing.loss

    def evaluate(self) -> float:
        """Mean held-out loss of the fast weights, in nats per token (of preferences, per pair)."""
        windows = self.source.held_out(self.manifest.inner.batch * self.manifest.evaluation.batches)
        return (self._ranks or self._part).evaluate(torch.from_numpy(windows))

    # --- outer

    def prepare(self, outbox: Tensor, subject: int) -> Description:
        """Write our message about `subject` into `outbox` (uint8, `plan.box_size` long) and hash its chunks."""
        self.capture(subject)
        return self.write(outbox)

    def capture(self, subject: int) -> None:
        """The first part of `prepare`, between two inner steps. TrainerError if the weights are not finite."""
        if parts_in(subject, len(self.ages)).stop > len(self.ages):
            raise RejectedTensorError(f"fragment {subject} is not one of this run's {len(self.ages)}.")
        self.discard()
        self._clip(parts_in(subject, len(self.ages)))
        seed = int(torch.randint(0, 1 << 62, (), generator=self._rounding).item())
        capture = Capture(self.plan, self.weights, subject, seed)
        capture.keep()
        self._capture, self._since_capture = capture, 0
        self._capture_rate = self.recent_rate()

    def recent_rate(self) -> float:
        """What the distance from partners follows (inner.py)."""
        return recent_rate(at(self._sealed, self.standing.round), self.standing.round, self.steps_since_outer)

    def write(self, outbox: Tensor) -> Description:
        """The second part; beside training."""
        return self._out().write(outbox)

    def inspect(self, inbox: Tensor, *, probation: bool = False) -> Inspection:
        """Compare the partner's message with ours, and decide what it will count for; less if it is on `probation`.

        RejectedTensorError if it may not be applied.
        """
        capture = self._out()
        skipped = capture.inspect(inbox)
        capture.weight = self.clipping.weigh(capture.among.start, capture.norms, self._capture_rate, probation=probation)
        return Inspection(capture.spread, skipped, capture.weight)

    def apply(self, inbox: Tensor, run_round: int, skipped: bytes = b"") -> Applied:
        """Take the paired outer step with the message in `inbox`; merge what was trained meanwhile.

        `skipped`: the blocks of our message that the partner could not decode.
        """
        began = time.perf_counter()
        self.take_step(inbox, skipped)
        return self.merge(run_round, began)

    def take_step(self, inbox: Tensor, skipped: bytes) -> None:
        """The first part of `apply`, on phi and delta alone; beside training."""
        if self._since_capture:
            self.train_on()  # a checkpoint may have taken it back
        self._out().step(inbox, skipped)

    def merge(self, run_round: int, began: float) -> Applied:
        """The second part, between two inner steps. `began`: when the first one did (time.perf_counter)."""
        capture, since = self._out(), self._since_capture
        capture.merge(trained_on=since > 0)
        self.clipping.accept(capture.among.start, capture.norms, self._capture_rate)
        round_number = max(self.standing.round + len(capture.among), run_round)
        applied = self._stepped(capture.among, since, round_number, began)
        return replace(applied, spread=capture.spread, weight=capture.weight)

    @one_thread()
    def solo(self, run_round: int = 0, subject: int | None = None) -> Applied:
        """Take the outer step about `subject` alone, on the weights as they are now; None: about the part whose turn it is."""
        began, settings = time.perf_counter(), self.manifest.outer
        self.discard()
        among = parts_in(self.subject if subject is None else subject, len(self.ages))
        self._clip(among)
        whole, scratch = together(self.plan.parts(among)), torch.empty(PIECE)
        self.weights.changed(whole.span)
        with self.weights.ahead.changing():
            for span in whole.spans(far=self.weights.is_far):
                phi, theta = self.phi[span], self.weights.at(span)
                step.step(phi, self.delta[span], step.message(phi, theta.cpu(), settings, scratch[: len(phi)]), 1, settings)
                theta.copy_(sent(phi, theta.device))
        return self._stepped(among, 0, max(self.standing.round + len(among), run_round), began)

    @one_thread()
    def _clip(self, among: range) -> None:
        """Pull theta back where the fragments `among` changed by more than `clip_change`: what is left out is nowhere kept."""
        if self.clip_change is not None:
            fragments = self.plan.parts(among)
            self.weights.bring(span := together(fragments).span)
            clip(self.weights.theta, self.phi, fragments, self.clip_change)
            self.weights.changed(span)

    @property
    def subject(self) -> int:
        """What the next outer step is about, which nobody chooses: one part."""
        return whose_turn(self.ages, 1)

    def pass_boundary(self) -> None:
        """Count a round without an outer step: only the schedule moves on (the baseline without peers)."""
        self.standing = Standing(self.standing.round + 1, self.standing.tokens, self.standing.loss)
        self.ages = [0] * len(self.ages)

    def discard(self) -> None:
        """Drop the capture: nothing was applied, and theta goes back to what training alone made of it."""
        if self._capture is not None:
            self._capture.take_back()
        self._capture = None

    def _out(self) -> Capture:
        if self._capture is None:
            raise TrainerError("an outer step was asked for without a capture.")
        return self._capture

    def _stepped(self, among: range, since: int, round_number: int, began: float) -> Applied:
        """The outer step of the fragments `among` is taken, on weights of `since` inner steps ago."""
        inner_steps = self.steps_since_outer - since
        self.ages[among.start : among.stop] = [since] * len(among)
        self.standing = Standing(round_number, self.standing.tokens, self.standing.loss)
        self._capture = None
        return Applied(round_number, inner_steps, None, time.perf_counter() - began)

    @property
    def captured(self) -> tuple[slice, Tensor]:
        """Where in the flat tensors the capture lies that is out, and theta - phi there as it has it; float32."""
        return self._out().fragment.span, self._out().kept.float()

    def usual_distance(self) -> float:
        """How far partners' messages are as a rule from the capture that is out."""
        among, change = self._out().among, self.manifest.outer.beta * self.captured[1].norm().item()
        return math.hypot(*(self.clipping.usual(one, change / math.sqrt(len(among)), self._capture_rate) for one in among))

    def release(self) -> None:
        """Give the device's memory back. Nothing may follow: weights and optimizer are gone."""
        self._capture = None
        self.close()
        del self._part, self.inner, self.model, self.objective, self.weights
        gc.collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """End the processes of other devices, and what reads text."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if isinstance(self.source, Prefetched):
            self.source.close()

    # --- files

    def to_save(self, peer_id: str) -> tuple[checkpoint.State, dict[str, Tensor]]:
        """What a checkpoint holds: the tensors themselves, no copies. One that is written while a capture is out holds no
        trace of it."""
        if self._capture is not None:
            self._capture.take_back()
        state = checkpoint.State(
            run_id=self._sealed.run_id,
            peer_id=peer_id,
            standing=self.standing,
            ages=tuple(self.ages),
            inner_steps=self.inner_steps,
            optimizer_steps=self.inner.optimizer_steps,
            position=self.source.position,
            text=self.manifest.data.text,
            layout=self.built.layout,
            libraries=self.built.libraries,
            partners=self.clipping.history,
        )
        if self._ranks is not None:
            self._ranks.spread()
        moments = self.inner.moments()  # before theta: of shards, it takes its place
        tensors = {"phi": self.phi, "delta": self.delta, "theta": self.theta, "rng.cpu": torch.get_rng_state()}
        tensors |= {"rng.rounding": self._rounding.get_state(), **self.weights.codec_state()}
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return state, tensors | moments

    def resume(self, checkpoints: Path) -> checkpoint.Found:
        """Go on from the newest whole checkpoint, if there is one."""
        checkpoint.recover(checkpoints)
        found = checkpoint.find(checkpoints, self._sealed.run_id)
        if found.path is not None and found.state is not None:
            self.restore(found.path, found.state)
        return found

    def restore(self, path: Path, state: checkpoint.State) -> None:
        """Go on exactly where the checkpoint at `path` was written (on the same kind of device)."""
        check_kept(state, self.manifest, self.layout)
        tensors = checkpoint.tensors_of(path)
        try:
            own = {"phi": self.phi, "delta": self.delta, "theta": self.theta} | self.weights.codec_state()
            for name, target in own.items():
                target.copy_(tensors.pop(name))
            torch.set_rng_state(tensors.pop("rng.cpu"))
            self._rounding.set_state(tensors.pop("rng.rounding"))
            cuda = tensors.pop("rng.cuda", None)
            if cuda is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(cuda, self.device)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not of this model ({error}).") from error
        self.inner.restore(tensors, state.optimizer_steps)
        self.standing = state.standing
        self.ages = list(state.ages)
        self.inner_steps = state.inner_steps
        if state.text in ("", self.manifest.data.text):  # its owners changed it since
            self.source.seek(state.position)
        self.clipping.restore(state.partners)

    def adopt(self, path: Path, standing: Standing) -> None:
        """Take a donor's slow weights in place of ours, with its standing; the outer momentum starts anew.

        Raises RejectedTensorError if they do not fit this model; nothing is changed then.
        """
        tensors = donated(path, self.layout, self.manifest.weights)
        self.discard()
        with self.weights.ahead.changing():
            for name, view in self.layout.split(self.phi):
                view.copy_(tensors.pop(name))
            self.delta.zero_()
        self.theta.copy_(self.phi)
        self.weights.changed(slice(0, self.layout.size))
        self.weights.forget()
        self.ages, self.standing = [0] * len(self.ages), standing

    def compare(self, samples: Sequence[SnapshotParts]) -> str:
        """Why phi is too far from other donors' weights, of which these are samples; "" if it is not."""
        return compare_donors.objection(self.layout.split(self.phi), samples)

    @property
    def snapshot_size(self) -> int:
        """Bytes of weights for newcomers in a file."""
        tensors, metadata, kinds = self.snapshot()
        return len(checkpoint.head_of(tensors, metadata, kinds)) + checkpoint.size_of(tensors, kinds)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, torch.dtype]]:
        """Weights for newcomers, phi itself and no copy, what the file says of them, and what each is written in."""
        metadata = {"format": "pt", "run_id": self._sealed.run_id, "round": str(self.standing.round)}
        return dict(self.layout.split(self.phi)), metadata, self.layout.donated(self.manifest.weights)
