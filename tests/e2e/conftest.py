from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """Real daemons on loopback; all are killed at the end."""
    swarm = Swarm(tmp_path)
    try:
        yield swarm
    finally:
        swarm.end()
