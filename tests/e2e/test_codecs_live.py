"""A codec and fragments, which the other tests here do not run (they run modulo8), between real daemons: what the manifest
says reaches both ends of the wire. Every codec with real trainers: tests/trainer/test_process.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.swarm import Swarm

PARAMETERS = 28_832
"""Of the model in swarm.py, over bytes."""


def test_two_daemons_pair_by_another_codec_and_by_halves(swarm: Swarm) -> None:
    both = swarm.joined_by(swarm.found("bfloat16", turns=2), 1)
    swarm.wait_paired(both, 3)
    for daemon in both:
        report = daemon.report
        assert report is not None
        assert not [row for row in report.exchanges if row.outcome not in ("committed", "busy")]
        assert report.errors == ()
        smallest = min(row.sent for row in report.exchanges if row.outcome == "committed")
        assert 1.0 <= smallest / PARAMETERS <= 1.05, "slow weights and their change, two bytes each, of half the model"
