from __future__ import annotations

import pytest

from tests.lab.topology import missing

WHY = missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there can be no lab, its tests are skipped with the reason."""
    if WHY:
        for item in items:
            if "tests/lab/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"no networks for tests: {WHY}"))
