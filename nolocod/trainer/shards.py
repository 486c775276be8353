"""A model that lies in shards: each device has some rows of every parameter, and sees a layer whole while it computes with it.

The rule: theta lies in main memory too, flat, in an area that all processes of the node see. The leader's outer steps and files
know that alone; between two inner steps it has everybody bring it there, and take from it what an outer step changed. Only the
parts are brought that are asked for. The optimizer's state goes to a checkpoint, which has the form of one device's, the same
way. torch cuts a parameter's rows as `chunk` does, so that a device's rows are one span of the flat tensor.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from nolocod.errors import DeviceError, ModelTooLargeError, UnsupportedModelError
from nolocod.trainer.base_model import initial
from nolocod.trainer.devices import is_sharded
from nolocod.trainer.group import Give, lost
from nolocod.trainer.inner import KINDS, LOSS_SCALE, OF_MATRICES, SQUARES, Inner
from nolocod.trainer.model import Place, bare, check_memory, fast_kind, flatten
from nolocod.trainer.muon import Muon, lines, orthogonal
from nolocod.trainer.objective import objective_of
from nolocod.trainer.on_device import DevicePart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.group import Group
    from nolocod.trainer.model import Layout
    from nolocod.trainer.objective import Objective

    Rows = Iterable[tuple[torch.Size, Tensor]]
    """Shapes of tensors, and this device's rows of each."""


def make_part(manifest: Manifest, vocabulary: int, place: Place, *, leads: bool) -> DevicePart:
    """The run's initial weights on a device, or its shards of them. Raises RunFileError or ModelTooLargeError."""
    kind = DevicePart if place.shards == 1 else ShardedPart
    return kind(manifest, vocabulary, place, leads=leads)


def check_shards(manifest: Manifest, layout: Layout, bits: int) -> None:
    """Raise UnsupportedModelError where the run's model cannot lie in shards."""
    cause = ""
    if manifest.data.kind == "preference":
        cause = "a run that learns from preferences has its first weights beside it, which do not lie in shards"
    elif bits != 16:
        cause = "--base-bits and shards do not go together"
    elif () in layout.shapes:
        cause = f"{layout.names[layout.shapes.index(())]} has no rows to cut into shards"
    elif not hasattr(_fsdp().FSDPModule, "set_reduce_scatter_unused_params"):
        cause = f"this torch {torch.__version__} is too old for shards"
    if cause:
        raise UnsupportedModelError(f"{cause}.", remedy="Choose a device that the whole model fits, or another run.")


def in_shards(
    named: str, devices: Sequence[torch.device], layout: Layout, vocabulary: int, manifest: Manifest, bits: int = 16
) -> bool:
    """Whether the model is to lie in shards on these devices, which their owner `named`: by its choice, or where one of them
    does not fit the whole. Raises DeviceError, UnsupportedModelError, or ModelTooLargeError."""
    if is_sharded(named):
        if len(devices) == 1:
            raise DeviceError(f"{named} asks for shards, and there is one device.", remedy="Name several, or no shards.")
        check_shards(manifest, layout, bits)
        return True
    try:
        for device in dict.fromkeys(devices):
            place = Place(device, bits=bits, processes=devices.count(device))
            check_memory(layout, vocabulary, manifest, 0, place)
    except ModelTooLargeError as error:
        if len(devices) == 1:
            raise
        try:
            check_shards(manifest, layout, bits)
        except UnsupportedModelError:
            raise error from None
        return True
    return False


def _fsdp() -> Any:  # noqa: ANN401 - older releases of torch lack what its types would name
    from torch.distributed import fsdp

    return fsdp


class Area:
    """The shared memory: flat, float32, of the trained elements. `fragments` are brought one by one."""

    def __init__(self, group: Group, size: int, fragments: Iterable[slice]) -> None:
        self._group = group
        self._parts = list(fragments)
        self._outdated: list[slice] = []
        os.ftruncate(group.area, 4 * size)
        self.flat = torch.frombuffer(mmap.mmap(group.area, 4 * size), dtype=torch.float32)

    def own(self, whole: Tensor) -> Tensor:
        """This device's rows of a tensor."""
        rows = whole.chunk(self._group.count)
        return rows[self._group.rank] if self._group.rank < len(rows) else whole[:0]

    def _meeting(self, rows: Rows, span: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """What lies in `span` of the area and of these rows; whole tensors would lie there one behind another."""
        end = 0
        for shape, own in rows:
            begin, end = end, end + shape.numel()
            here = self.own(self.flat[begin:end].view(shape))
            first = here.storage_offset()
            start, stop = max(first, span.start), min(first + here.numel(), span.stop)
            if start < stop:
                yield self.flat[start:stop], own.view(-1)[start - first : stop - first]

    def give(self, rows: Rows, span: slice) -> None:
        """Put these rows there; all have when it returns."""
        for there, own in self._meeting(rows, span):
            there.copy_(own)
        self._group.meet()

    def take(self, rows: Rows, span: slice) -> None:
        """Have these rows from there; all have when it returns."""
        for there, own in self._meeting(rows, span):
            own.copy_(there)
        self._group.meet()

    def bring(self, rows: Rows, span: slice) -> None:
        """As the leader: have everybody put theta there, of which these are the rows, unless it is there."""
        for part in [one for one in self._outdated if one.start < span.stop and span.start < one.stop]:
            self._group.tell(Give("", part.start, part.stop))
            self.give(rows, part)
            self._outdated.remove(part)

    def gather(self, kind: str, rows: Sequence[tuple[torch.Size, Tensor]]) -> list[Tensor]:
        """As the leader: the whole tensors of this `kind` of the optimizer's state, copied."""
        self._group.tell(Give(kind, 0, len(self.flat)))
        self.give(rows, slice(0, len(self.flat)))
        self.outdate()
        sizes = [shape.numel() for shape, _ in rows]
        parts = torch.split(self.flat[: sum(sizes)], sizes) if rows else ()
        return [part.clone().view(shape) for part, (shape, _) in zip(parts, rows, strict=True)]

    def outdate(self) -> None:
        """Theta is elsewhere now."""
        self._outdated = list(self._parts)


class ShardedPart(DevicePart):
    """A device's shards of the run's initial weights; `theta` is the area's."""

    _area: Area
    _rows: list[tuple[torch.Size, Tensor]]

    def _build(
        self,
        manifest: Manifest,
        config: Any,  # noqa: ANN401 - transformers has no common typed base
        place: Place,
        at_once: int,
        *,
        leads: bool,
    ) -> None:
        assert self._group is not None
        check_shards(manifest, self.layout, place.bits)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which torch computes shards on
        self._area = Area(self._group, self.layout.size, [fragment.span for fragment in self.plan.fragments])
        self.theta, kind, source = self._area.flat, fast_kind(self.device), None
        if leads:
            source = initial(manifest, config, place.base, kind)
            flatten(dict(source.named_parameters()), self.layout, self.theta)
        model = bare(config, manifest.adapter)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(kind)
        self.model = _shard(model, self.device, self._group.count)
        held = dict(self.model.named_parameters())
        for name, buffer in self.model.named_buffers():
            if source is not None:
                buffer.copy_(source.get_buffer(name))
            self._group.spread(buffer)
        for name, parameter in held.items():
            if not parameter.requires_grad:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                if source is not None:
                    whole.copy_(source.get_parameter(name))
                self._group.spread(whole)
                _rows(parameter).copy_(self._area.own(whole))
        shapes = map(torch.Size, self.layout.shapes)
        self._rows = [(shape, _rows(held[name])) for name, shape in zip(self.layout.names, shapes, strict=True)]
        self._group.meet()  # all see the leader's theta
        self.take(slice(0, self.layout.size))
        with lost():
            self.objective = objective_of(manifest, self.model)
        self._reshard()
        at_once = self._group.least(at_once)
        self.inner = ShardedInner(self.model, manifest, self.device, at_once, self.objective, self._group, self._area)
        self._scale_loss()
        if place.spares_memory:
            self.inner.spare_memory()

    def bring(self, span: slice) -> None:
        self._area.bring(self._rows, span)

    def take(self, span: slice) -> None:
        self._area.take(self._rows, span)

    def give(self, kind: str, span: slice) -> None:
        assert isinstance(self.inner, ShardedInner)
        self._area.give(self.inner.rows(kind) if kind else self._rows, span)

    def step(self, windows: Tensor, rate: float, weight: int | None = None, idle: int = 0) -> None:
        super().step(windows, rate, weight, idle)
        self._area.outdate()

    def evaluate(self, windows: Tensor, idle: int = 0) -> float:
        with lost():
            loss = super().evaluate(windows, idle)
        self._reshard()
        return loss

    def _reshard(self) -> None:
        """A forward pass alone leaves some parameters whole, as they were."""
        self.model.reshard()  # type: ignore[operator] # of FSDPModule


class ShardedInner(Inner):
    """Takes inner steps on shards, all devices together."""

    def __init__(
        self,
        model: torch.nn.Module,
        manifest: Manifest,
        device: torch.device,
        at_once: int,
        objective: Objective,
        group: Group,
        area: Area,
    ) -> None:
        self._group, self._area = group, area
        super().__init__(model, manifest, device, at_once, objective)

    def _here(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
        here = {name: _rows(parameter) for name, parameter in parameters.items()}
        self._whole = {id(here[name]): parameter for name, parameter in parameters.items()}
        return here

    def _make_muon(self, matrices: list[Tensor], shapes: list[torch.Size]) -> Muon:
        return ShardedMuon(matrices, shapes, self._group)

    def _differentiate(self, windows: Tensor, weight: int, idle: int = 0) -> Tensor | None:
        with lost():
            return super()._differentiate(windows, weight, idle)

    def _compute_less(self) -> None:
        """The others wait within a layer for this device, and cannot begin again."""
        raise ModelTooLargeError(f"memory ran out with {self.at_once} windows at a time.")

    def _gather(self, total: Tensor) -> tuple[Tensor, Tensor]:
        for own in self._all:
            gradient, self._whole[id(own)].grad = self._whole[id(own)].grad, None
            own.grad = None if gradient is None else _rows(gradient)
        self._fill()
        squares = torch.nn.utils.get_total_norm([own.grad for own in self._all if own.grad is not None]).square()
        sums = torch.stack([squares, total])
        self._group.add(sums)
        norm = sums[0].sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._all, self._settings.clip, norm)
        return sums[1].clone(), norm

    def _clear(self) -> None:
        super()._clear()
        for own in self._all:
            own.grad = None

    def rows(self, kind: str) -> list[tuple[torch.Size, Tensor]]:
        """Those of one of the optimizer's KINDS of state."""
        of = self._all[len(self._parameters) :] if kind in OF_MATRICES else self._parameters
        states = self.state(kind)
        shapes = [self._whole[id(of[index])].shape for index in states]
        if kind == SQUARES:
            shapes = [torch.Size(lines(shape, shape[0])) for shape in shapes]
        return list(zip(shapes, states.values(), strict=True))

    def moments(self) -> dict[str, Tensor]:
        """As one device has them; the leader's alone."""
        gathered = {kind: zip(self.state(kind), self._area.gather(kind, self.rows(kind)), strict=True) for kind in KINDS}
        return {f"{kind}.{index}": tensor for kind, found in gathered.items() for index, tensor in found} | self._scale_state()

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        everybodys = {LOSS_SCALE, *(f"{SQUARES}.{index}" for index, one in self.state(SQUARES).items() if one.size(1) > 1)}
        own = {name: tensor if name in everybodys else self._area.own(tensor) for name, tensor in moments.items()}
        super().restore(own, steps)


class ShardedMuon(Muon):
    """Of rows of matrices: each matrix comes together on one device, which computes its update."""

    def __init__(self, matrices: Sequence[Tensor], shapes: Sequence[torch.Size], group: Group) -> None:
        super().__init__(matrices, shapes)
        self._group = group

    def _orthogonal(self, stack: Tensor, rows: int) -> Tensor:
        group, (count, own, columns) = self._group, stack.shape
        heights = [len(part) for part in torch.arange(rows).chunk(group.count)]
        heights += [0] * (group.count - len(heights))
        counts = [len(part) for part in torch.arange(count).tensor_split(group.count)]
        here = counts[group.rank]  # matrices that come together on this device
        out, back = [one * own * columns for one in counts], [here * height * columns for height in heights]
        found = torch.split(group.trade(stack.reshape(-1), out, back), back)
        whole = torch.cat([part.view(here, height, columns) for part, height in zip(found, heights, strict=True)], 1)
        updates = orthogonal(whole).to(stack.dtype) if here else whole
        parts = torch.cat([part.reshape(-1) for part in torch.split(updates, heights, 1)])
        return group.trade(parts, back, out).view(stack.shape)

    def _columns(self, stack: Tensor, rows: int) -> Tensor:
        found = super()._columns(stack, rows)
        self._group.add(found)
        return found


def _rows(tensor: Tensor) -> Tensor:
    """This device's of a parameter or a gradient, in place."""
    own: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined] # of DTensor
    return own


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those that a model has in a row."""
    for child in model.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)


def _shard(model: torch.nn.Module, device: torch.device, count: int) -> torch.nn.Module:
    """`model`, which has no values, with shards on `device` that have none yet."""
    from torch.distributed.device_mesh import DeviceMesh

    fsdp, mesh = _fsdp(), DeviceMesh(device.type, list(range(count)))
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for layer in (*_layers(model), model):
        fsdp.fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(1.0)  # type: ignore[operator] # windows are weighed already
        layer.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator] # an expert may have no token on one device
    model.to_empty(device=device)
    for first, *others in names.values():  # which takes weights apart that are tied
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(first))
    return model
