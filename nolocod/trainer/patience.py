"""How long a trainer may take for what it is told: by its size, its own measured steps, and the slowest of disks.

The rule: these deadlines find a trainer that hangs, and a slow one is none. So each follows from what the machine has shown,
and where it has shown nothing yet, from the slowest that anybody trains on.
"""

from __future__ import annotations

from dataclasses import dataclass

from nolocod.proto.limits import SLOWEST_DISK

LOAD = 3600.0
"""Seconds for tokenising a large text, waiting for a data set's server, or for the first inner step, which compiles."""
_COMMAND = 120.0
_TIMES = 10.0
"""What trainers do takes no so many times as long as it did a moment ago."""
_PASSED = 16 / 200e6
"""Seconds per parameter: an outer step passes over some of phi, delta, theta and the messages, at 200 MB/s."""
CHECKPOINT_BYTES = 20
"""Per parameter: phi, delta, theta and the optimizer's two moments."""


@dataclass(frozen=True)
class Patience:
    """For a trainer of so many `parameters`, whose longest step, or whatever else it did, lately took `held` seconds."""

    parameters: int = 0
    held: float = 0.0
    measured: bool = True
    """Whether `held` knows of inner steps; where none are taken there is nothing to measure."""

    @property
    def command(self) -> float:
        """What waits for the step under way, and passes over the weights."""
        return _COMMAND + self.parameters * _PASSED + (_TIMES * self.held if self.measured else LOAD)

    @property
    def evaluation(self) -> float:
        return LOAD + self.command

    def files(self, bytes_each: int) -> float:
        """What writes or reads so many bytes for each parameter."""
        return self.command + LOAD / 6 + bytes_each * self.parameters / SLOWEST_DISK
