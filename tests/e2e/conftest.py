from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.swarm import Swarm
from tools import browser

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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    """A headless Chromium."""
    if browser.find() is None:
        pytest.skip("Debian's package chromium is not installed")
    with browser.browser(tmp_path_factory.mktemp("chromium") / "profile") as one:
        yield one
