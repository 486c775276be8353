"""Every codec and every way to overlap, between real daemons: what the manifest says reaches both ends of the wire."""

from __future__ import annotations

import pytest

from tests.support.swarm import Swarm, ready

PARAMETERS = 28_832
"""Of the model in swarm.py, over bytes."""


@pytest.mark.parametrize(
    ("codec", "outer", "least", "most"),
    [
        pytest.param("float32", "fragments = 2", 1.95, 2.05, id="float32, half the model at a time"),
        pytest.param("bfloat16", "blocking = true", 2.0, 2.05, id="bfloat16, blocking"),
        pytest.param("modulo8", "", 1.0, 1.9, id="modulo8"),
        pytest.param("delta4", "refresh = 2", 0.5, 0.6, id="delta4, dense every second time"),
    ],
)
def test_two_daemons_pair_by_any_codec(swarm: Swarm, codec: str, outer: str, least: float, most: float) -> None:
    """The smallest message of each has so many bytes per parameter."""
    first = swarm.found(codec, outer, steps=500)
    swarm.wait("the first node tells its address", lambda: ready(first))
    second = swarm.daemon().run("join", "--bootstrap", first.address)
    swarm.wait_paired([first, second], 3)
    for daemon in (first, second):
        report = daemon.report
        assert report is not None
        assert not [row for row in report.exchanges if row.outcome not in ("committed", "busy")]
        assert report.errors == ()
        smallest = min(row.sent for row in report.exchanges if row.outcome == "committed")
        assert least <= smallest / PARAMETERS <= most
