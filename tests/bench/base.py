"""What all measurements share.

The rule: a figure is a ratio beside a baseline of the same run, pair by pair and in turn, so that a slow
minute of the machine hits both.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.run.manifest import Codec


class BenchError(LocalError):
    """What is measured did not run."""


@dataclass(frozen=True)
class Options:
    """`seconds` of each measurement; `codec` of what is exchanged."""

    model: str = "small"
    seconds: float = 10.0
    pairs: int = 5
    codec: Codec = "float32"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, and the least and the greatest."""
    median, least, greatest = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least}-{greatest})"
