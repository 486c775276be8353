"""Our side of one exchange: a message about a subject as it was at the capture, and what comes of it. A subject is a fragment,
or several that follow each other.

The rule: training goes on during the exchange, and theta has our own part of the outer step from the first inner step
on; what the partner adds comes with `merge`, and `take_back` undoes our part. phi and delta change in `step` alone.

What was sent can be made again when the partner's message lies over it: the change theta - phi of the capture is kept, in
bfloat16 by codecs that round, and the message is made from phi and that. So no float32 copy of the model is made but by
float32, where two model-sized tensors (ours of that moment, and the partner's) are the least that an exact exchange needs
that may still fail at its last byte. Once `step` has read the change, what theta is still to get lies in its place.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch

from nolocod.errors import RejectedTensorError, TrainerError
from nolocod.outer import step
from nolocod.outer.codec import box_size, coder_for
from nolocod.outer.codec.base import HEADER, Head, Noise, Records, Shared, read_head, write_head
from nolocod.outer.codec.blocks import BLOCK, bytes_of, is_set, rows_of, to_bitmap, together
from nolocod.proto.types import CHUNK_SIZE, Description, describe, parts_in
from nolocod.trainer.ahead import Ahead
from nolocod.trainer.boxes import outbox_offset
from nolocod.trainer.clipping import Norms
from nolocod.trainer.desk import Desk
from nolocod.trainer.made_on import PROCESSOR, MadeOn
from nolocod.trainer.queued import Queued
from nolocod.trainer.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

    from nolocod.outer.codec.blocks import Block, Fragment
    from nolocod.run.manifest import Codec, Manifest, Outer
    from nolocod.trainer.model import Layout

    Bring = Callable[[slice], None]

T = TypeVar("T")

_BELIEVED = 4.0
"""A partner's distance is learnt whole up to so many clip radii: the next one may be as far. Beyond them it is cut, or one who
is very far would have many of our messages take two bytes."""
_CHANGE = 0
"""The noise stream of the kept change."""


def nothing(span: slice) -> None:
    """Theta is always there."""


@dataclass(frozen=True)
class Weights:
    """The replica's own tensors, flat, float32: theta on the device, all others in main memory. `distance`: of all blocks, of
    which each fragment has so many. `bring`: called with a span before theta is used there (on_device.py). `made_on`: where
    messages are made and read. `ahead`: brings what an outer step reads to a GPU."""

    theta: Tensor
    phi: Tensor
    delta: Tensor
    distance: Tensor
    blocks: tuple[int, ...]
    bring: Bring
    made_on: MadeOn
    ahead: Ahead
    _changed: list[slice] = field(default_factory=list)
    """Where theta is otherwise than inner steps left it, and other devices do not know yet: one span at most."""
    _memory: list[Tensor] = field(default_factory=list)
    """What captures keep their change in: one tensor, once there was a capture."""

    @classmethod
    def of(
        cls,
        theta: Tensor,
        phi: Tensor,
        delta: Tensor,
        fragments: tuple[Fragment, ...],
        bring: Bring = nothing,
        made_on: MadeOn = PROCESSOR,
    ) -> Weights:
        """With distances that are not known yet."""
        blocks = tuple(len(fragment.blocks) for fragment in fragments)
        return cls(theta, phi, delta, torch.full((sum(blocks),), math.nan), blocks, bring, made_on, Ahead(theta.device))

    @property
    def is_far(self) -> bool:
        """Whether theta lies where the processor would wait for it (queued.py)."""
        return self.theta.device.type != "cpu"

    def at(self, span: slice) -> Tensor:
        """Theta there, as inner steps left it."""
        self.bring(span)
        return self.theta[span]

    def changed(self, span: slice) -> None:
        """Theta was changed there, but not by inner steps."""
        parts = [*self._changed, span]
        self._changed[:] = [slice(min(one.start for one in parts), max(one.stop for one in parts))]

    def take_changed(self) -> slice | None:
        """Where it was since this was asked the last time."""
        return self._changed.pop() if self._changed else None

    def look_ahead(self, plan: Plan, subject: int) -> None:
        """Such a capture is to come: have ready what it reads, where theta is far. Beside training."""
        among = parts_in(subject, len(plan.fragments))
        if self.is_far and among.stop <= len(plan.fragments):
            span = together(plan.parts(among)).span
            with suppress(RuntimeError):  # it is told where the capture asks for it
                self.memory(span.stop - span.start, plan.kept)  # pinned memory takes long to make
            self.ahead.bring(span, self.phi[span], self.delta[span])

    def memory(self, size: int, kind: torch.dtype) -> Tensor:
        """For the change of a capture, so many values: the same for each capture, as there is one at a time. To map fresh
        pages takes as long as to write them, and longer where a virtual machine has to ask its host for them."""
        if not self._memory or self._memory[0].numel() < size:
            self._memory.clear()
            self._memory.append(torch.empty(size, dtype=kind, pin_memory=self.theta.is_cuda))
        return self._memory[0][:size]

    def forget(self) -> None:
        """Other weights were taken over: what was known about our own is void."""
        self.distance.fill_(math.nan)

    def distances(self, among: range) -> Tensor:
        """Those of the fragments `among`."""
        return self.distance[sum(self.blocks[: among.start]) : sum(self.blocks[: among.stop])]

    def codec_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of the codec's state, by name."""
        return {f"distance.{index}": self.distances(range(index, index + 1)) for index in range(len(self.blocks))}


@dataclass(frozen=True)
class Plan:
    """What is the same for all captures of a run."""

    codec: Codec
    settings: Outer
    fragments: tuple[Fragment, ...]

    @classmethod
    def of(cls, manifest: Manifest, layout: Layout) -> Plan:
        return cls(manifest.codec, manifest.outer, layout.fragments(manifest.outer.turns))

    def parts(self, among: range) -> tuple[Fragment, ...]:
        """These of the fragments, which follow each other."""
        return self.fragments[among.start : among.stop]

    @cached_property
    def box_size(self) -> int:
        """Bytes of the largest message: one about all fragments."""
        return box_size(self.codec, self.fragments)

    @property
    def outbox_offset(self) -> int:
        """Of the outbox in the memory that begins with the inbox (boxes.py)."""
        return outbox_offset(self.box_size)

    @property
    def boxes_size(self) -> int:
        """Bytes of both boxes in that memory."""
        return self.outbox_offset + self.box_size

    @property
    def kept(self) -> torch.dtype:
        """What the change of a capture is kept in."""
        return torch.float32 if self.codec == "float32" else torch.bfloat16

    @property
    def exchange_size(self) -> int:
        """Bytes that an exchange takes: both boxes, and the kept change."""
        return self.boxes_size + self.kept.itemsize * sum(fragment.size for fragment in self.fragments)


class Capture:
    """A fragment of `weights` at this moment; `seed` draws the rounding."""

    def __init__(self, plan: Plan, weights: Weights, subject: int, seed: int) -> None:
        self.subject = subject
        self.among = parts_in(subject, len(plan.fragments))
        """The fragments that it is about."""
        self._parts = plan.parts(self.among)
        self.fragment = together(self._parts)
        self._plan = plan
        self._weights = weights
        self._noise = Noise(seed)
        self._seed = seed
        self._rows = rows_of(self.fragment, weights.made_on.at_once)
        self._bounds = [0.0] * len(self.fragment.blocks)
        self.ran_out = False
        """Whether there was no memory left where messages are made."""
        self.kept = weights.memory(self.fragment.size, plan.kept)
        """The change until `step`, then what theta is still to get."""
        self._queued: Queued | None = None
        if weights.is_far:
            brought = weights.ahead.take(self.fragment.span)
            self._queued = Queued(weights.at(self.fragment.span), self.kept, seed, weights.ahead, brought)
        self._started = False
        self._apart: list[float | None] | None = None  # of each block, once inspected; None: not decoded
        self.norms: list[Norms] = []
        """What `inspect` found, of each fragment."""
        self.weight = 1.0
        """What `step` lets the partner's difference count for; set by whoever judges the norms."""
        self._records: list[slice] = []  # where the partner's lie in the inbox, once inspected

    @property
    def spread(self) -> float:
        """||theta_i - theta_j|| as `inspect` found it (proto.types.Inspection)."""
        return math.hypot(*(seen.distance for seen in self.norms)) / self._plan.settings.gamma

    def _desk(self, made_on: MadeOn) -> Desk:
        """Made as it is needed: between two inner steps nobody waits for a GPU."""
        noise = Noise(self._seed, made_on.device) if made_on.is_far else self._noise
        distances = self._weights.distances(self.among)
        where = made_on.device, made_on.at_once, made_on.compiled
        shared = Shared(self._plan.settings, self.fragment, noise, distances, self._bounds, *where)
        coder = coder_for(self._plan.codec, shared)
        return Desk(made_on, coder, self._weights.phi, self._weights.delta, self.kept)

    @cached_property
    def _loops(self) -> ModuleType | None:
        """outer/codec/fused.py, where it has something for this codec."""
        if not self._weights.made_on.compiled or self.kept.dtype != torch.bfloat16:
            return None
        from nolocod.outer.codec import fused

        return fused

    @cached_property
    def _near(self) -> Desk:
        made_on = self._weights.made_on
        return self._desk(MadeOn(PROCESSOR.device, made_on.at_once) if made_on.is_far else made_on)

    @cached_property
    def _far(self) -> Desk:
        return self._desk(self._weights.made_on)

    def _done(self, work: Callable[[Desk], T]) -> T:
        """Where messages are made; on the processor where that has no memory left, as inner steps go on there."""
        if self._weights.made_on.is_far and not self.ran_out:
            with suppress(torch.OutOfMemoryError), self._weights.made_on.open():
                return work(self._far)
            self.ran_out = True  # to ask once more would take from training what it has just let go
            self.__dict__.pop("_far", None)
        return work(self._near)

    @one_thread()
    def keep(self) -> None:
        """Keep the change of theta. TrainerError if the weights are not finite, here or from `write`."""
        if self._queued is not None:
            self._queued.keep(self._weights.phi[self.fragment.span])
            return
        scratch = torch.empty(BLOCK)
        for block in self.fragment.blocks:
            if not self._keep(block, scratch):
                raise TrainerError("the weights are not finite.")

    def _keep(self, block: Block, scratch: Tensor) -> bool:
        """Whether it is finite."""
        theta, phi, kept = self._weights.at(block.span), self._weights.phi[block.span], self.kept[block.within]
        if self._loops:
            return bool(self._loops.keep(theta, phi, self._noise.of(block, _CHANGE), kept))
        change = torch.sub(theta, phi, out=scratch[: block.size])
        total = change.sum().item()
        if kept.dtype == torch.bfloat16:
            self._noise.round(change, block, _CHANGE)
        kept.copy_(change)
        return math.isfinite(total)

    @one_thread()
    def write(self, outbox: Tensor) -> Description:
        """Write the message at the start of `outbox` (uint8) and hash its chunks while they are in the caches."""
        if self._queued is not None:
            self._queued.check()
        content, offset = bytes_of(outbox), HEADER
        hashes: list[bytes] = []
        for rows in self._rows:
            offset += self._done(partial(Desk.encode, rows=rows, out=outbox[offset:]))
            while (begin := len(hashes) * CHUNK_SIZE) + CHUNK_SIZE <= offset:
                hashes += describe(content[begin : begin + CHUNK_SIZE]).hashes
        write_head(Head.of(self._plan.codec, self.fragment, self.subject, offset), outbox)
        first = describe(content[: min(CHUNK_SIZE, offset)]).hashes  # once more: the header was not in it
        last = describe(content[max(1, len(hashes)) * CHUNK_SIZE : offset]).hashes
        return Description(offset, CHUNK_SIZE, (*first, *hashes[1:], *last))

    def start(self) -> None:
        """Training goes on with this capture out: give theta our own part of the outer step, unless it has it."""
        if not self._started:
            self._started = True
            self._add_own_part(1)

    def take_back(self) -> None:
        """Undo `start`, to the rounding of float32."""
        if self._started:
            self._started = False
            self._add_own_part(-1)

    @one_thread()
    def _add_own_part(self, sign: int) -> None:
        self._weights.changed(self.fragment.span)
        if self._queued is not None:
            self._queued.add_own_part(self._weights.delta[self.fragment.span], self._plan.settings, sign)
            return
        scratch = torch.empty(BLOCK)  # a message may be written meanwhile, with the other scratch
        for block in self.fragment.blocks:
            theta, delta = self._weights.at(block.span), self._weights.delta[block.span]
            step.add_own_part(theta, delta, partial(self._change, block, scratch), self._plan.settings, sign)

    @one_thread()
    def inspect(self, inbox: Tensor) -> bytes:
        """Compare the partner's message in `inbox` (hostile bytes) with ours; returns Inspection.skipped.

        RejectedTensorError if it is not a message about our subject, or holds what is not finite.
        """
        self._records = self._walk(inbox)
        squares = [[0.0, 0.0] for _ in self._parts]
        part_of = [index for index, part in enumerate(self._parts) for _ in part.blocks]
        apart: list[float | None] = []
        for rows in self._rows:
            records = Records(inbox, self._records[rows.indices])
            found = self._done(partial(Desk.compare, rows=rows, records=records))
            for block, seen in zip(rows.blocks, found, strict=True):
                apart.append(None if seen is None else seen.apart)
                if seen is not None:
                    squares[part_of[block.index]][0] += seen.distance**2
                    squares[part_of[block.index]][1] += seen.change**2
        if not math.isfinite(sum(distance for distance, _ in squares)):
            raise RejectedTensorError("it holds values that are not finite or too large.")
        self._apart = apart
        beta = self._plan.settings.beta
        self.norms = [Norms(math.sqrt(distance), beta * math.sqrt(change)) for distance, change in squares]
        return to_bitmap(index for index, one in enumerate(apart) if one is None)

    @one_thread()
    def step(self, inbox: Tensor, skipped: bytes) -> None:
        """Take the paired outer step on phi and delta, a solo step in blocks that either side could not decode.

        `skipped`: those that the partner could not. TrainerError without an inspection before.
        """
        if self._apart is None:
            raise TrainerError("an outer step was asked for without an inspection.")
        if self._queued is not None:
            self._queued.wait()  # it may still read what lies here
        with self._weights.ahead.changing():
            for rows in self._rows:
                records = Records(inbox, self._records[rows.indices])
                apart = [None if is_set(skipped, block.index) else self._apart[block.index] for block in rows.blocks]
                paired = [one is not None for one in apart]
                self._done(partial(Desk.step, rows=rows, records=records, paired=paired, weight=self.weight))
                for block, one in zip(rows.blocks, apart, strict=True):
                    self._near.coder.learn(block, None if one is None else min(1.0, _BELIEVED * self.weight**0.5) * one)
        if self._queued is not None:
            self._queued.bring_late()

    @one_thread()
    def merge(self, *, trained_on: bool) -> None:
        """Bring theta after `step`. `trained_on`: inner steps were taken since the capture, and are kept."""
        self._weights.changed(self.fragment.span)
        phi = self._weights.phi[self.fragment.span]
        if self._queued is not None:
            self._queued.add_kept() if trained_on else self._queued.copy(phi)
        elif not trained_on:
            self._weights.at(self.fragment.span).copy_(phi)
        else:
            add = self._loops.add if self._loops else torch.Tensor.add_
            for block in self.fragment.blocks:
                add(self._weights.at(block.span), self.kept[block.within])

    def _walk(self, inbox: Tensor) -> list[slice]:
        """Where the records of the message in `inbox` lie; RejectedTensorError if it is not about our subject."""
        head, records, offset = read_head(inbox), [], HEADER
        expected = Head.of(self._plan.codec, self.fragment, self.subject, head.size)
        if head != expected:
            raise RejectedTensorError(f"it is a message of another kind: {head}, where {expected} was due.")
        for block in self.fragment.blocks:
            size = self._near.coder.length(block, inbox[offset:])
            records.append(slice(offset, offset + size))
            offset += size
        if offset != head.size or offset > inbox.numel():
            raise RejectedTensorError(f"its records take {offset} bytes, and it says {head.size}.")
        return records

    def _change(self, block: Block, scratch: Tensor) -> Tensor:
        """theta - phi at the capture (in `scratch`)."""
        return scratch[: block.size].copy_(self.kept[block.within])
