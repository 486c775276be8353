"""Codecs and ways to overlap that the other tests here do not run (they run modulo8), between real daemons: what the manifest
says reaches both ends of the wire. Every codec with real trainers: tests/trainer/test_process.py.
"""

from __future__ import annotations

import pytest

from tests.support.swarm import Swarm, ready

PARAMETERS = 28_832
"""Of the model in swarm.py, over bytes."""


@pytest.mark.parametrize(
    ("codec", "outer", "least", "most"),
    [
        pytest.param("bfloat16", "blocking = true", 2.0, 2.05, id="bfloat16, blocking"),
        pytest.param("delta4", "refresh = 2\nfragments = 2", 0.25, 0.3, id="delta4, half the model, dense every second time"),
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
