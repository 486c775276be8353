"""One replica: the model with its fast weights theta, the slow weights phi, the outer momentum delta.

The rule: theta lives on the device, phi and delta in float32 in main memory, and every outer operation goes
through them piece by piece, so that no further model-sized tensor is ever needed. With a codec that rounds,
the outbox does not tell theta exactly; only then a copy of theta is kept while a snapshot is out, in the
memory that the smaller boxes save.
"""

from __future__ import annotations

import math
import mmap
import time
from typing import TYPE_CHECKING

import blake3
import torch

from nolocod import outer
from nolocod.codec import bytes_of, decode, encode, encoded_size, pieces
from nolocod.disk import written_whole
from nolocod.errors import CheckpointError, RejectedTensorError, TrainerError
from nolocod.terms import Applied, Description, Standing, describe
from nolocod.trainer import checkpoint
from nolocod.trainer.inner import Inner, learning_rate, mean_loss
from nolocod.trainer.model import Layout, build, check_memory, flatten, layout_of, pick_device, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from nolocod.manifest import Sealed
    from nolocod.trainer.windows import Source


class Replica:
    """A model in training. Built with the run's initial weights; `restore` and `adopt` bring others."""

    def __init__(self, sealed: Sealed, vocabulary: int, source: Source, device: str) -> None:
        """Raises RunFileError, DeviceError or ModelTooLargeError before anything large is allocated."""
        self.manifest = manifest = sealed.manifest
        self.device = pick_device(device)
        config = read_config(manifest, vocabulary)
        self.layout: Layout = layout_of(config)
        check_memory(self.layout.size, config.vocab_size, manifest, self.device)
        self.model = build(config, manifest.seed)
        self.theta = flatten(self.model, self.layout, self.device)
        self.phi = self.theta.to("cpu", copy=True)
        self.delta = torch.zeros_like(self.phi)
        self.inner = Inner(self.model, manifest, self.device)
        self.source = source
        self.standing = Standing(0, 0, 0.0)
        self.steps_since_outer = 0
        self.inner_steps = 0
        self.rate = 0.0
        self._run_id = sealed.run_id
        self._rounding = torch.Generator().manual_seed(manifest.seed)
        self._sent: Tensor | None = None  # theta at the snapshot, where the outbox does not tell it exactly
        self._snapshot_steps: int | None = None  # inner steps behind the snapshot that is out, if one is
        self.model.train()

    def draw_as(self, peer_id: str) -> None:
        """Make the random draws of training (dropout, rounding) this node's own: equal ones would add up."""
        digest = blake3.blake3(f"draws {self.manifest.seed} {peer_id}".encode()).digest(7)
        torch.manual_seed(int.from_bytes(digest, "big"))
        self._rounding.manual_seed(int.from_bytes(digest, "big"))

    @property
    def box_size(self) -> int:
        """Bytes of one encoded tensor."""
        return encoded_size(self.layout.size, self.manifest.codec)

    # --- inner

    def step(self) -> None:
        """Take one inner step."""
        self.rate = learning_rate(self.manifest, self.standing.round, self.steps_since_outer)
        self.inner.step(self._batch, self.rate)
        self.steps_since_outer += 1
        self.inner_steps += 1
        tokens = self.standing.tokens + self.manifest.inner.tokens_per_step
        self.standing = Standing(self.standing.round, tokens, self.standing.loss)

    def _batch(self) -> Tensor:
        return torch.from_numpy(self.source.take(self.manifest.inner.batch)).to(self.device)

    def report(self) -> float:
        """Return the mean loss since the last report and make it the standing's; TrainerError if training broke."""
        loss = self.inner.report()
        if math.isfinite(loss):
            self.standing = Standing(self.standing.round, self.standing.tokens, loss)
        return self.standing.loss

    def evaluate(self) -> float:
        """Mean held-out loss of the fast weights, in nats per token."""
        batch = self.manifest.inner.batch
        windows = self.source.held_out(batch * self.manifest.evaluation.batches)
        self.model.eval()
        loss = mean_loss(self.model, windows, batch, self.device)
        self.model.train()
        return loss

    # --- outer

    def snapshot(self, outbox: Tensor) -> Description:
        """Write our message into `outbox` (uint8, `box_size` long) and hash its chunks."""
        codec, settings = self.manifest.codec, self.manifest.outer
        width = encoded_size(1, codec)
        if codec != "float32":
            self._sent = self.theta.to("cpu", copy=True)
        for piece in pieces(self.layout.size):
            s = outer.message(self.phi[piece], self.theta[piece].cpu(), settings)
            if not math.isfinite(s.sum().item()):
                raise TrainerError("the weights are not finite any more.")
            encode(s, outbox[piece.start * width : piece.stop * width], codec, self._rounding)
        self._snapshot_steps = self.steps_since_outer
        return describe(bytes_of(outbox))

    def inspect(self, outbox: Tensor, inbox: Tensor) -> float:
        """Return ||s_i - s_j|| / gamma; RejectedTensorError if the partner's message is not finite."""
        total = 0.0
        for own, other in self._messages(outbox, inbox):
            difference = own - other
            total += torch.dot(difference, difference).item()
        if not math.isfinite(total):
            raise RejectedTensorError("it holds values that are not finite, or beyond all measure.")
        return math.sqrt(total) / self.manifest.outer.gamma

    def apply(self, outbox: Tensor, inbox: Tensor, partner_round: int) -> Applied:
        """Take the paired outer step with the messages in both boxes; merge what was trained meanwhile."""
        if self._snapshot_steps is None:
            raise TrainerError("an outer step was asked for without a snapshot.")
        began = time.perf_counter()
        settings = self.manifest.outer
        trained_on = self.steps_since_outer > self._snapshot_steps
        whole = pieces(self.layout.size)
        for piece, (own, other) in zip(whole, self._messages(outbox, inbox), strict=True):
            phi, delta = self.phi[piece], self.delta[piece]
            was = outer.sent(phi, own, settings) if self._sent is None else self._sent[piece]
            outer.step(phi, delta, own + other, 2, settings)
            self._merge(piece, was if trained_on else None)
        return self._stepped(max(self.standing.round + 1, partner_round), self._snapshot_steps, began)

    def solo(self) -> Applied:
        """Take the outer step alone, on the weights as they are now."""
        began = time.perf_counter()
        settings = self.manifest.outer
        for piece in pieces(self.layout.size):
            own = outer.message(self.phi[piece], self.theta[piece].cpu(), settings)
            outer.step(self.phi[piece], self.delta[piece], own, 1, settings)
            self._merge(piece, None)
        return self._stepped(self.standing.round + 1, self.steps_since_outer, began)

    def pass_boundary(self) -> None:
        """Count a round without an outer step: only the schedule moves on (the baseline without peers)."""
        self.standing = Standing(self.standing.round + 1, self.standing.tokens, self.standing.loss)
        self.steps_since_outer = 0

    def discard(self) -> None:
        """Drop the snapshot: nothing was applied."""
        self._snapshot_steps = self._sent = None

    def _merge(self, piece: slice, was: Tensor | None) -> None:
        """Bring theta after the outer step; `was` is theta at the snapshot if training went on since."""
        theta, phi = self.theta[piece], self.phi[piece]
        if was is None:
            theta.copy_(phi)
        else:
            outer.correct(theta, phi.to(self.device), was.to(self.device))

    def _stepped(self, round_number: int, inner_steps: int, began: float) -> Applied:
        self.steps_since_outer -= inner_steps
        self.standing = Standing(round_number, self.standing.tokens, self.standing.loss)
        self.discard()
        return Applied(round_number, inner_steps, None, time.perf_counter() - began)

    def _messages(self, outbox: Tensor, inbox: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        codec = self.manifest.codec
        width = encoded_size(1, codec)
        for piece in pieces(self.layout.size):
            span = slice(piece.start * width, piece.stop * width)
            yield decode(outbox[span], codec), decode(inbox[span], codec)

    # --- files

    def save(self, folder: Path, peer_id: str) -> int:
        """Write a checkpoint below `folder`; returns its size in bytes."""
        state = checkpoint.State(
            run_id=self._run_id,
            peer_id=peer_id,
            standing=self.standing,
            steps_since_outer=self.steps_since_outer,
            inner_steps=self.inner_steps,
            optimizer_steps=self.inner.optimizer_steps,
            position=self.source.position,
        )
        tensors = {"phi": self.phi, "delta": self.delta, "theta": self.theta, "rng.cpu": torch.get_rng_state()}
        tensors["rng.rounding"] = self._rounding.get_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        for kind, moments in self.inner.moments().items():
            tensors |= {f"{kind}.{index}": moment for index, moment in moments.items()}
        return checkpoint.save(folder, state, tensors)

    def restore(self, path: Path, state: checkpoint.State) -> None:
        """Go on exactly where the checkpoint at `path` was written (on the same kind of device)."""
        tensors = checkpoint.tensors_of(path)
        try:
            for target, name in ((self.phi, "phi"), (self.delta, "delta"), (self.theta, "theta")):
                target.copy_(tensors.pop(name))
            torch.set_rng_state(tensors.pop("rng.cpu"))
            self._rounding.set_state(tensors.pop("rng.rounding"))
            cuda = tensors.pop("rng.cuda", None)
            if cuda is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(cuda, self.device)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not of this model ({error}).") from error
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, tensor in tensors.items():
            kind, _, index = name.partition(".")
            moments[kind][index] = tensor
        self.inner.restore(moments, state.optimizer_steps)
        self.standing = state.standing
        self.steps_since_outer = state.steps_since_outer
        self.inner_steps = state.inner_steps
        self.source.seek(state.position)

    def adopt(self, path: Path, standing: Standing) -> None:
        """Take a donor's slow weights in place of ours, with its standing; the outer momentum starts anew.

        Raises RejectedTensorError if they do not fit this model; nothing is changed then.
        """
        try:
            tensors = checkpoint.read_tensors(path)
        except CheckpointError as error:
            raise RejectedTensorError(f"they are no weights: {error.cause}") from error
        if sorted(tensors) != list(self.layout.names):
            raise RejectedTensorError("the donor's weights have other names than this run's model.")
        for name, view in self.layout.split(self.phi):
            given = tensors[name]
            if given.shape != view.shape or given.dtype != torch.float32 or not given.isfinite().all():
                raise RejectedTensorError(f"the donor's {name} does not fit, or is not finite.")
        for name, view in self.layout.split(self.phi):
            view.copy_(tensors.pop(name))
        self.theta.copy_(self.phi)
        self.delta.zero_()
        self.discard()
        self.steps_since_outer = 0
        self.standing = standing

    def dump(self, path: Path) -> Description:
        """Write phi to `path` as safetensors, whole or not at all, for newcomers; hashed chunk by chunk."""
        metadata = {"format": "pt", "run_id": self._run_id, "round": str(self.standing.round)}
        with written_whole(path) as handle:
            checkpoint.write_tensors(handle, dict(self.layout.split(self.phi)), metadata)
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                return describe(view)
            finally:
                view.release()
