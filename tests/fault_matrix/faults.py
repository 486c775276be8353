"""The faults: columns of the matrix, each in several variants (`CASES`).

"own" is the node whose state machine entered the state, "other" its partner. "own +7" is the eighth byte that own writes
from then on, on the stream that it uses then, or on its next one if it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.support.faulty_network import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fault_matrix.cell import Cell
    from tests.support.faulty_network import Kind


@dataclass(frozen=True)
class Case:
    """One variant of a fault. `strike` returns the seconds that it lasts."""

    fault: str
    name: str
    strike: Callable[[Cell], float]


def _kill(seconds: float, cell: Cell) -> float:
    cell.kill(restart=seconds)
    return seconds


def _kill_within(most: float, cell: Cell) -> float:
    delay = cell.rng.uniform(0.0, most)
    cell.swarm.nursery.start_soon(cell.kill_after, delay, 15.0)
    return delay + 15.0


def _freeze(seconds: float, cell: Cell) -> float:
    cell.own.freeze(seconds)
    return seconds


def _cut_off(seconds: float, cell: Cell) -> float:
    cell.own.cut_off(seconds)
    return seconds


def _fill_disk(seconds: float, cell: Cell) -> float:
    cell.own.fill_disk(seconds)
    return seconds


def _turn_clock(seconds: float, cell: Cell) -> float:
    cell.own.clock_ahead += seconds
    return 0.0


def _break(cell: Cell) -> float:
    cell.on_stream("own", lambda end: end.cut())
    return 0.0


def _stream_fault(kind: Kind, side: str, after: int, seconds: float, cell: Cell) -> float:
    cell.on_stream(side, lambda end: end.faults.append(Fault(kind, len(end.record) + after, seconds)))
    return seconds


def _say_again(seconds: float, cell: Cell) -> float:
    cell.say_again(seconds)
    return seconds


def _on_streams(fault: str, kind: Kind, *points: tuple[str, int], seconds: float = 0.0) -> list[Case]:
    lasting = f", {seconds:.0f} s" if seconds else ""
    return [
        Case(fault, f"{side} +{after}{lasting}", partial(_stream_fault, kind, side, after, seconds)) for side, after in points
    ]


def _for_seconds(fault: str, strike: Callable[[float, Cell], float], *lengths: float) -> list[Case]:
    sign = "+" if fault == "clock jump" else ""
    return [Case(fault, f"{seconds:{sign}.0f} s", partial(strike, seconds)) for seconds in lengths]


_BOTH = ("own", 0), ("other", 0)
_BYTES = ("own", 0), ("own", 7), ("own", 40), ("other", 0), ("other", 7), ("other", 40)

CASES: tuple[Case, ...] = (
    *_for_seconds("killed", _kill, 15.0, 90.0),
    *(Case("killed", f"within {most:g} s", partial(_kill_within, most)) for most in (0.1, 1.0, 10.0)),
    *_for_seconds("frozen, thawed", _freeze, 45.0, 4.0, 200.0),
    Case("reset", "at once", _break),
    *_on_streams("reset", "cut", *_BYTES),
    *_on_streams("silence", "silence", *_BOTH),
    *_for_seconds("silence", _cut_off, 25.0, 200.0),
    *_on_streams("delay", "delay", *_BOTH, seconds=15.0),
    *_on_streams("delay", "delay", *_BOTH, seconds=4.0),
    *_on_streams("reordering", "delay", *_BOTH, seconds=45.0),
    *_on_streams("bit flip", "flip", *_BYTES),
    *_for_seconds("disk full", _fill_disk, 40.0),
    *_for_seconds("clock jump", _turn_clock, 7200.0, -7200.0),
    *_on_streams("duplicate", "repeat", *_BOTH),
    *_for_seconds("late", _say_again, 5.0, 60.0),
)
"""Reordering: what is 45 s late comes after what the side that gave the stream up says on the next one."""

FAULTS: tuple[str, ...] = tuple(dict.fromkeys(case.fault for case in CASES))
