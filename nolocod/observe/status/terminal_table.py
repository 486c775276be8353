"""Status reports as tables for a terminal, and as lines where there is none.

The rule: 80 columns suffice, numbers never wrap, and a peer's text is shown as text, never as markup. Only an address may
be longer: it stays on one line, because people paste it, except on a screen that is redrawn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nolocod.identity import short
from nolocod.observe.words import REACHABLE, amount, duration, plain, scaled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from nolocod.observe.status.report import AllowanceReport, CurveReport, ExchangeRow, PeerRow, ReachReport, StatusReport


_BARS = "▁▂▃▄▅▆▇█"
_COURSE = 40
"""Bars of the loss curve at most."""
_STEADY = ("node", "traffic", "month", "checkpoint", "process", "page", "addresses")
"""Facts that a low screen leaves out: they hardly change, or follow from the rest."""
_SIZES = [(most, False) for most in range(8, 3, -1)] + [(most, True) for most in range(8, 0, -1)]
"""Rows of a watched table's sections, and whether it is brief; the first that fits is taken."""


def node_table(report: StatusReport, most: int | None = None, *, brief: bool = False) -> RenderableType:
    """One node in full: its state, training, errors, peers and exchanges. With `most`, at most so many rows of each: the
    nearest peers, the newest errors and exchanges."""
    sections: list[RenderableType] = [_facts(report, _STEADY if brief else (), live=most is not None)]
    if report.errors:
        rows = [(error.code, error.message, duration(error.age)) for error in report.errors[:most]]
        sections.append(table("<error <message >ago", rows, wrapped="message"))
    if report.peers:
        sections.append(_cut(_peers(_nearest(report)[:most]), len(report.peers), most))
    if report.exchanges:
        sections.append(_cut(_exchanges(report.exchanges[:most]), len(report.exchanges), most))
    first, *rest = sections
    return Group(first, *(Group("", section) for section in rest))


@dataclass(frozen=True)
class Watched:
    """One node on a screen: as much of its table as fits."""

    report: StatusReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = [node_table(self.report, most, brief=brief) for most, brief in _SIZES]
        yield next(
            (one for one in tables if len(console.render_lines(one, options.reset_height())) <= console.height), tables[-1]
        )


def _nearest(report: StatusReport) -> list[PeerRow]:
    """Banned peers and those of the last exchanges first, then who is connected."""
    partners = {report.exchanging_with, *(one.partner for one in report.exchanges)}
    return sorted(
        report.peers, key=lambda peer: (peer.banned_for is None, peer.peer_id not in partners, peer.reach is None, peer.peer_id)
    )


def _cut(table: Table, rows: int, most: int | None) -> RenderableType:
    return table if most is None or rows <= most else Group(table, f"and {rows - most} more")


def _peers(peers: Iterable[PeerRow]) -> Table:
    rows = [
        (
            short(peer.peer_id),
            peer.state or "connected",
            "-" if peer.round is None else str(peer.round),
            _count(peer.tokens),
            loss_text(peer.loss or None),  # a newcomer has none yet
            peer.reach or "-",
            peer.nat or "-",
            _trust(peer),
            duration(peer.age),
        )
        for peer in peers
    ]
    return table("<peer <state >round >tokens >loss <reach <nat >trust >changed", rows)


def _trust(peer: PeerRow) -> str:
    """Its reputation from 0 to 1, or for how long it is banned."""
    if peer.banned_for is not None:
        return f"ban {duration(peer.banned_for)}"
    return "-" if peer.reputation is None else f"{peer.reputation:.2f}"


def _exchanges(exchanges: Iterable[ExchangeRow]) -> Table:
    rows = [
        (
            short(one.partner),
            one.role,
            one.outcome.replace("_", " ") + (f" {one.error}" if one.error else ""),
            amount(one.sent),
            amount(one.received),
            f"{one.seconds:.2f} s",
            "-" if one.spread is None else f"{one.spread:.3g}",
            duration(one.age),
        )
        for one in exchanges
    ]
    return table("<partner <role <outcome >sent >received >took >spread >ago", rows)


def _facts(report: StatusReport, without: Collection[str], *, live: bool) -> RenderableType:
    waiting = f", waiting for {report.waiting_for}" if report.waiting_for else ""
    first = f" (first {report.validation_loss_first:.4g})" if report.validation_loss_first is not None else ""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.exchanges_by_outcome.items())
    checkpoint = (
        "none yet"
        if report.checkpoint_round is None or report.checkpoint_age is None
        else f"round {report.checkpoint_round}, {duration(report.checkpoint_age)} ago"
    )
    mfu = "" if report.mfu is None else f" (MFU {report.mfu:.0%})"
    facts = {
        "run": f"{report.run_name or '-'} ({report.run_id[:12] or '-'})",
        "node": f"{report.peer_id or '-'}",
        "state": f"{report.state}{waiting} ({duration(report.since)})",
        "training": f"round {report.round}, {report.inner_steps} inner steps, {_count(report.tokens)} tokens, "
        f"{_count(report.tokens_per_second)} tokens/s{mfu}, {duration(report.text_wait)} waiting for text",
        "loss": f"{loss_text(report.loss)}, validation {loss_text(report.validation_loss)}{first}",
        **({"devices": f"{len(report.devices)}: {', '.join(report.devices)}"} if report.devices[1:] else {}),
        **({"memory": memory_text(report.memory)} if report.memory else {}),
        **({"text": f"no new one: {report.text_trouble}"} if report.text_trouble else {}),
        **({"amended": report.amended[-1]} if report.amended else {}),
        **_course(report.curve),
        "outer": f"{report.outer_paired} paired, {report.outer_solo} solo",
        "exchanges": (outcomes or "none yet")
        + (f"; now with …{short(report.exchanging_with)}" if report.exchanging_with else ""),
        "traffic": f"{amount(report.sent)} sent, {amount(report.received)} received",
        **_allowance(report.allowance),
        **_reach(report.reach),
        "checkpoint": checkpoint,
        "process": f"nolocod {report.version}, pid {report.pid}, up {duration(report.uptime)}, "
        f"{report.utilisation:.0%} of it in training steps",
        "page": f"http://{report.http}/" if report.http else "-",
    }
    if live or not report.addresses:
        facts["addresses"] = "\n".join(report.addresses) or "-"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        if name in without:
            continue
        grid.add_row(name, Text("\n".join(plain(line) for line in value.split("\n"))))
    if "addresses" in facts:
        return grid
    lines = (Text(plain(address), no_wrap=True, overflow="ignore") for address in report.addresses)
    return Group(grid, Text("addresses", style="bold"), *lines)


def memory_text(parts: dict[str, int]) -> str:
    """Bytes by part, the largest first."""
    return ", ".join(f"{name} {amount(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))


def _course(curve: CurveReport) -> dict[str, str]:
    """The training loss since the process began, as bars, with the values of the highest and the lowest."""
    values = [loss for _, loss in curve.training]
    if len(values) < 2:
        return {}
    low, high = min(values), max(values)
    wide = min(len(values), _COURSE)
    edges = [index * len(values) // wide for index in range(wide + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    bars = "".join(_BARS[round((mean - low) / ((high - low) or 1.0) * (len(_BARS) - 1))] for mean in means)
    return {"course": f"{bars} {high:.4g} to {low:.4g}"}


def _reach(report: ReachReport) -> dict[str, str]:
    """How others reach it, and what it relays for them, if anything."""
    relays = f" (relays: {', '.join(short(one.peer_id) for one in report.relays)})" if report.relays else ""
    because = f", because {report.why}" if report.why else ""
    facts = {"reachable": REACHABLE[report.kind] + relays + because}
    if report.punches:
        facts["punched"] = f"{report.punched} of {report.punches} connections"
    carried = report.carried
    if carried.reservations or carried.circuits:
        facts["relay"] = (
            f"{carried.reservations} reservations, {carried.open} circuits now, {carried.circuits} in all, "
            f"{amount(carried.bytes)}"
        )
    return facts


def _allowance(report: AllowanceReport) -> dict[str, str]:
    """The traffic, the owner's limits, and "paused" only while the node is paused."""
    facts = {
        "line": f"{_speed(report.sending, report.max_upload)} up, {_speed(report.receiving, report.max_download)} down",
        "month": amount(report.month_used) + (f" of {amount(report.monthly_budget)}" if report.monthly_budget else ""),
    }
    if report.hours or report.pause_on_battery:
        trains = f"{', '.join(report.hours)} (local time)" if report.hours else "at all hours"
        facts["trains"] = trains + (", not on battery" if report.pause_on_battery else "")
    others = {key: text for key, text in report.limits.items() if key not in ("hours", "pause-on-battery")}
    if others:
        facts["limits"] = ", ".join(f"{key} {text}" for key, text in others.items())
    if computes := _computes(report):
        facts["computes"] = computes
    if report.paused:
        after = f" (resumes in {duration(report.resumes_in)})" if report.resumes_in is not None else ""
        facts["paused"] = report.paused_why + after
    return facts


def _computes(report: AllowanceReport) -> str:
    """In how much of the time, and what was measured; empty where no limit asks for that."""
    measured = (report.temperature, "°C"), (report.power, "W")
    parts = [f"{value:.0f} {unit}" for value, unit in measured if value is not None]
    if report.share < 1:
        parts.insert(0, f"{report.share:.0%} of the time" + (f", {report.share_why}" if report.share_why else ""))
    return ", ".join(parts)


def _speed(rate: float, limit: int | None) -> str:
    return f"{amount(rate)}/s" + (f" of {amount(limit)}/s" if limit is not None else "")


def fleet_table(hosts: Iterable[tuple[str, StatusReport | None, str]]) -> Table:
    """Hosts, one line each: (name, report, what failed there), without the last two if it is down; errors of ten minutes."""

    def cells(name: str, report: StatusReport | None, reason: str) -> tuple[str, ...]:
        _, state, number, _, speed, loss, _, _, _, partner, _ = _swarm_cells(0, report)
        codes = dict.fromkeys(error.code for error in report.errors if error.age < 600) if report else ()
        return name, state if report or reason else "down", number, speed, loss, partner, reason or " ".join(codes) or "-"

    header = "<host <state >round >tokens/s >loss <partner <errors"
    return table(header, (cells(*host) for host in hosts), wrapped="errors")


def swarm_table(reports: Iterable[StatusReport | None]) -> Table:
    """A swarm, one line per node; None for a node that does not answer."""
    header = "<node <state >round >steps >tokens/s >loss >valid. >paired >solo <partner >peers"
    return table(header, map(_swarm_cells, count(), reports))


def _swarm_cells(index: int, report: StatusReport | None) -> tuple[str, ...]:
    if report is None:
        return (f"node-{index}", "no answer", *["-"] * 9)
    return (
        f"node-{index}",
        report.state,
        str(report.round),
        _count(report.inner_steps),
        _count(report.tokens_per_second),
        loss_text(report.loss),
        loss_text(report.validation_loss),
        str(report.outer_paired),
        str(report.outer_solo),
        _partner(report),
        str(sum(1 for peer in report.peers if peer.state)),
    )


def swarm_lines(reports: Iterable[StatusReport | None]) -> list[str]:
    """The same for a log or a pipe: one line per node that can be read alone."""
    line = "{}: {}, round {}, {} steps, {} tokens/s, loss {}, validation {}, outer {} paired {} solo, partner {}, {} peers"
    return [plain((line if one else "{}: {}").format(*_swarm_cells(index, one))) for index, one in enumerate(reports)]


def _partner(report: StatusReport) -> str:
    """Whom it exchanges with now, else the last with whom it did."""
    if report.exchanging_with:
        return short(report.exchanging_with)
    return next((short(one.partner) for one in report.exchanges if one.outcome == "committed"), "-")


def table(header: str, rows: Iterable[Sequence[str]], *, wrapped: str = "") -> Table:
    """Columns named "<left" or ">right"; only the column `wrapped` may take several lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in re.split(r"\s+(?=[<>])", header):
        name = column[1:]
        table.add_column(
            name,
            justify="left" if column[0] == "<" else "right",
            no_wrap=name != wrapped,
            overflow="fold" if wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def _count(number: float | None) -> str:
    """A count for people: 950, 5.2k, 1.3M."""
    return "-" if number is None else scaled(number, "", "k", "M", "G", "T", "P")


def loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
