"""Fills the report (report.py): follows a node's events, and says at any moment what they come to."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from nolocod import __version__
from nolocod.errors import CATALOGUE
from nolocod.identity import short
from nolocod.observe import events
from nolocod.observe.status.report import ComingReport, CurveReport, ErrorRow, ExchangeRow, PeerRow, RelayRow, StatusReport
from nolocod.observe.words import amount, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event, Reach

_KEPT = 20
"""Exchanges and errors in the report."""
_JUDGED = 512
"""Peers whose reputations and bans are shown."""
_RATE_WINDOW = 60.0
"""Seconds over which tokens per second are averaged."""
_ROUTINE = (events.InnerSteps, events.Traffic, events.HostChecked, events.PeerSeen, events.Contributed, events.Eased)
"""Events that a reader need not see at once."""


class StatusState:
    """Follows a node's events. `clock` gives monotonic seconds, the same that `snapshot` is given; `tasks` how many
    tasks the process runs."""

    def __init__(self, clock: Callable[[], float], tasks: Callable[[], int]) -> None:
        self.clock = clock
        self._tasks = tasks
        self._began = clock()
        self.news = 0
        """Grows with each event that a reader should see at once."""
        self._report = StatusReport(
            version=__version__, peer_id="", run_id="", run_name="", addresses=(), http="", pid=os.getpid(), state="starting"
        )
        """What needs no clock of it."""
        self._state_since = self._began
        self._training_curve, self._validation_curve = Curve(), Curve()
        self._reports: deque[tuple[float, float, int]] = deque()  # (begin, end, tokens)
        self._trained = 0.0
        self._outcomes: Counter[str] = Counter()
        self._exchanges: deque[tuple[float, ExchangeRow]] = deque(maxlen=_KEPT)
        self._coming: deque[tuple[float, int]] = deque()  # (when, bytes of a donor's weights that were here)
        self._saved_at: float | None = None
        self._members: dict[PeerId, tuple[float, events.PeerSeen]] = {}
        self._connected: dict[PeerId, tuple[float, Reach]] = {}
        self._reputations: dict[PeerId, float] = {}
        self._bans: dict[PeerId, float] = {}  # until when
        self._errors: deque[tuple[float, ErrorRow]] = deque(maxlen=_KEPT)
        self._resumes_at: float | None = None
        self._relays: dict[PeerId, float] = {}  # when each reservation ends

    def follow(self, event: Event) -> None:
        """Take note of `event`. Never raises, never blocks."""
        now = self.clock()
        if not isinstance(event, _ROUTINE):
            self.news += 1
        self._follow_training(event, now)
        self._follow_transfers(event, now)
        self._follow_peers(event, now)
        self._follow_allowance(event, now)
        self._follow_reach(event, now)
        match event:
            case events.Started():
                self._set(**asdict(event))
            case events.StateChanged():
                if event.state != self._report.state:
                    self._state_since = now
                self._set(**asdict(event))
            case events.Checkpointed():
                self._saved_at = now
                self._set(checkpoint_round=event.round)
            case events.Contributed():
                self._set(given=event.own, contributors=event.others)
            case events.MemoryTaken():
                self._set(memory=asdict(event))
            case events.DevicesChosen():
                self._set(devices=event.devices)
            case events.TextSupply():
                self._set(text_trouble=event.trouble)
            case events.Amended():
                self._set(amended=(*self._report.amended, f"from round {event.at} on: {event.what}")[-_KEPT:])
            case events.Troubled():
                entry = CATALOGUE.get(event.code)
                title, remedy = (entry.title, entry.remedy) if entry else ("", "")
                row = ErrorRow(code=event.code, message=event.message, age=0.0, title=title, remedy=remedy)
                self._errors.append((now, row))

    def _set(self, **changes: object) -> None:
        self._report = replace(self._report, **changes)

    def _follow_training(self, event: Event, now: float) -> None:
        report = self._report
        match event:
            case events.WeightsLoaded() | events.WeightsFetched():
                self._set(round=event.round)
            case events.InnerSteps():
                steps = report.inner_steps + event.steps
                self._set(inner_steps=steps, tokens=report.tokens + event.tokens)
                self._set(loss=_finite(event.loss), learning_rate=_finite(event.learning_rate))
                self._set(mfu=event.mfu, text_wait=report.text_wait + event.waited)
                self._training_curve.add(steps, event.loss)
                self._trained += event.seconds
                self._reports.append((now - event.seconds, now, event.tokens))
                while self._reports[0][1] < now - _RATE_WINDOW:
                    self._reports.popleft()
            case events.Evaluated():
                self._validation_curve.add(report.inner_steps, event.loss)
                loss, first = _finite(event.loss), report.validation_loss_first
                self._set(validation_loss=loss, validation_loss_first=loss if first is None else first)
            case events.OuterStep():
                self._set(round=event.round, outer_paired=report.outer_paired + (event.kind == "paired"))
                self._set(outer_solo=report.outer_solo + (event.kind == "solo"))
                self._note_spread(event)

    def _note_spread(self, step: events.OuterStep) -> None:
        for index in reversed(range(len(self._exchanges))):
            at, row = self._exchanges[index]
            if row.partner == step.partner and row.outcome == "committed":
                if row.spread is None:
                    self._exchanges[index] = (at, replace(row, spread=_finite(step.spread)))
                return

    def _follow_transfers(self, event: Event, now: float) -> None:
        report = self._report
        match event:
            case events.ExchangeStarted():
                self._set(exchanging_with=event.partner)
            case events.ExchangeEnded():
                self._outcomes[event.outcome] += 1
                role = "initiator" if event.initiator else "responder"
                told = {name: value for name, value in asdict(event).items() if name not in ("session", "initiator")}
                self._exchanges.append((now, ExchangeRow(role=role, spread=None, age=0.0, **told)))
                moved = {"sent": report.sent + event.sent, "received": report.received + event.received}
                self._set(exchanging_with=None, **moved)
            case events.WeightsServed():
                self._set(sent=report.sent + event.size)
            case events.WeightsComing():
                self._note_coming(event, now)
            case events.WeightsFetched():
                known = report.weights.here if report.weights and report.weights.donor == event.donor else 0
                self._set(received=report.received + event.size - known, weights=None)

    def _note_coming(self, event: events.WeightsComing, now: float) -> None:
        report, before = self._report, self._coming
        if report.weights is None or report.weights.donor != event.donor or before[-1][1] > event.here:
            before.clear()  # a part that an earlier process had is no traffic of this one
        came = event.here - before[-1][1] if before else 0
        before.append((now, event.here))
        while before[0][0] < now - _RATE_WINDOW:
            before.popleft()
        rate = (event.here - before[0][1]) / max(now - before[0][0], 1.0)
        left = (event.size - event.here) / rate if rate else None
        weights = ComingReport(donor=event.donor, here=event.here, size=event.size, rate=rate, left=left)
        pace = f"{amount(rate)}/s, {duration(left)} left" if left is not None else "nothing comes now"
        waiting_for = f"the weights of …{short(event.donor)}: {amount(event.here)} of {amount(event.size)}, {pace}"
        self._set(weights=weights, waiting_for=waiting_for, received=report.received + came)

    def _follow_peers(self, event: Event, now: float) -> None:
        match event:
            case events.PeerSeen():
                self._members[event.peer_id] = (now, event)
            case events.PeerLost():
                self._members.pop(event.peer_id, None)
            case events.PeerConnected():
                self._connected[event.peer_id] = (now, event.reach)
            case events.PeerDisconnected():
                self._connected.pop(event.peer_id, None)
            case events.PeerJudged():
                _keep(self._reputations, event.peer_id, event.reputation)
            case events.PeerBanned():
                _keep(self._bans, event.peer_id, now + event.seconds)

    def _follow_allowance(self, event: Event, now: float) -> None:
        match event:
            case events.Allowed():
                line = {"max_upload": event.up, "max_download": event.down, "monthly_budget": event.monthly}
                self._set_allowance(**line, hours=event.hours, limits=event.limits, pause_on_battery=not event.on_battery)
            case events.Eased():
                self._set_allowance(share=event.share, share_why=event.why, temperature=event.temperature, power=event.power)
            case events.Traffic():
                told = {name: getattr(event, name) for name in ("sent", "received", "sending", "receiving", "month")}
                self._set_allowance(**told, month_used=event.month_sent + event.month_received)
            case events.Paused():
                self._set_allowance(paused=event.reason, paused_why=event.why)
                self._resumes_at = None if event.seconds is None else now + event.seconds
            case events.Resumed():
                self._set_allowance(paused="", paused_why="")
                self._resumes_at = None

    def _set_allowance(self, **changes: object) -> None:
        self._set(allowance=replace(self._report.allowance, **changes))

    def _follow_reach(self, event: Event, now: float) -> None:
        found = self._report.reach
        match event:
            case events.ReachFound():
                found = replace(found, **asdict(event))
            case events.RelayHeld():
                self._relays[event.relay] = now + event.seconds
            case events.RelayLost():
                self._relays.pop(event.relay, None)
            case events.Punched():
                found = replace(found, punches=found.punches + 1, punched=found.punched + event.succeeded)
            case events.Relaying():
                found = replace(found, carried=event)
            case events.PartitionHealed():
                found = replace(found, healed=found.healed + 1)
        if found is not self._report.reach:
            self._set(reach=found)

    def snapshot(self, now: float) -> StatusReport:
        """The report at `now` (seconds of the clock given)."""
        followed, uptime = self._report, max(now - self._began, 0.0)
        relays = tuple(RelayRow(peer_id=peer, seconds=max(0.0, end - now)) for peer, end in self._relays.items())
        resumes_in = None if self._resumes_at is None else max(0.0, self._resumes_at - now)
        return replace(
            followed,
            addresses=followed.reach.addresses or followed.addresses,
            uptime=uptime,
            since=now - self._state_since,
            tokens_per_second=self._tokens_per_second(now),
            exchanges_by_outcome=dict(sorted(self._outcomes.items())),
            exchanges=tuple(replace(row, age=now - at) for at, row in reversed(self._exchanges)),
            checkpoint_age=None if self._saved_at is None else now - self._saved_at,
            peers=self._peer_rows(now),
            errors=tuple(replace(row, age=now - at) for at, row in reversed(self._errors)),
            utilisation=min(self._trained / uptime, 1.0) if uptime else 0.0,
            tasks=self._tasks(),
            allowance=replace(followed.allowance, resumes_in=resumes_in),
            reach=replace(followed.reach, relays=relays),
            curve=CurveReport(training=self._training_curve.points, validation=self._validation_curve.points),
        )

    def _tokens_per_second(self, now: float) -> float:
        """Tokens of the reports inside the window, over the time since the first of them began."""
        recent = [report for report in self._reports if report[1] >= now - _RATE_WINDOW]
        span = now - min((begin for begin, _, _ in recent), default=now)
        return sum(tokens for _, _, tokens in recent) / span if span > 0 else 0.0

    def _peer_rows(self, now: float) -> tuple[PeerRow, ...]:
        banned = (peer for peer, until in self._bans.items() if until > now)
        return tuple(self._peer_row(peer, now) for peer in sorted({*self._members, *self._connected, *banned}))

    def _peer_row(self, peer: PeerId, now: float) -> PeerRow:
        connected_at, reach = self._connected.get(peer, (None, None))
        seen_at, seen = self._members.get(peer, (None, None))
        banned_for = self._bans.get(peer, now) - now
        told = {"peer_id": peer} if seen is None else {**asdict(seen), "loss": _finite(seen.loss)}
        return PeerRow(
            **told,
            reputation=self._reputations.get(peer),
            banned_for=banned_for if banned_for > 0 else None,
            reach=reach,
            age=now - (seen_at if seen_at is not None else connected_at or now),
        )


def _keep(table: dict[PeerId, float], peer: PeerId, value: float) -> None:
    """Note `value`, and drop the oldest entry of a full table: peer ids cost an attacker nothing."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > _JUDGED:
        del table[next(iter(table))]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


POINTS = 240


class Curve:
    """All of the past, ever coarser: at most `POINTS` points. When they are full, neighbours become their mean, and from then
    on as many new values make one point. So memory and the report's size stay the same over months."""

    def __init__(self, points: Iterable[tuple[int, float]] = (), stride: int = 1) -> None:
        """`points` and `stride` as they were, to go on from there."""
        self._points = list(points)[: POINTS - 1]
        self._open: list[tuple[int, float]] = []
        self.stride = max(stride, 1)
        """How many values a new point stands for."""

    def add(self, x: int, y: float) -> None:
        """Note a value; one that is not finite is left out. `x` never falls."""
        if not math.isfinite(y):
            return
        self._open.append((x, y))
        if len(self._open) < self.stride:
            return
        self._points.append(_mean(self._open))
        self._open.clear()
        if len(self._points) >= POINTS:
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, POINTS, 2)]
            self.stride *= 2

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Oldest first; the last may stand for fewer values than the others."""
        return (*self._points, *([_mean(self._open)] if self._open else []))


def _mean(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Where they end, and their mean, with as many digits as anybody sees."""
    return points[-1][0], float(f"{sum(y for _, y in points) / len(points):.6g}")
