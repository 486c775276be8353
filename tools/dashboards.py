"""Writes Grafana's dashboards below deploy/grafana/dashboards: `python -m tools.dashboards`.

The rule: a panel that has nothing to tell in a healthy swarm shows 0, never "no data"; every query goes by the
variables `$run` and `$node`. Needs the Foundation SDK: `pip install nolocod[dashboards]`; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_SOURCE = DataSourceRef("prometheus", "${datasource}")
_MEMBER = 'on (job, instance) nolocod_build_info{run_name=~"$run"}'
_OF_NODE = 'instance=~"$node"'
_RATE = "$__rate_interval"
_PER_MINUTE = "cpm"
_COLUMN = 100
"""Pixels of a table's column at least; with Grafana's own 150 the health of nodes would not fit a laptop."""

Query = tuple[str, str]
"""PromQL, and the legend."""


def of_run(query: str) -> str:
    """`query`, of the nodes of the chosen run."""
    return f"({query} and {_MEMBER})"


def rate(counter: str, labels: str = "") -> str:
    return f"rate({counter}{{{labels}}}[{_RATE}])"


def queries(*all_of_them: Query) -> list[prometheus.Dataquery]:
    made = []
    for index, (query, legend) in enumerate(all_of_them):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(_SOURCE)
        made.append(target.range())
    return made


def lines(title: str, about: str, unit: str, *shown: Query, stacked: bool = False, width: int = 8) -> timeseries.Panel:
    """Values over time."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    panel = timeseries.Panel().title(title).description(about).datasource(_SOURCE).unit(unit).span(width).height(7)
    panel = panel.legend(legend).line_width(1).fill_opacity(25 if stacked else 5)
    panel = panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return panel.targets(list(queries(*shown)))


def number(title: str, about: str, unit: str, query: str, legend: str = "", **colors: float) -> stat.Panel:
    """What it is now; with `legend`, the legend instead of the value. `colors` begin at their numbers, above a green that
    says all is well; a number without them is neither good nor bad."""
    steps = [Threshold(color="green"), *(Threshold(value, color) for color, value in colors.items())]
    scale = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)  # without it Grafana shows all above 80 in red
    panel = stat.Panel().title(title).description(about).datasource(_SOURCE).unit(unit).span(4).height(4)
    panel = panel.thresholds(scale.steps(steps if colors else [Threshold(color="blue")]))
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.text_mode(BigValueTextMode.NAME if legend else BigValueTextMode.VALUE)
    return panel.targets(list(queries((query, legend))))


def health(title: str, about: str, columns: dict[str, tuple[str, str]]) -> table.Panel:
    """One line per node; `columns` are title: (unit, query by instance)."""
    panel = table.Panel().title(title).description(about).datasource(_SOURCE).span(24).height(8).min_width(_COLUMN)
    for index, (query, (unit, heading)) in enumerate((query, (unit, name)) for name, (unit, query) in columns.items()):
        ref = chr(ord("A") + index)
        target = prometheus.Dataquery().expr(query).ref_id(ref).datasource(_SOURCE).instant().format(PromQueryFormat.TABLE)
        panel = panel.with_target(target)
        properties = [DynamicConfigValue("displayName", heading), DynamicConfigValue("unit", unit)]
        panel = panel.override_by_name(f"Value #{ref}", properties)
    panel = panel.with_transformation(DataTransformerConfig("merge", options={}))
    return panel.with_transformation(DataTransformerConfig("organize", options={"excludeByName": {"Time": True}}))


def board(uid: str, title: str, about: str) -> dashboard.Dashboard:
    """An empty dashboard with its variables, annotations and links."""
    runs, nodes = "nolocod_build_info", 'nolocod_build_info{run_name=~"$run"}'
    made = dashboard.Dashboard(title).uid(uid).description(about).tags(["nolocod"]).timezone("browser").readonly()
    made = made.refresh("10s").time("now-30m", "now").tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.link(dashboard.DashboardLink("nolocod").type(DashboardLinkType.DASHBOARDS).tags(["nolocod"]).keep_time(True))
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Data").type("prometheus"))
    run = _variable("run", "Run", f"label_values({runs}, run_name)").multi(True).include_all(True)
    made = made.with_variable(run.all_value(".*"))
    if uid == "nolocod-node":
        made = made.with_variable(_variable("node", "Node", f"label_values({nodes}, instance)"))
    for name, color, query in (
        ("Joins", "green", f"sum by (instance) (increase(nolocod_members_joined_total[{_RATE}]) and {_MEMBER})"),
        ("Bans", "red", f"sum by (instance) (increase(nolocod_peer_bans_total[{_RATE}]) and {_MEMBER})"),
        ("Restarts", "orange", f"sum by (instance) (changes(process_start_time_seconds[{_RATE}]) and {_MEMBER})"),
    ):
        note = dashboard.AnnotationQuery().name(name).datasource(_SOURCE).enable(True).icon_color(color).expr(query)
        made = made.annotation(note)
    return made


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).label(label).datasource(_SOURCE).query(query)
    return made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)


def swarm() -> dashboard.Dashboard:
    """All nodes that Prometheus sees, of the chosen runs."""
    losses = of_run("nolocod_training_loss_nats > 0")
    paired = "sum" + of_run(rate("nolocod_outer_steps_total", 'kind="paired"'))
    sent = "sum" + of_run(rate("nolocod_exchange_bytes_total", 'direction="sent"'))
    run = 'run_name=~"$run"'
    made = board("nolocod-swarm", "nolocod: swarm", "What all nodes of a run do together.")
    for panel in (
        number("Nodes up", "That answer Prometheus.", "none", 'count(up{job="nolocod"} == 1) or vector(0)'),
        number("Alerts", "That fire now.", "none", 'count(ALERTS{alertstate="firing"}) or vector(0)', red=1),
        number("Tokens", "Of all nodes.", "cps", f"sum(run:nolocod_tokens:rate2m{{{run}}}) or vector(0)"),
        number("Loss", "Median of the nodes' training losses, nats per token.", "none", f"quantile(0.5, {losses})"),
        number("Distance", "Of replicas to their mean, estimated from pairs.", "none",
               f"max(run:nolocod_consensus_distance:estimate{{{run}}}) or vector(0)"),
        number("Solo in a row", "The most of any node; an alert fires at 3.", "none",
               f"max{of_run('nolocod_solo_steps_since_paired')}", yellow=1, red=3),
    ):  # fmt: skip
        made = made.with_panel(panel)
    made = made.with_row(dashboard.Row("Training"))
    for chart in (
        lines("Loss across nodes", "Training loss, nats per token.", "none",
              *((f"quantile({share}, {losses})", name) for share, name in ((0.9, "90 %"), (0.5, "median"), (0.1, "10 %")))),
        lines("Tokens", "By node.", "cps", (of_run(rate("nolocod_tokens_total")), "{{instance}}"), stacked=True),
        lines("Consensus distance", "Root mean square distance of a replica to the mean, from the spread of pairs.", "none",
              (f"run:nolocod_consensus_distance:estimate{{{run}}}", "{{run_name}}")),
        lines("Outer steps", "Paired with a random partner, or solo where nobody could be had.", _PER_MINUTE,
              (f"60 * sum by (kind) {of_run(rate('nolocod_outer_steps_total'))}", "{{kind}}"), stacked=True),
        lines("Exchanges", "How they ended, at both partners. Busy ones are tried again elsewhere.", _PER_MINUTE,
              (f"60 * sum by (outcome) {of_run(rate('nolocod_exchanges_total'))}", "{{outcome}}"), stacked=True),
        lines("Bytes per outer step", "Sent in exchanges, broken ones too, for each paired step.", "bytes",
              (f"{sent} / ({paired} > 0) or vector(0)", "sent")),
    ):  # fmt: skip
        made = made.with_panel(chart)
    made = made.with_row(dashboard.Row("Nodes"))
    nodes: tuple[timeseries.Panel | table.Panel, ...] = (
        lines("What they do", "Nodes by state.", "none",
              (f"sum by (state) {of_run('nolocod_node_state')} > 0", "{{state}}"), stacked=True),
        lines("How they are reached", "Nodes by NAT class.", "none",
              (f"sum by (kind) {of_run('nolocod_reachable')} > 0", "{{kind}}"), stacked=True),
        lines("Connections", "By reach, counted at both ends.", "none",
              (f"sum by (reach) {of_run('nolocod_connections')}", "{{reach}}"), stacked=True),
        health("Which node is unhealthy", "A line per node.", {
            "Solo in a row": ("none", f"sum by (instance) {of_run('nolocod_solo_steps_since_paired')}"),
            "Failed exchanges": ("percentunit", f"sum by (instance) {of_run('instance:nolocod_exchange_failures:ratio10m')}"),
            "Loss": ("none", f"sum by (instance) {of_run('nolocod_training_loss_nats')}"),
            "Round": ("none", f"sum by (instance) {of_run('nolocod_round')}"),
            "Clock off": ("s", f"sum by (instance) {of_run('nolocod_clock_offset_seconds')}"),
            "Disk left": ("bytes", f"sum by (instance) {of_run('nolocod_disk_free_bytes')}"),
            "Month": ("percentunit", f"sum by (instance) {of_run('instance:nolocod_month_bytes:ratio')}"),
            "Trainer failures": ("none", f"sum by (instance) {of_run('nolocod_trainer_failures_total')}"),
        }),
    )  # fmt: skip
    for one in nodes:
        made = made.with_panel(one)
    return made


def node() -> dashboard.Dashboard:
    """One node in detail."""

    def gauge(name: str, legend: str) -> Query:
        return f"{name}{{{_OF_NODE}}}", legend

    def counted(name: str, legend: str, factor: str = "60 * ") -> Query:
        return f"{factor}{rate(name, _OF_NODE)}", legend

    def share(quantile: float, histogram: str) -> Query:
        counts = f"sum by (le) (rate({histogram}_bucket{{{_OF_NODE}}}[10m]))"
        return f"histogram_quantile({quantile}, {counts}) >= 0 or vector(0)", f"{quantile:.0%}"

    def by_code(counter: str) -> Query:
        none = 'label_replace(vector(0), "code", "any", "", "")'  # codes show once they have come up
        return f"60 * sum by (code) ({rate(counter, _OF_NODE)}) or {none}", "{{code}}"

    since = f"time() - (nolocod_last_paired_step_timestamp_seconds{{{_OF_NODE}}} > 0) or vector(0)"
    made = board("nolocod-node", "nolocod: node", "What one node does.")
    for panel in (
        number("State", "What it does now.", "none", f"nolocod_node_state{{{_OF_NODE}}} == 1", "{{state}}"),
        number("Round", "Outer steps behind its replica.", "none", gauge("nolocod_round", "")[0]),
        number("Loss", "Training, nats per token.", "none", gauge("nolocod_training_loss_nats", "")[0]),
        number("Tokens", "Per second.", "cps", rate("nolocod_tokens_total", _OF_NODE)),
        number("Members", "Others that it knows.", "none", f"sum(nolocod_members{{{_OF_NODE}}})"),
        number("Since paired", "Since its last paired outer step.", "s", since),
    ):
        made = made.with_panel(panel)
    for title, charts in {
        "Training": (
            lines("Loss", "Nats per token.", "none", gauge("nolocod_training_loss_nats", "training"),
                  (f"nolocod_validation_loss_nats{{{_OF_NODE}}}", "validation")),
            lines("Learning rate", "Of the inner optimizer.", "none", gauge("nolocod_learning_rate", "learning rate")),
            lines("Outer steps", "Per minute.", _PER_MINUTE, counted("nolocod_outer_steps_total", "{{kind}}"), stacked=True),
        ),
        "Exchanges": (
            lines("Timeline", "Seconds spent per second; what overlaps adds up to more than one.", "s",
                  counted("nolocod_activity_seconds_total", "{{activity}}", ""), stacked=True),
            lines("Exchanges", "How they ended, per minute.", _PER_MINUTE,
                  (f"60 * sum by (outcome) ({rate('nolocod_exchanges_total', _OF_NODE)})", "{{outcome}}"), stacked=True),
            lines("Duration", "Of the committed ones, in 10 minutes.", "s",
                  share(0.5, "nolocod_exchange_duration_seconds"), share(0.9, "nolocod_exchange_duration_seconds")),
            lines("Failures by code", "docs/errors.md has the remedies.", _PER_MINUTE,
                  by_code("nolocod_exchange_failures_total"), stacked=True),
            lines("Spread", "L2 norm of the difference to a partner.", "none", gauge("nolocod_partner_spread", "spread")),
            lines("Bytes of exchanges", "Per second.", "Bps", counted("nolocod_exchange_bytes_total", "{{direction}}", "")),
        ),
        "Network": (
            lines("All bytes", "On all connections to peers.", "Bps", counted("nolocod_wire_bytes_total", "{{direction}}", "")),
            lines("Connections", "By reach.", "none", gauge("nolocod_connections", "{{reach}}"), stacked=True),
            lines("Members by NAT class", "How others are reached.", "none",
                  gauge("nolocod_members_reachable", "{{kind}}"), stacked=True),
            lines("Bytes of this month", "Share of --monthly-budget; 0 without one.", "percentunit",
                  gauge("instance:nolocod_month_bytes:ratio", "spent")),
            lines("Places and circuits carried", "For other peers, and the relays that hold a place for this node.", "none",
                  gauge("nolocod_carried_reservations", "places"), gauge("nolocod_carried_circuits_open", "circuits"),
                  gauge("nolocod_relays_held", "relays of its own")),
            lines("Punches", "Tries to replace a relayed connection, per minute.", _PER_MINUTE,
                  counted("nolocod_punches_total", "{{outcome}}")),
        ),
        "Trust": (
            lines("Judgements and bans", "Of peers, per minute.", _PER_MINUTE,
                  counted("nolocod_peer_judgements_total", "judgements"), counted("nolocod_peer_bans_total", "bans")),
            lines("Weight of partners", "What their differences counted for, mean of 10 minutes; 1 in full.", "percentunit",
                  (f"rate(nolocod_partner_weight_sum{{{_OF_NODE}}}[10m]) "
                   f"/ (rate(nolocod_partner_weight_count{{{_OF_NODE}}}[10m]) > 0) or vector(0)", "weight")),
            lines("Members come and go", "Per minute.", _PER_MINUTE, counted("nolocod_members_joined_total", "joined"),
                  counted("nolocod_members_lost_total", "lost")),
        ),
        "Resources": (
            lines("Memory", "Of the network process.", "bytes", gauge("process_resident_memory_bytes", "resident")),
            lines("Processor", "Of the network process.", "percentunit", counted("process_cpu_seconds_total", "cores", "")),
            lines("Tasks and files", "That only grow: a leak.", "none", gauge("nolocod_tasks", "tasks"),
                  gauge("process_open_fds", "open files")),
            lines("Loop lag", "How late the network process answers, in 10 minutes.", "s",
                  share(0.5, "nolocod_loop_lag_seconds"), share(0.99, "nolocod_loop_lag_seconds")),
            lines("Disk left", "For the data directory.", "bytes", gauge("nolocod_disk_free_bytes", "left")),
            lines("Clock", "The members' median minus its own.", "s", gauge("nolocod_clock_offset_seconds", "offset")),
            lines("Trainer failures and errors", "Per minute.", _PER_MINUTE,
                  counted("nolocod_trainer_failures_total", "trainer"),
                  by_code("nolocod_errors_total")),
        ),
    }.items():  # fmt: skip
        made = made.with_row(dashboard.Row(title))
        for chart in charts:
            made = made.with_panel(chart)
    return made


BOARDS: dict[str, Callable[[], dashboard.Dashboard]] = {"swarm.json": swarm, "node.json": node}


def text(make: Callable[[], dashboard.Dashboard]) -> str:
    """A dashboard as it is checked in."""
    plain = json.loads(json.dumps(make().build(), cls=JSONEncoder))
    # Where the SDK differs from @grafana/schema: a query has no interval's keys, an annotation's PromQL is its target's.
    for variable in plain["templating"]["list"]:
        for key in [key for key in variable if key.startswith("auto")]:
            del variable[key]
    for note in plain["annotations"]["list"]:
        note["target"] = {"expr": note.pop("expr"), "refId": "Anno"}
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in BOARDS.items():
        (FOLDER / name).write_text(text(make), encoding="utf-8")


if __name__ == "__main__":
    main()
