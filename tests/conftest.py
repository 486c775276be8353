"""How the tests share the processes of `./test`, and which are the unit suite.

Real daemons come one swarm after the other, since a swarm takes what cores there are; the lab of NATs beside them, since it
mostly waits; all others wherever there is room. Torch has one thread in each process: on tensors as small as here a second
one only spins, on the core that another process needs.

`-m "not system"` is the unit suite: modules that neither open sockets nor start processes, by what they import.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import trio.testing

os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = ("test_page_states.py", "test_study.py", "test_supervised.py", "test_lab_networks.py")
"""Of tests/e2e and tests/lab, those without a swarm of daemons."""
SYSTEM = {
    *("socket", "subprocess", "multiprocessing", "psutil", "tests.support.wires", "tests.support.swarm"),
    *("nolocod.p2p.host", "nolocod.p2p.mesh", "nolocod.trainer.process"),
    *("nolocod.observe.status.http", "nolocod.observe.status.server"),
}
"""Who imports one of these, or something out of it, opens sockets or starts processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    modules: dict[object, bool] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        modules.setdefault(item.module, is_system(item.module))
        if modules[item.module]:
            item.add_marker(pytest.mark.system)
        if item.path.parent.name in ("e2e", "lab") and "studies" not in item.path.parts:
            group = item.path.stem if item.path.name in ALONE else item.path.parent.name
            item.add_marker(pytest.mark.xdist_group(group))


def is_system(module: object) -> bool:
    values = vars(module).values()
    names = {value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in values}
    return bool(names & SYSTEM)


@pytest.fixture
def virtual_clock() -> trio.testing.MockClock:
    """That of the simulator, for tests on its network."""
    from nolocod.studies.sim import clock

    return clock.virtual_clock()
