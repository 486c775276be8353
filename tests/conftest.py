"""How the tests share the processes of `./test`, and which are the unit suite.

A module of tests/e2e or tests/lab stays in one process, since its tests share daemons, and so does one whose tests share
something else that takes seconds to make; all others run wherever there is room. These groups come first, the longest before
the others: their daemons wait for one another, and for trainers that yield to whatever else computes. The other tests fill up
the processes at the end. Torch has one thread in each process: on tensors as small as here a second one only spins, on the core
that another process needs.

`-m "not system"` is the unit suite: modules that neither open sockets nor start processes, by what they import, and that are
not in those folders.

A GPU is hidden: what is the same to the bit on processors need not be so there. `-m gpu` runs the tests that need one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from nolocod.trainer.settled import importing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio.testing

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)  # the same on any machine, however busy it is
hypothesis.settings.load_profile("suite")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background has children ignore it

SYSTEM = {
    *("socket", "subprocess", "multiprocessing", "psutil", "tests.support.wires", "tests.support.swarm", "tests.fuzz.hosts"),
    *("http.server", "nolocod.p2p.host", "nolocod.p2p.mesh", "nolocod.trainer.process"),
    *("nolocod.observe.status.http", "nolocod.observe.status.server"),
    *("tools.compare", "nolocod.studies.lab.results"),  # trials are trained in processes
}
"""Who imports one of these, or something out of it, opens sockets or starts processes."""


SHARING = {
    *("trainer/test_adapter", "trainer/test_base_model", "trainer/test_chat_template", "trainer/test_objective"),
    *("trainer/test_quantized", "trainer/test_samples", "trainer/test_tasks"),
    *("sim/test_learner", "exchange/test_receipt_gossip", "exchange/test_stalling"),
}
"""Modules whose tests share a fixture that takes seconds to make."""
WITH_DAEMONS = [Path(__file__).parent / name for name in ("e2e", "lab")]
LONGEST = ("test_life_of_a_run", "test_faults_live", "test_testnet", "test_release_before", "test_study", "test_swarm")
"""Groups that begin before all others, in this order."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that tests start too


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A quarter of the time that it takes to import all tests went to garbage, of which there is none."""
    with importing():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    modules: dict[object, bool] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        has_daemons = item.path.parent in WITH_DAEMONS
        name = f"{item.path.parent.name}/{item.path.stem}"
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("needs a GPU, and -m gpu"))
        if has_daemons or name in SHARING:
            item.add_marker(pytest.mark.xdist_group(name))
        if modules.setdefault(item.module, has_daemons or is_system(item.module)):
            item.add_marker(pytest.mark.system)
    if config.getoption("loadgroup", default=False):
        items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    """When an item's group is to begin; xdist takes groups as they come (--no-loadscope-reorder)."""
    if not item.get_closest_marker("xdist_group"):
        return len(LONGEST) + 1
    return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """xdist marks a group in the test's id, which not every release of pytest lets it do."""
    if session.config.getoption("loadgroup", default=False):
        lost = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if lost:
            raise pytest.UsageError(f"pytest {pytest.__version__} and this pytest-xdist do not keep groups together: {lost[0]}")


def is_system(module: object) -> bool:
    values = vars(module).values()
    names = {value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in values}
    return bool(names & SYSTEM)


@pytest.fixture
def virtual_clock() -> trio.testing.MockClock:
    """That of the simulator, for tests on its network."""
    from nolocod.studies.sim import clock

    return clock.virtual_clock()
