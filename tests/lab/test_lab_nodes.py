"""Short forms of the lab's scenarios, with real daemons: that all comes about. How soon is for the long forms to say, which
have the machine for themselves (`python -m tests.lab`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.lab import scenarios
from tests.lab.nodes import Load

if TYPE_CHECKING:
    from pathlib import Path


def test_two_nodes_behind_cones_meet_punch_and_pair(tmp_path: Path) -> None:
    (meeting,) = scenarios.meetings(tmp_path, rtt=40.0)
    assert meeting.straight is not None, meeting
    assert "punched" in meeting.reach, meeting
    assert meeting.paired is not None, "an outer step over the punched connection"
    assert meeting.nat == ("cone", "cone"), meeting


def test_behind_a_symmetric_router_exchanges_are_relayed_and_the_reason_is_told(tmp_path: Path) -> None:
    (meeting,) = scenarios.meetings(tmp_path, ("symmetric", "cone"))
    assert meeting.reach == ("relayed", "relayed"), meeting
    assert meeting.paired is not None, meeting
    assert meeting.nat == ("symmetric", "cone"), meeting
    assert meeting.why[0], "it says why"


def test_a_relay_killed_in_the_middle_of_an_exchange_leaves_nothing_half_applied(tmp_path: Path) -> None:
    found = scenarios.relay_killed(tmp_path, Load(hidden=512, steps=20))
    assert found.during, found
    assert found.elsewhere is not None, found
    assert found.agreed, found
    assert found.paired is not None, found


def test_a_router_that_forgets_and_one_that_gets_another_address_are_got_over(tmp_path: Path) -> None:
    for found in scenarios.recoveries(tmp_path, ("forgotten", "moved")):
        assert found.paired is not None, found
