"""Every codec and every way to overlap, between real daemons: what the manifest says reaches both ends of the wire."""

from __future__ import annotations

import pytest
from swarm import Swarm, ready

PARAMETERS = 28_832
"""Of the model in swarm.py, over bytes."""


@pytest.mark.parametrize(
    ("codec", "outer", "least", "most"),
    [
        pytest.param("float32", "fragments = 2", 1.5, 2.6, id="float32, half the model at a time"),
        pytest.param("bfloat16", "blocking = true", 2.0, 2.4, id="bfloat16, blocking"),
        pytest.param("modulo8", "", 1.0, 1.4, id="modulo8"),
        pytest.param("delta4", "refresh = 2", 0.5, 3.0, id="delta4, dense every second time"),
    ],
)
def test_two_daemons_pair_by_any_codec(swarm: Swarm, codec: str, outer: str, least: float, most: float) -> None:
    first = swarm.found(codec, outer)
    swarm.wait("the first node tells its address", lambda: ready(first), 30)
    second = swarm.daemon().run("join", "--bootstrap", first.address)
    swarm.wait_paired([first, second], 4, 60)
    for daemon in (first, second):
        report = daemon.report
        assert report is not None
        outcomes = report.exchanges_by_outcome
        assert not outcomes.get("refused", 0)
        assert not outcomes.get("aborted", 0)
        committed = [row for row in report.exchanges if row.outcome == "committed"]
        sent = [row.sent / PARAMETERS for row in committed]
        assert all(least <= size <= most for size in sent), f"bytes per parameter: {sent}"
        assert report.errors == ()
