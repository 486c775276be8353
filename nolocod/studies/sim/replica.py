"""A replica of a few numbers, exact to the last bit: the product's outer step on float64, and inner steps that are the
passing of virtual time.

The rule: it is outer.sides.Trainer to the product, and an open book to the simulation, whose oracle works out by another
formula what every outer step must come to. theta moves by a draw for each inner step; those taken while an exchange is
under way are kept when it is merged.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import trio

from nolocod.errors import RejectedTensorError
from nolocod.proto.types import CHUNK_SIZE, Applied, Inspection, Standing, describe, parts_in, whose_turn
from nolocod.studies.sim.clock import sleep, sleep_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from nolocod.proto.types import Description

STEP_TOKENS = 512
SIZE = 32
"""Weights of a replica, unless told otherwise."""


@dataclass(frozen=True)
class OuterSettings:
    """The outer step's settings (manifest: `[outer]`), and how long inner steps take."""

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    turns: int = 4
    """Parts of the weights that are exchanged one after another; what follows, and the rounds of a plan, count turns."""
    inner_steps: int = 20
    step_seconds: float = 1.0


class MemoryBox:
    """proto.types.Box in ordinary memory."""

    def __init__(self, size: int) -> None:
        self.content = bytearray(size)

    @property
    def size(self) -> int:
        return len(self.content)

    def view(self, start: int, length: int) -> memoryview:
        return memoryview(self.content)[start : start + length]

    place = view

    def release(self, start: int, length: int) -> None:
        """Nothing is mapped."""


@dataclass(frozen=True)
class State:
    """phi, delta and theta at one moment."""

    phi: tuple[float, ...]
    delta: tuple[float, ...]
    theta: tuple[float, ...]


class SimReplica:
    """outer.sides.Trainer. `applied` is told every outer step: the states before and after, and whether it was paired."""

    codec = "float64/1"
    can_enlarge = True

    def __init__(
        self, outer: OuterSettings, speed: float, rng: random.Random, size: int = SIZE, chunk: int = CHUNK_SIZE
    ) -> None:
        """`speed`: seconds of an inner step with the run's tokens, of this node."""
        self.outer = outer
        self.speed = speed
        self.state = State(*[(0.0,) * size] * 3)
        self.round = 0
        self.tokens = 0
        self.outbox, self.inbox = MemoryBox(8 * size), MemoryBox(8 * size)
        self.applied: Callable[[State, State, bool], None] = lambda _before, _after, _paired: None
        self.captured: State | None = None
        self._chunk = chunk
        self._rng = rng
        self.times = 1
        self._began = trio.current_time()  # of inner steps, had they all been as large as they are now
        self._last = [0] * outer.turns  # of each part: how many inner steps were taken before its last outer step
        self._trained = 0  # inner steps that are in theta
        self._captured_steps = self._subject = 0
        self._inspected: tuple[float, ...] | None = None
        self._commands = trio.Lock()  # one after the other, as over the trainer's pipe

    # --- inner steps ------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        return Standing(self.round, self.tokens, 1.0, self.step_seconds)

    @property
    def step_seconds(self) -> float:
        return self.times * self.speed

    @property
    def steps_since_outer(self) -> int:
        return self._steps - max(self._last)

    @property
    def _steps(self) -> int:
        return int((trio.current_time() - self._began) / self.step_seconds + 1e-9)

    async def enlarge(self, times: int) -> None:
        """From the next inner step on: the one under way is as long as it was."""
        await trio.lowlevel.checkpoint()
        if times != self.times:
            self._train()
            done = self._trained + 1
            ends = self._end_of(done)
            self.times = times
            self._began = ends - done * self.step_seconds

    async def wait_steps(self, count: int) -> None:
        await trio.lowlevel.checkpoint()
        while self.steps_since_outer < count:
            due = self._end_of(max(self._last) + count)
            await sleep_until(max(due, trio.current_time() + self.step_seconds))

    def _end_of(self, number: int) -> float:
        """When so many inner steps are done."""
        return self._began + number * self.step_seconds

    def _train(self) -> None:
        """Bring theta to the step that the clock has come to."""
        steps = self._steps - self._trained
        if steps > 0:
            self._advance(steps)
            self._trained += steps

    def _advance(self, steps: int) -> None:
        spread = 0.01 * math.sqrt(steps)
        self.state = replace(self.state, theta=tuple(weight + self._rng.gauss(0.001, spread) for weight in self.state.theta))
        self.tokens += STEP_TOKENS * self.times * steps

    def restore(self, state: State, number: int, tokens: int) -> None:
        """Go on from a checkpoint of round `number`."""
        self.state, self.round, self.tokens = state, number, tokens

    def take_over(self, donor: Self) -> None:
        """Begin where `donor` is, as a newcomer does with weights that it fetched."""
        self.restore(replace(donor.state, delta=(0.0,) * len(self.state.phi), theta=donor.state.phi), donor.round, 0)

    # --- outer steps ------------------------------------------------------------------------------------

    def subject(self, count: int) -> int:
        return whose_turn([self._steps - last for last in self._last], count)

    @property
    def among(self) -> range:
        """The parts that the last outer step was about, or the one under way is."""
        return parts_in(self._subject, self.outer.turns)

    @property
    def span(self) -> slice:
        """Their weights."""
        size, turns = len(self.state.phi), self.outer.turns
        return slice(size * self.among.start // turns, size * self.among.stop // turns)

    async def _wait_due(self, after: int = 0) -> None:
        """Wait for the end of the inner step that is under way, and of as many as make `after` since the last outer step."""
        async with self._commands:
            await sleep_until(self._end_of(max(self._steps + 1, max(self._last) + after)))

    async def capture(self, subject: int, after: int = 0) -> Description:
        await self._wait_due(after)
        self._train()
        self.captured, self._subject = self.state, subject
        self._captured_steps = self._trained
        return self._write(self.captured)

    def _write(self, state: State) -> Description:
        """Our message about `state`, into the outbox."""
        message = self._message(state)
        packed = struct.pack(f"<{len(message)}d", *message)
        self.outbox.content[: len(packed)] = packed
        with memoryview(self.outbox.content) as content:
            return describe(content[: len(packed)], self._chunk)

    def _message(self, state: State) -> tuple[float, ...]:
        outer, weights = self.outer, zip(state.theta[self.span], state.phi[self.span], strict=True)
        return tuple(outer.beta * (t - p) + outer.gamma * p for t, p in weights)

    async def inspect(self, *, probation: bool) -> Inspection:
        async with self._commands:
            await sleep(self.step_seconds / 4)
        if self.captured is None:
            raise AssertionError("inspected without a capture")
        return self._look(self.captured, probation=probation)

    def _look(self, state: State, *, probation: bool) -> Inspection:
        """At the inbox."""
        found = struct.unpack_from(f"<{len(state.phi[self.span])}d", self.inbox.content)
        if not all(map(math.isfinite, found)):
            raise RejectedTensorError("it holds values that are not finite.")
        self._inspected = found
        return Inspection(math.dist(self._message(state), found) / self.outer.gamma)

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        before = self.captured
        if before is None:
            raise AssertionError("applied without a capture")
        await self._wait_due()
        self._train()
        return self._stepped(before, self._pair(before, run_round, skipped), paired=True)

    async def solo(self, run_round: int, subject: int, after: int = 0) -> Applied:
        await self._wait_due(after)
        self._train()
        before, self._subject = self.state, subject
        self._captured_steps = self._trained
        return self._stepped(before, self._alone(before, run_round), paired=False)

    def _pair(self, before: State, run_round: int, skipped: bytes) -> Applied:
        """The outer step with the message in the inbox."""
        own, message = self._message(before), self._inspected
        if message is None:
            raise AssertionError("applied without an inspected message")
        self._step(before, [(a + b) / 2 for a, b in zip(own, message, strict=True)])
        return Applied(max(self.round + len(self.among), run_round), 0, math.dist(own, message) / self.outer.gamma, 0.0)

    def _alone(self, before: State, run_round: int) -> Applied:
        self._step(before, list(self._message(before)))
        return Applied(max(self.round + len(self.among), run_round), 0, None, 0.0)

    def _step(self, before: State, mean: list[float]) -> None:
        outer, span = self.outer, self.span
        old = zip(before.delta[span], mean, before.phi[span], strict=True)
        delta = tuple(outer.alpha * d + m - outer.gamma * p for d, m, p in old)
        phi = tuple(p + d for p, d in zip(before.phi[span], delta, strict=True))
        since = (now - then for now, then in zip(self.state.theta[span], before.theta[span], strict=True))
        theta = tuple(p + s for p, s in zip(phi, since, strict=True))
        state = self.state
        parts = (state.phi, phi), (state.delta, delta), (state.theta, theta)
        self.state = State(*((*whole[: span.start], *part, *whole[span.stop :]) for whole, part in parts))

    def _stepped(self, before: State, applied: Applied, *, paired: bool) -> Applied:
        """The outer step is taken."""
        self.round, taken = applied.round, self._captured_steps - max(self._last)
        for part in self.among:
            self._last[part] = self._captured_steps
        self.applied(before, self.state, paired)
        self._forget()
        return replace(applied, inner_steps=taken, seconds=0.0)

    async def discard(self) -> None:
        await trio.lowlevel.checkpoint()
        self._forget()

    def _forget(self) -> None:
        self.captured = self._inspected = None
