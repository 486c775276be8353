"""What `nolocod bench` measures, by name.

Not here: what learning costs (studies.lab), and contests with others (tests/bench).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.studies.benchmarks.base import Options, Result
from nolocod.studies.benchmarks.exchange import exchange, parse_parameters
from nolocod.studies.benchmarks.node import node
from nolocod.studies.benchmarks.training import training

if TYPE_CHECKING:
    from collections.abc import Callable

MEASUREMENTS: dict[str, Callable[[Options, Callable[[str], None]], Result]] = {
    "training": training,
    "exchange": exchange,
    "node": node,
}

__all__ = ["MEASUREMENTS", "Options", "parse_parameters"]
