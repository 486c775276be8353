"""`nolocod bench`: what all measurements share.

The rule: a figure is a ratio beside a baseline of the same run, pair by pair and in turn, so that a slow
minute of the machine hits both. Nothing here is imported by the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nolocod.errors import LocalError


class BenchError(LocalError):
    """What is measured did not run."""


@dataclass(frozen=True)
class Options:
    """`seconds` of each measurement; `threads` 0 leaves the choice to torch."""

    model: str = "small"
    seconds: float = 10.0
    pairs: int = 5
    threads: int = 0


class Result(Protocol):
    """What every measurement gives."""

    def to_text(self) -> str: ...

    def to_json(self) -> str: ...
