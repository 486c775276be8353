"""One node's own settings: built once from the command line, checked before any socket opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.node.settings import AS_IT_IS, Settings
from nolocod.p2p.settings import Allowance, MeshSettings
from nolocod.units import Address

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.paths import DataDir

_LOOPBACK = Address("127.0.0.1", 0)
_NO_LIMIT = Allowance()
FAREWELL = 3.0
"""Seconds of a stop for the farewell to peers and the month's bytes, at once, and for the end of the process."""


@dataclass(frozen=True)
class NodeConfig:
    """What one daemon is told: it gives each part the settings that this part needs. Times in seconds."""

    mesh: MeshSettings
    http: Address = _LOOPBACK
    """Of the pages."""
    http_token: Path | None = None
    """A file with the token that readers of the pages need; None for the data directory's own, where one is needed."""
    http_open_metrics: bool = False
    """Whether /metrics may be read without it."""
    data: Path | None = None
    """Training text on this machine, for runs whose source is text, jsonl or parquet."""
    base: Path | None = None
    """A folder with the files of the model that the run starts from."""
    settings: Settings = AS_IT_IS
    """As flags give them."""
    base_bits: int = 16
    """In which the base beside an adapter lies: 16, 8 or 4 (trainer/quantized.py)."""
    spare_memory: bool = False
    """Whether the trainer computes layers twice, so that less is kept of them."""
    compile: bool = False
    """Whether the trainer has torch compile the model's layers."""
    tf32: bool = False
    """Whether a GPU may multiply float32 in TF32."""
    clip_change: float | None = None
    """The longest change of the weights that one exchange tells a partner (replica.py); None for any."""
    max_uploads: int = 2
    """Newcomers served weights at once."""
    checkpoint_every: float | None = None
    """At the first outer step after this many seconds; None lets the model's size decide."""
    grace: float = 3.0
    """How long a stop waits for an exchange under way."""
    stop_within: float = 10.0
    """After SIGTERM, as who sends it kills soon; Ctrl-C leaves the last checkpoint all its time."""
    linger: float = 3600.0
    """How long weights are served to others after the run's end."""
    allowance: Allowance = _NO_LIMIT
    loop: tuple[int, int] | None = None
    """The descriptors that a program gave whose own loop trains (trainer/attached.py)."""

    @property
    def paths(self) -> DataDir:
        return self.mesh.paths
