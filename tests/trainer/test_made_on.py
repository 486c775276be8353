"""Where messages are made: many blocks at one go, in another memory, they come out as on the processor."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import blake3
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nolocod.outer.codec import kernels
from nolocod.outer.codec.blocks import BLOCK, bytes_of, fragments_of
from nolocod.outer.codec.modulo import Modulo8
from nolocod.run.manifest import Codec, Outer
from nolocod.trainer.capture import Capture, Plan, Weights
from nolocod.trainer.faster import WORTH, chosen, faster
from nolocod.trainer.made_on import COMPILED, PROCESSOR, MadeOn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


OUTER = Outer(alpha=0.5, beta=0.7, gamma=0.9)
SIZES = (1500, 3, 7 * BLOCK + 4000, 130, 130)
FAR = torch.device("cpu", 0)
"""The processor's memory by another name: torch copies what is to go there, as to a GPU."""


class Node:
    def __init__(self, codec: Codec, seed: int, made_on: MadeOn, common: torch.Tensor) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.plan = Plan(codec, OUTER, fragments_of(SIZES, 1))
        phi = common + self.random(1e-3)
        self.weights = Weights.of(phi.clone(), phi, self.random(1e-3), self.plan.fragments, made_on=made_on)
        self.weights.distance.fill_(1e-2)
        self.weights.distance[4] = float("nan")  # travels as bfloat16, between others in a byte
        self.weights.distance[7] = 1e-6  # is farther than that, and skipped
        self.box, self.inbox = (torch.full((self.plan.box_size,), 77, dtype=torch.uint8) for _ in range(2))

    def random(self, scale: float) -> torch.Tensor:
        return torch.randn(sum(SIZES), generator=self.generator) * scale

    def train(self) -> None:
        self.weights.theta.add_(self.random(1e-3))

    def write(self, seed: int) -> None:
        self.capture = Capture(self.plan, self.weights, 0, seed)
        self.capture.keep()
        self.capture.start()
        self.size = self.capture.write(self.box).size


def exchanges(codec: Codec, made_on: Sequence[MadeOn], times: int = 3, weight: float = 1.0) -> list[object]:
    """All that comes out of some between two who make their messages there, to the bit."""
    return [
        blake3.blake3(bytes_of(one.contiguous())).hexdigest() if isinstance(one, torch.Tensor) else one
        for one in outcomes(codec, made_on, times, weight)
    ]


def outcomes(codec: Codec, made_on: Sequence[MadeOn], times: int, weight: float) -> list[object]:
    common = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1)) * 0.02
    nodes = [Node(codec, 2 + number, one, common) for number, one in enumerate(made_on)]
    found: list[object] = []
    for turn in range(times):
        for number, node in enumerate(nodes):
            node.train()
            node.write(2 * turn + number)
        for node, other in (nodes, nodes[::-1]):
            node.inbox[: other.size].copy_(other.box[: other.size])
        skipped = [node.capture.inspect(node.inbox) for node in nodes]
        for node, theirs in zip(nodes, skipped[::-1], strict=True):
            node.capture.weight = weight
            node.capture.step(node.inbox, theirs)
            node.capture.merge(trained_on=True)
            tensors = (node.box[: node.size], node.weights.theta, node.weights.phi, node.weights.delta, node.weights.distance)
            found += [one.clone() for one in tensors]
        found += [skipped, [node.capture.spread for node in nodes]]
    return found


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_it_all_comes_out_the_same(at_once: int, weight: float) -> None:
    usual = exchanges("modulo8", (PROCESSOR, PROCESSOR), weight=weight)
    assert exchanges("modulo8", (PROCESSOR, MadeOn(FAR, at_once)), weight=weight) == usual
    assert exchanges("modulo8", (MadeOn(FAR, at_once), MadeOn(FAR, 2)), weight=weight) == usual
    assert any(usual[10]), "a block was skipped"


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_of_codecs_that_only_round_too(codec: Codec) -> None:
    assert exchanges(codec, (MadeOn(FAR, 3), PROCESSOR)) == exchanges(codec, (PROCESSOR, PROCESSOR))


class Filling(MadeOn):
    """Has no memory left at every so many askings for some."""

    def __init__(self, every: int) -> None:
        super().__init__(FAR, 3)
        self.__dict__.update(every=every, asked=0, failed=0)

    def take(self, flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        self.__dict__["asked"] += 1
        if self.__dict__["asked"] % self.__dict__["every"] == 0:
            self.__dict__["failed"] += 1
            raise torch.OutOfMemoryError("inner steps go on there")
        return super().take(flat, shape)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 7, 11])
def test_where_memory_runs_out_the_processor_goes_on(every: int) -> None:
    """Within a message, an inspection and a step that both have committed; in a capture it is asked no more then."""
    filling, captures = Filling(every), 3
    assert exchanges("modulo8", (PROCESSOR, filling), captures) == exchanges("modulo8", (PROCESSOR, PROCESSOR), captures)
    assert 0 < filling.__dict__["failed"] <= captures
    assert every > 1 or filling.__dict__["asked"] == captures


class Watched(MadeOn):
    """Says whether it is open."""

    @contextmanager
    def open(self) -> Iterator[None]:
        self.__dict__["is_open"] = True
        yield
        self.__dict__["is_open"] = False


class Used(TorchFunctionMode):
    """Whether all that is asked of the device there is asked while it is open."""

    def __init__(self, watched: MadeOn) -> None:
        self._watched = watched
        self.asked = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if self._watched.device in (*args, *(kwargs or {}).values()):
            assert self._watched.__dict__.get("is_open"), f"{func} outside of open"
            self.asked += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_made_there_outside_of_its_own_stream() -> None:
    """On the stream of training it could lie where inner steps still compute, and wait for them."""
    watched = Watched(FAR, 3)
    with Used(watched) as used:
        exchanges("modulo8", (watched, PROCESSOR), 1)
    assert used.asked > 10


# --- which is chosen


def ticking(*seconds: float) -> Callable[[], float]:
    """A clock for `chosen`: what each of its parts takes, on the processor and there."""
    near, there = seconds
    passed = 0.0
    calls = count()

    def now() -> float:
        nonlocal passed
        call = next(calls)
        if call % 2:
            passed += near if call // 2 % 2 == 0 else there
        return passed

    return now


def test_the_faster_one_makes_messages() -> None:
    far, plan = MadeOn(FAR, 2), Plan("modulo8", OUTER, ())
    assert chosen(plan, far, clock=ticking(2.0, 1.0)) is far
    assert chosen(plan, far, clock=ticking(1.0, 2.0)) is PROCESSOR


def test_one_that_has_no_memory_left_never_does() -> None:
    class Full(MadeOn):
        def take(self, flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory left")

    assert chosen(Plan("modulo8", OUTER, ()), Full(FAR, 2), clock=ticking(2.0, 1.0)) is PROCESSOR


@pytest.mark.parametrize("name", ["own", "other"])
@pytest.mark.parametrize("error", [1e-4, math.nan])
def test_nor_does_one_that_decodes_otherwise(monkeypatch: pytest.MonkeyPatch, name: str, error: float) -> None:
    right = getattr(Modulo8, name)

    def wrong(coder: Modulo8, *args: object, **options: object) -> object:
        found = right(coder, *args, **options)
        if coder.device == FAR:
            (found if name == "own" else found[0])[-1, -1] += error
        return found

    monkeypatch.setattr(Modulo8, name, wrong)
    assert chosen(Plan("modulo8", OUTER, ()), MadeOn(FAR, 2), clock=ticking(2.0, 1.0)) is PROCESSOR


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8", "modulo4"])
def test_without_a_gpu_it_is_the_processor_which_has_loops_of_its_own_for_large_models(codec: Codec) -> None:
    for size, large in ((WORTH - 1, False), (WORTH, True)):
        wanted = COMPILED if large and codec in ("modulo8", "modulo4") else PROCESSOR
        assert faster(Plan(codec, OUTER, fragments_of((size,), 3)), torch.device("cpu")) is wanted
    assert str(COMPILED) == "cpu (compiled)"


@pytest.mark.parametrize("failure", [ImportError("no numba"), TypeError("of a compiler"), None])
def test_where_they_do_not_work_torch_does_it(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> None:
    """No compiler, one that fails, or loops that compute otherwise."""

    def take_step(phi: Any, *_: object) -> None:  # noqa: ANN401 - an array
        if failure is not None:
            raise failure
        phi += 1e-4

    monkeypatch.setattr(kernels, "take_step", take_step)
    assert faster(Plan("modulo8", OUTER, fragments_of((WORTH,), 1)), torch.device("cpu")) is PROCESSOR


@pytest.mark.parametrize("codec", ["modulo8", "modulo4"])
def test_loops_and_torch_make_the_same_of_what_is_exchanged(codec: Codec) -> None:
    """Rounding apart: slow weights and momentum after three exchanges, and which blocks were skipped."""
    by_torch, by_loops = (outcomes(codec, (made_on,) * 2, 3, 0.4) for made_on in (PROCESSOR, COMPILED))
    for one, other in zip(by_torch, by_loops, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            known = ~one.float().isnan()
            assert torch.equal(known, ~other.float().isnan())
            apart = (one.float() - other.float())[known].abs()
            assert (apart > 1e-7).float().mean() < 1e-2, "a rounding now and then went the other way"
        else:
            assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("codec", ["modulo8", "modulo4"])
def test_loops_do_what_there_is_to_do_in_a_byte_and_leave_the_rest(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[str] = Counter()
    for name in ("keep", "encode", "compare", "take_step", "add"):
        real = getattr(kernels, name)

        def counted(*given: object, name: str = name, real: Callable[..., object] = real) -> object:
            done[name] += 1
            return real(*given)

        monkeypatch.setattr(kernels, name, counted)
    exchanges(codec, (COMPILED, COMPILED), 1)
    assert set(done) == {"keep", "encode", "compare", "take_step", "add"}
    assert done["take_step"] < done["encode"], "some blocks travel in two bytes"
    assert done["keep"] == done["add"] == 2 * len(Plan(codec, OUTER, fragments_of(SIZES, 1)).fragments[0].blocks)


@pytest.mark.gpu
def test_a_gpu_decodes_what_the_processor_does() -> None:
    there = MadeOn(torch.device("cuda"), 16)
    assert chosen(Plan("modulo8", OUTER, ()), there, clock=ticking(2.0, 1.0)) is there
