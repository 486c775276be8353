"""What can befall a node at one moment: the columns of the fault matrix.

The rule: each fault is struck in several ways (`WAYS`), none of which asks what the product would like. "own" is the
node whose state machine entered the state, "other" its partner; "own +7" is the eighth byte that own writes from then on,
on the stream that it uses then, or on the next one if it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from nolocod.studies.sim.network import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.studies.sim.network import End, Kind


class Victim(Protocol):
    """A node, as far as faults reach into it."""

    clock_ahead: float

    def freeze(self, seconds: float) -> None:
        """Its network process stands still, as under SIGSTOP; the trainer, another process, goes on."""
        ...

    def fill_disk(self, seconds: float) -> None: ...
    def cut_off(self, seconds: float) -> None:
        """Nothing passes between it and the others, who are told nothing."""
        ...


class Scene(Protocol):
    """Where a fault strikes."""

    @property
    def own(self) -> Victim: ...

    def on_stream(self, side: str, hang: Callable[[End], None]) -> None:
        """Call `hang` with the end that `side` ("own" or "other") writes to, now or once there is one."""
        ...

    def kill(self, restart: float) -> None:
        """SIGKILL own; what starts it again does so after `restart` seconds, from its disk."""
        ...

    def again(self, delay: float) -> None:
        """What own wrote on this stream comes once more after `delay` seconds, on a new stream."""
        ...

    def lasts(self, seconds: float) -> None:
        """The fault is over after so long."""
        ...


@dataclass(frozen=True)
class Way:
    """One way in which a fault strikes."""

    fault: str
    name: str
    strike: Callable[[Scene], None]


def _kill(restart: float, scene: Scene) -> None:
    scene.kill(restart)
    scene.lasts(restart)


def _freeze(seconds: float, scene: Scene) -> None:
    scene.own.freeze(seconds)
    scene.lasts(seconds)


def _cut_off(seconds: float, scene: Scene) -> None:
    scene.own.cut_off(seconds)
    scene.lasts(seconds)


def _fill(seconds: float, scene: Scene) -> None:
    scene.own.fill_disk(seconds)
    scene.lasts(seconds)


def _turn_clock(seconds: float, scene: Scene) -> None:
    scene.own.clock_ahead += seconds


def _break(scene: Scene) -> None:
    scene.on_stream("own", lambda end: end.cut())


def _hang(kind: Kind, side: str, after: int, seconds: float, scene: Scene) -> None:
    scene.on_stream(side, lambda end: end.faults.append(Fault(kind, end.written + after, seconds)))
    scene.lasts(seconds)


def _again(delay: float, scene: Scene) -> None:
    scene.again(delay)
    scene.lasts(delay)


def _on_streams(fault: str, kind: Kind, *points: tuple[str, int], seconds: float = 0.0) -> list[Way]:
    lasting = f", {seconds:.0f} s" if seconds else ""
    return [Way(fault, f"{side} +{after}{lasting}", partial(_hang, kind, side, after, seconds)) for side, after in points]


def _for_seconds(fault: str, strike: Callable[[float, Scene], None], *lengths: float) -> list[Way]:
    return [
        Way(fault, f"{seconds:+.0f} s" if fault == "clock jump" else f"{seconds:.0f} s", partial(strike, seconds))
        for seconds in lengths
    ]


_BOTH = ("own", 0), ("other", 0)
_BYTES = ("own", 0), ("own", 7), ("own", 40), ("other", 0), ("other", 7), ("other", 40)

WAYS: tuple[Way, ...] = (
    *_for_seconds("killed", _kill, 15.0, 90.0),
    *_for_seconds("frozen, thawed", _freeze, 45.0, 4.0, 200.0),
    Way("reset", "at once", _break),
    *_on_streams("reset", "cut", *_BYTES),
    *_on_streams("silence", "silence", *_BOTH),
    *_for_seconds("silence", _cut_off, 25.0, 200.0),
    *_on_streams("delay", "delay", *_BOTH, seconds=15.0),
    *_on_streams("delay", "delay", *_BOTH, seconds=4.0),
    *_on_streams("reordering", "delay", *_BOTH, seconds=45.0),
    *_on_streams("bit flip", "flip", *_BYTES),
    *_for_seconds("disk full", _fill, 40.0),
    *_for_seconds("clock jump", _turn_clock, 7200.0, -7200.0),
    *_on_streams("duplicate", "repeat", *_BOTH),
    *_for_seconds("late", _again, 5.0, 60.0),
)
"""Reordering: what is 45 s late comes after what the side that gave the stream up says on the next one."""

FAULTS: tuple[str, ...] = tuple(dict.fromkeys(way.fault for way in WAYS))
