"""How the tests share two processes (`./test`): those with daemons one after the other in one, since a swarm of them takes
what cores there are; all others in either. And that torch has one thread in each: on tensors as small as here a second one
only spins, on the core that the other process needs.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

WITHOUT = ("test_page_states.py", "test_lab_networks.py")
"""Of tests/e2e and tests/lab, those without daemons."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("e2e", "lab"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem if item.path.name in WITHOUT else "daemons"))
