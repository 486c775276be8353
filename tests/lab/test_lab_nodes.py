"""Short forms of the lab's scenarios, with real daemons: that all comes about. How soon is for the long forms to say, which
have the machine for themselves (`python -m tests.lab`).

The tests share seven daemons and go from what only looks to what kills: three that everybody reaches, two behind cones, two
behind symmetric routers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from tests.lab import observers, scenarios
from tests.lab.nodes import Node, Swarm, swarm
from tests.lab.topology import Home, internet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Neighbours:
    swarm: Swarm
    public: list[Node]
    cones: list[Node]
    symmetric: list[Node]
    home: Home
    """Where the first of the cones' nodes is."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbours]:
    rests = ("--duty", "10%")  # seven trainers would take all of the machine, for steps that no test needs
    load = replace(scenarios.CAUGHT, steps=7)
    with internet() as net, swarm(tmp_path_factory.mktemp("lab"), load, *rests) as nodes:
        homes = [net.home("cone", delay=10.0), net.home("cone", delay=10.0), net.home("symmetric"), net.home("symmetric")]
        public = scenarios.started(net, nodes, 3)
        one, other, third, fourth = (nodes.join(home.hosts[0], public) for home in homes)
        yield Neighbours(nodes, public, [one, other], [third, fourth], homes[0])


def test_two_nodes_behind_cones_meet_punch_and_pair(lab: Neighbours) -> None:
    meeting = scenarios.meet(lab.swarm, *lab.cones, straight=True)
    assert meeting.straight is not None, meeting
    assert "punched" in meeting.reach, meeting
    assert meeting.paired is not None, "an outer step over the punched connection"
    assert meeting.nat == ("cone", "cone"), meeting


def test_behind_a_symmetric_router_exchanges_are_relayed_and_the_reason_is_told(lab: Neighbours) -> None:
    meeting = scenarios.meet(lab.swarm, lab.symmetric[0], lab.cones[1], straight=False)
    assert meeting.reach == ("relayed", "relayed"), meeting
    assert meeting.paired is not None, meeting
    assert meeting.nat == ("symmetric", "cone"), meeting
    assert meeting.why[0], "it says why"


def test_an_observer_behind_a_cone_shows_them_all_with_their_class_and_exchanges(lab: Neighbours, tmp_path: Path) -> None:
    with observers.watcher(lab.home.host(), tmp_path, lab.public) as watching:
        lab.swarm.wait("all are shown", lambda: observers.all_right(watching.look(), lab.swarm.nodes), scenarios.START)
        lab.swarm.wait("exchanges are shown", lambda: bool(observers.exchanged(watching.look())), scenarios.PAIRING)
        assert watching.memory <= observers.MEMORY


def test_a_router_that_forgets_and_one_that_gets_another_address_are_got_over(lab: Neighbours) -> None:
    for accident in ("forgotten", "moved"):
        found = scenarios.recover(lab.swarm, lab.home, lab.cones[0], lab.public, accident)
        assert found.paired is not None, found


def test_a_relay_killed_in_the_middle_of_an_exchange_leaves_nothing_half_applied(lab: Neighbours) -> None:
    for cone in lab.cones:  # or the two seldom draw each other
        lab.swarm.drop(cone)
    found = scenarios.kill_relay(lab.swarm, lab.public, *lab.symmetric)
    assert found.during, found
    assert found.elsewhere is not None, found
    assert found.agreed, found
    assert found.paired is not None, found
