"""The run's report as Prometheus metrics: what an observer is scraped for, in place of nodes that nobody can scrape.

The rule: as for a node, a label's values are a small fixed set.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from nolocod.observe.run.state import REACHABLE, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.observe.run.report import RunReport

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_FIGURES: tuple[tuple[str, str, Callable[[RunReport], float | None]], ...] = (
    ("nolocod_run_members", "Live members of the run.", lambda run: run.known),
    ("nolocod_run_members_counted", "Members that the figures are made of.", lambda run: run.counted),
    ("nolocod_run_round", "Median round of the members that train.", lambda run: run.round),
    ("nolocod_run_goal_rounds", "Rounds until the run's end; 0 without a goal.", lambda run: run.rounds),
    ("nolocod_run_remaining_seconds", "Until the goal at the pace of the last minutes; NaN if unknown.", lambda run: run.eta),
    ("nolocod_run_training_loss_nats", "Median training loss of the members that train.", lambda run: run.loss),
    ("nolocod_run_replica_tokens", "Tokens that the median replica has behind it.", lambda run: run.tokens),
    ("nolocod_run_tokens_per_second", "Tokens per second of all members together.", lambda run: run.tokens_per_second),
    ("nolocod_run_watched_tokens", "Tokens of all members together while watched.", lambda run: run.watched_tokens),
    ("nolocod_run_watched_seconds", "Since this observer began.", lambda run: run.watched),
    ("nolocod_run_contributors", "Nodes that gave something, by receipts of both partners.", lambda run: run.contributed_by),
    ("nolocod_run_contributed_tokens", "Tokens that they gave, by these receipts.", lambda run: run.contributed),
    ("nolocod_run_exchanges_known", "Pairs of which an exchange of the last hour is known.", lambda run: len(run.exchanges)),
)


class RunMetrics(Collector):
    """Of the report that `report` gives at each scrape; `render` gives the text."""

    def __init__(self, report: Callable[[], RunReport]) -> None:
        self._report = report
        self._registry = CollectorRegistry()
        self._registry.register(self)
        prometheus_client.ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        run = self._report()
        for name, text, figure in _FIGURES:
            value = figure(run)
            yield GaugeMetricFamily(name, text, value=math.nan if value is None else value)
        states = GaugeMetricFamily("nolocod_run_members_by_state", "Live members, by state.", labels=["state"])
        for state in STATES:
            states.add_metric([state], run.states.get(state, 0))
        yield states
        reachable = GaugeMetricFamily(
            "nolocod_run_members_reachable", "Live members, by how they are reached.", labels=["kind"]
        )
        for kind in REACHABLE:
            reachable.add_metric([kind], run.reachable.get(kind, 0))
        yield reachable

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)
