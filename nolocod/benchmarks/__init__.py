"""What `nolocod bench` measures, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.benchmarks.base import Options, Result
from nolocod.benchmarks.codecs import codecs
from nolocod.benchmarks.defences import defences
from nolocod.benchmarks.exchange import exchange, parse_parameters
from nolocod.benchmarks.node import node
from nolocod.benchmarks.overlap import overlap
from nolocod.benchmarks.relay import relay
from nolocod.benchmarks.training import training
from nolocod.benchmarks.transport import transport

if TYPE_CHECKING:
    from collections.abc import Callable

MEASUREMENTS: dict[str, Callable[[Options, Callable[[str], None]], Result]] = {
    "training": training,
    "overlap": overlap,
    "defences": defences,
    "exchange": exchange,
    "transport": transport,
    "relay": relay,
    "node": node,
    "codecs": codecs,
}

__all__ = ["MEASUREMENTS", "Options", "parse_parameters"]
