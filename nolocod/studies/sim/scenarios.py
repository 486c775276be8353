"""Scenarios by name, for `nolocod simulate`."""

from __future__ import annotations

from nolocod.studies.sim.network import LineModel
from nolocod.studies.sim.replica import Course
from nolocod.studies.sim.swarm import Churn, Settings, Split

SCENARIOS: dict[str, Settings] = {
    "calm": Settings(),
    "wan": Settings(weather=LineModel(latency=0.08, spread=1.0, loss=0.001, up=625_000.0, down=2_500_000.0), unlike=0.3),
    "nat": Settings(nats=(0.3, 0.5, 0.2)),
    "partition": Settings(split=Split(0.25, 0.5)),
    "churn": Settings(churn=Churn(0.5)),
    "unlike": Settings(unlike=0.8),
    "rough": Settings(
        course=Course(inner_steps=20),
        weather=LineModel(latency=0.15, spread=1.5, loss=0.01, up=125_000.0, down=625_000.0),
        nats=(0.3, 0.5, 0.2),
        unlike=0.5,
        churn=Churn(0.3),
        split=Split(0.4, 0.6),
    ),
}
"""What each is made of: `calm` has 20 ms and fast lines, `wan` home lines over continents, `nat` every second node behind a
cone NAT and every fifth behind a symmetric one, `partition` a mesh that falls in two for a quarter of the time, `churn`
half of the nodes killed and as many new ones, `unlike` slow and fast machines, `rough` all of it."""
