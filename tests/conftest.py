"""How the tests share two processes (`./test`): those with daemons one after the other in one, since a swarm of them takes
what cores there are; all others in either.
"""

from __future__ import annotations

import pytest

WITHOUT = ("test_page_states.py", "test_lab_networks.py")
"""Of tests/e2e and tests/lab, those without daemons."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("e2e", "lab"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem if item.path.name in WITHOUT else "daemons"))
