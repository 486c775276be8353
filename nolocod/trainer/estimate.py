"""What a run needs of a node: memory by process and device, bytes, disk, times, before anything is allocated.

The rule: exact where it can be (parameters, weights, boxes, messages, files, what a backward pass needs), a formula with its
source where not, and the libraries' memory as this very process has it. Nothing is trained; `speed` alone computes, for half a
second. What was measured (measure.py) takes the place of what was estimated, and no other formula is anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nolocod.disk import USUAL_RATE, rest_after
from nolocod.outer.codec import box_size
from nolocod.outer.phase import at_once
from nolocod.run.manifest import CODEC_BYTES
from nolocod.trainer import muon
from nolocod.trainer.adapter import attach
from nolocod.trainer.boxes import outbox_offset
from nolocod.trainer.capture import Plan
from nolocod.trainer.checkpoint import KEPT, size_of
from nolocod.trainer.data import STDLIB_BYTES, make_tokenizer
from nolocod.trainer.files import REST
from nolocod.trainer.head import CHUNK, plain_head
from nolocod.trainer.inner import autocast
from nolocod.trainer.model import (
    BYTES_ON_HOST,
    GATHERED,
    SHARED,
    activations,
    bytes_on_device,
    from_config,
    layout_of,
    pinned,
    read_config,
)
from nolocod.trainer.objective import NextToken
from nolocod.trainer.prefetch import TOKEN_BYTES, steps_kept

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.model import Layout

EFFICIENCY = 0.4
"""Share of a bare matrix product's speed that an inner step reaches, by habit of transformers of some size; small ones
reach less."""
_HOLES, _MAPPED = 1.6, 32 << 20
"""glibc's heap is so many times as large as what lies in it, where a step's tensors come and go; those of so many bytes have
memory of their own, which goes back at once (mallopt(3), M_MMAP_THRESHOLD). `python -m tests.bench plan` holds it."""
_WRITES = 1e9
"""Bytes in a second that a thread hashes, and copies to the system, for a file."""


@dataclass(frozen=True)
class Estimate:
    """Bytes and floating-point operations of a run. `activations` is what a step takes beside its state: what one micro-batch
    keeps for its backward pass, or Muon's scratch after that, whichever is more; and the holes that gradients leave."""

    parameters: int
    trained: int
    """As many of them; the others are frozen beside an adapter."""
    inner_steps: int
    turns: int
    on_device: int
    activations: int
    locked: int
    """Pinned main memory, at most, where the whole model lies on a GPU."""
    shared: int
    """More main memory of a model in shards, ..."""
    gathered: int
    """... and more of each of its devices."""
    on_host: int
    """With what the largest exchange takes; the usual one ..."""
    boxes: int
    """... takes so much shared memory for both messages, ..."""
    kept: int
    """... and for the kept change."""
    message: int
    """The largest message of an exchange, each way: about the whole model, and the first one about it."""
    turn_message: int
    """The usual one, about the part of one turn."""
    checkpoint: int
    """Of each that is kept, and of the copy that is written beside training."""
    weights: int
    """For a newcomer."""
    text: int
    """Read ahead, or mapped; what a node's own text adds is not known."""
    operations: float
    """Of one inner step."""

    def step_seconds(self, speed: float) -> float:
        """How long an inner step takes on a device of `speed` operations per second in matrix products."""
        return self.operations / (EFFICIENCY * speed)


@dataclass(frozen=True)
class Machine:
    """Where a node runs: bytes per second of its line and its disk, and the seconds that an inner step takes it."""

    step: float
    down: float
    up: float
    disk: float = USUAL_RATE
    network: int = 0
    """Bytes of memory that the libraries of the network process take, ..."""
    trainer: int = 0
    """... and those of the trainer."""
    processes: int = 1
    """That share an inner step, each on a device of its own, or on the CPU."""
    on_cpu: bool = True
    shards: int = 1
    """Parts in which the model lies on them."""


@dataclass(frozen=True)
class Needs:
    """What a node needs. Seconds, and bytes."""

    phase: float
    """From one exchange about the whole model to the next."""
    exchange: float
    """From the offer to the merge."""
    busy: float
    """The share of the time in which the line is; above 1 it cannot carry all."""
    hidden: float
    """The share of exchanges that fits behind inner steps."""
    late: float
    """Inner steps from the capture to the merge."""
    fewest_steps: int
    """Inner steps in a phase that leave the line free half of the time."""
    fetch: float
    """A newcomer's weights, from a member with a line like this one."""
    saving: float
    """A checkpoint, on the disk alone: beside training it rests between its pieces."""
    saved_every: float
    written: float
    """A day."""
    stop: float
    """From SIGTERM to the end, at most."""
    network_memory: int
    trainer_memory: int
    """Of all its processes; on the CPU with all that a device would hold."""
    saving_memory: int
    """While a checkpoint is written."""
    device_memory: int
    """Of each device."""
    locked: int
    """Of the trainer's memory, so much is pinned for the GPU."""
    disk: int
    """Checkpoints with the one that is written, and two files of weights for newcomers."""


def needs_on(run: Estimate, machine: Machine, grace: float) -> Needs:
    """What a node of the `run` needs on this `machine`; a stop waits at most `grace` seconds for an exchange."""
    rate, step = min(machine.down, machine.up), machine.step  # both directions at once
    phase, line = run.inner_steps * step, run.turns * run.turn_message / rate
    busy = line / phase
    # What is due goes together, on a line that cannot keep up as much as may. Who offers has just begun an inner step, at whose
    # end it captures; the partner is in the midst of one. Then both wait for the end of one to merge: half a step.
    carried = line / run.turns * (at_once(run.turns, line / run.turns, phase) if busy > 1 else 1)
    exchange = carried + 1.5 * step
    saving = run.checkpoint / machine.disk
    every = rest_after(run.checkpoint, saving)
    is_whole = machine.shards == 1
    each = run.on_device // machine.shards + run.activations + (0 if is_whole else run.gathered)
    locked = run.locked if is_whole and not machine.on_cpu else 0
    host = machine.trainer + BYTES_ON_HOST * run.trained + run.boxes + run.kept + run.text + locked
    host += 0 if is_whole else run.shared
    others = machine.processes - 1
    trainer = host + others * machine.trainer + (machine.processes * each if machine.on_cpu else 0)
    return Needs(
        phase=phase,
        exchange=exchange,
        busy=busy,
        hidden=min(1.0, 1 / busy),
        late=carried / step + 0.75,
        fewest_steps=math.ceil(2 * line / step),
        # a member is in the midst of a step, ends it, and writes them beside training, at its leisure
        fetch=step / 2 + run.weights * (1 / machine.disk + REST / _WRITES + 1 / rate),
        saving=saving,
        saved_every=every,
        written=run.checkpoint * 86_400 / every,
        stop=step + min(grace, exchange) + saving,
        network_memory=machine.network,
        trainer_memory=trainer,
        saving_memory=trainer + run.checkpoint,
        device_memory=0 if machine.on_cpu else each,
        locked=locked,
        disk=(KEPT + 1) * run.checkpoint + 2 * run.weights,
    )


def estimate(
    manifest: Manifest, base: Path | None = None, frozen: torch.dtype = torch.bfloat16, devices: Sequence[torch.device] = ()
) -> Estimate:
    """Work it out; `base` is the folder of the model that the run starts from, and `frozen` the type in which the device holds
    it beside an adapter. RunFileError if the model is not possible."""
    config = read_config(manifest, make_tokenizer(manifest.data, base).vocabulary)
    layout = layout_of(config, manifest.adapter)
    inner, turns = manifest.inner, manifest.outer.turns
    device = devices[0] if devices else torch.device("cpu")
    plan = Plan(manifest.codec, manifest.outer, layout.fragments(turns))
    at_once = min(inner.batch, math.ceil(inner.batch * inner.accumulation / max(1, len(devices))))
    windows = inner.batch * inner.accumulation * (inner.sequence + 1)
    is_beside = manifest.data.source == "hub" or device.type == "cuda"
    ahead = 2 * TOKEN_BYTES * windows * steps_kept(windows) if is_beside else 0
    by_muon = layout.matrices if inner.optimizer == "muon" else ()
    moments = 2 * layout.size - sum(math.prod(shape) - max(shape) for shape in by_muon)  # of each line, a mean square
    largest = box_size(manifest.codec, plan.fragments[:1])
    turn_message = math.ceil(CODEC_BYTES[manifest.codec] * layout.size / turns)
    return Estimate(
        parameters=layout.size + layout.frozen,
        trained=layout.size,
        inner_steps=inner.steps,
        turns=turns,
        on_device=bytes_on_device(layout, manifest, frozen),
        activations=max(
            _activations(config, layout, manifest, frozen, at_once, device),
            muon.scratch(by_muon),
        )
        + _holes([4 * math.prod(shape) for shape in layout.shapes], device),
        locked=pinned(layout, device, 1),
        shared=SHARED * layout.size,
        gathered=GATHERED * max(map(math.prod, layout.shapes)),
        on_host=BYTES_ON_HOST * layout.size + pinned(layout, device, 1) + plan.exchange_size,
        boxes=largest + min(largest, outbox_offset(largest)),
        kept=plan.kept.itemsize * plan.fragments[0].size,
        message=plan.box_size,
        turn_message=turn_message,
        checkpoint=4 * (3 * layout.size + moments),  # phi, delta, theta
        weights=size_of(dict(layout.split(torch.empty(layout.size, device="meta"))), layout.donated(manifest.weights)),
        text=ahead + (STDLIB_BYTES if manifest.data.source == "stdlib" else 0),
        operations=operations(layout, manifest),
    )


def _activations(
    config: Any,  # noqa: ANN401 - transformers has no common typed base
    layout: Layout,
    manifest: Manifest,
    frozen: torch.dtype,
    windows: int,
    device: torch.device,
) -> int:
    """Bytes that `windows` keep for their backward pass, and the logits with whose gradient it begins: as a forward pass on
    tensors without values tells, or else by a formula."""
    vocabulary, kept = int(config.vocab_size), dict[int, Tensor]()
    logits = 4 * windows * manifest.inner.sequence * vocabulary

    def keep(one: Tensor) -> Tensor:
        kept.setdefault(one.untyped_storage()._cdata, one)
        return one

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), device:
            model = from_config(config)
            if manifest.adapter is not None:
                attach(model.to(frozen), manifest.adapter)
            head = plain_head(model)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), autocast(device):
                NextToken(head).loss(model, torch.zeros(windows, manifest.inner.sequence + 1, dtype=torch.int64), device)
            for own in (*model.parameters(), *model.buffers()):
                kept.pop(own.untyped_storage()._cdata, None)
            sizes = [one.untyped_storage().nbytes() for one in kept.values()]
    except Exception:  # noqa: BLE001 - what does without values is said in many ways; a mixture chooses experts by them
        return activations(layout, vocabulary, manifest, windows)
    sizes.append(logits if head is None else min(logits, CHUNK))
    return sum(sizes) + _holes(sizes, device)


def _holes(sizes: Sequence[int], device: torch.device) -> int:
    return round(sum((_HOLES - 1) * size for size in sizes if device.type == "cpu" and size < _MAPPED))


def operations(layout: Layout, manifest: Manifest) -> float:
    """Of one inner step: 6 per parameter and token, and 12 layers hidden sequence per token for attention (arXiv 2204.02311,
    appendix B); what is frozen has no gradient."""
    inner = manifest.inner
    forward = 4 / 3 if manifest.data.kind == "preference" else 1.0  # one more of the three passes' worth, by the reference
    each = 6.0 * layout.size + 4.0 * layout.frozen + 12.0 * layout.states * inner.sequence
    optimizer = sum(map(muon.operations, layout.matrices)) if inner.optimizer == "muon" else 0.0
    return forward * inner.tokens_per_step * each + optimizer
