"""How the tests share the processes of `./test`: real daemons one swarm after the other, since a swarm takes what cores there
are; the lab of NATs beside them, since it mostly waits; all others wherever there is room. And that torch has one thread in
each: on tensors as small as here a second one only spins, on the core that another process needs.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = ("test_page_states.py", "test_study.py", "test_supervised.py", "test_lab_networks.py")
"""Of tests/e2e and tests/lab, those without a swarm of daemons."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("e2e", "lab") and "studies" not in item.path.parts:
            group = item.path.stem if item.path.name in ALONE else item.path.parent.name
            item.add_marker(pytest.mark.xdist_group(group))
