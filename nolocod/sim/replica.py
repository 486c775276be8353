"""A replica of a few numbers, exact to the last bit: the product's outer step on float64, and inner steps that are the
passing of virtual time.

The rule: it is rounds.Trainer to the product, and an open book to the simulation, whose oracle works out by another
formula what every outer step must come to. theta moves by a draw for each inner step; those taken while an exchange is
under way are kept when it is merged.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RejectedTensorError
from nolocod.sim.clock import sleep, sleep_until
from nolocod.terms import CHUNK_SIZE, Applied, Inspection, Standing, Subject, describe

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from nolocod.terms import Description

SIZE = 8
"""Weights of a replica, unless told otherwise."""


@dataclass(frozen=True)
class Course:
    """The outer step's settings (manifest: `[outer]`), and how long inner steps take."""

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    inner_steps: int = 20
    step_seconds: float = 1.0


class MemoryBox:
    """terms.Box in ordinary memory."""

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
    """rounds.Trainer. `applied` is told every outer step: the state before, the partner's message or None, and the state
    after, theta as it would be had nothing been trained since the snapshot."""

    def __init__(self, course: Course, speed: float, rng: random.Random, size: int = SIZE, chunk: int = CHUNK_SIZE) -> None:
        """`speed`: seconds of an inner step, of this node."""
        self.course = course
        self.speed = speed
        self.phi = [0.0] * size
        self.delta = [0.0] * size
        self.theta = [0.0] * size
        self.round = 0
        self.tokens = 0
        self.outbox, self.inbox = MemoryBox(8 * size), MemoryBox(8 * size)
        self.applied: Callable[[State, tuple[float, ...] | None, State], None] = lambda _before, _message, _after: None
        self.waits: Callable[[], bool] = lambda: False
        """Whether a boundary waits for another node to offer."""
        self.snapshot_out: State | None = None
        self.unheard_until = 0.0
        """The network process stands still, and hears no answer before that."""
        self._chunk = chunk
        self._rng = rng
        self._began = trio.current_time()  # when the inner steps began that count since the last outer step
        self._trained = 0  # of those, how many are in theta
        self._snapshot_steps = 0
        self._inspected: tuple[float, ...] | None = None
        self._commands = trio.Lock()  # one after the other, as over the trainer's pipe

    # --- inner steps ------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        return Standing(self.round, self.tokens, 1.0)

    @property
    def steps_since_outer(self) -> int:
        return int((trio.current_time() - self._began) / self.speed + 1e-9)

    async def wait_boundary(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.steps_since_outer < self.course.inner_steps or self.waits():
            await sleep_until(max(self._began + self.course.inner_steps * self.speed, trio.current_time() + self.speed))

    def _train(self) -> None:
        """Bring theta to the step that the clock has come to."""
        steps = self.steps_since_outer
        if steps > self._trained:
            spread = 0.01 * math.sqrt(steps - self._trained)
            self.theta = [weight + self._rng.gauss(0.001, spread) for weight in self.theta]
            self.tokens += 512 * (steps - self._trained)
            self._trained = steps

    def restore(self, state: State, number: int, tokens: int) -> None:
        """Go on from a checkpoint of round `number`."""
        self.phi, self.delta, self.theta = list(state.phi), list(state.delta), list(state.theta)
        self.round, self.tokens = number, tokens

    async def _heard(self) -> None:
        if self.unheard_until > trio.current_time():
            await sleep_until(self.unheard_until)

    # --- outer steps ------------------------------------------------------------------------------------

    @property
    def subject(self) -> Subject:
        return Subject()

    def dense_due(self, fragment: int) -> bool:
        return True

    async def snapshot(self, subject: Subject) -> Description:
        """At the end of the inner step that is under way, as the trainer does it."""
        async with self._commands:
            await sleep(self.speed / 2)
        self._train()
        self.snapshot_out = State(tuple(self.phi), tuple(self.delta), tuple(self.theta))
        self._snapshot_steps = self._trained
        message = self._message(self.snapshot_out)
        self.outbox.content[:] = struct.pack(f"<{len(message)}d", *message)
        await self._heard()
        with memoryview(self.outbox.content) as content:
            return describe(content, self._chunk)

    def _message(self, state: State) -> tuple[float, ...]:
        course = self.course
        return tuple(course.beta * (t - p) + course.gamma * p for t, p in zip(state.theta, state.phi, strict=True))

    async def inspect(self, *, probation: bool) -> Inspection:
        async with self._commands:
            await sleep(self.speed / 4)
        await self._heard()
        found = struct.unpack(f"<{len(self.phi)}d", self.inbox.content)
        if not all(map(math.isfinite, found)):
            raise RejectedTensorError("it holds values that are not finite.")
        self._inspected = found
        if self.snapshot_out is None:
            raise AssertionError("inspected without a snapshot")
        own = self._message(self.snapshot_out)
        return Inspection(math.dist(own, found) / self.course.gamma)

    async def apply(self, partner_round: int, skipped: bytes) -> Applied:
        await self._heard()
        before, message = self.snapshot_out, self._inspected
        if before is None or message is None:
            raise AssertionError("applied without an inspected message")
        own = self._message(before)
        total = [(a + b) / 2 for a, b in zip(own, message, strict=True)]
        return self._step(before, total, message, max(self.round + 1, partner_round))

    async def solo(self) -> Applied:
        await trio.lowlevel.checkpoint()
        self._train()
        before = State(tuple(self.phi), tuple(self.delta), tuple(self.theta))
        self._snapshot_steps = self._trained
        return self._step(before, list(self._message(before)), None, self.round + 1)

    def _step(self, before: State, mean: list[float], message: tuple[float, ...] | None, number: int) -> Applied:
        course = self.course
        self._train()
        self.delta = [course.alpha * d + m - course.gamma * p for d, m, p in zip(before.delta, mean, before.phi, strict=True)]
        self.phi = [p + d for p, d in zip(before.phi, self.delta, strict=True)]
        since = [now - then for now, then in zip(self.theta, before.theta, strict=True)]
        self.theta = [p + s for p, s in zip(self.phi, since, strict=True)]
        self.round = number
        taken = self._snapshot_steps
        self._began += taken * self.speed
        self._trained -= taken
        self.applied(before, message, State(tuple(self.phi), tuple(self.delta), tuple(self.phi)))
        spread = None if message is None else math.dist(self._message(before), message) / course.gamma
        self._forget()
        return Applied(number, taken, spread, 0.0)

    async def discard(self) -> None:
        await trio.lowlevel.checkpoint()
        self._forget()

    def _forget(self) -> None:
        self.snapshot_out = self._inspected = None
