"""The status report: events in, one plain struct out, which is the whole of /status.json.

The rule: the report has no clock times, only ages in seconds, so that a reader's clock does not matter;
and no number in it is NaN or infinite (`None` instead), so that it is JSON everywhere.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from nolocod import __version__
from nolocod.errors import CATALOGUE
from nolocod.observe.events import (
    Allowed,
    Checkpointed,
    Evaluated,
    ExchangeEnded,
    ExchangeStarted,
    HostChecked,
    InnerSteps,
    NatClass,
    OuterStep,
    PartitionHealed,
    Paused,
    PeerBanned,
    PeerConnected,
    PeerDisconnected,
    PeerJudged,
    PeerLost,
    PeerSeen,
    Punched,
    Reach,
    ReachFound,
    RelayHeld,
    Relaying,
    RelayLost,
    Resumed,
    Started,
    StateChanged,
    Traffic,
    Troubled,
    WeightsFetched,
    WeightsLoaded,
    WeightsServed,
)
from nolocod.observe.status.curve import Curve

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event

_KEPT = 20
"""Exchanges and errors in the report."""
_JUDGED = 512
"""Peers whose reputations and bans are shown."""
_RATE_WINDOW = 60.0
"""Seconds over which tokens per second are averaged."""


_ROUTINE = (InnerSteps, Traffic, HostChecked, PeerSeen)


class ExchangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ended exchange. `age` is seconds since its end; `spread` is there once it was applied."""

    partner: str
    role: str
    outcome: str
    sent: int
    received: int
    seconds: float
    spread: float | None
    error: str
    reason: str
    age: float


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer. `age` is seconds since what it says changed; a peer that is connected but not (yet) a
    live member has an empty `state`."""

    peer_id: str
    round: int | None
    tokens: int | None
    loss: float | None
    state: str
    reach: Reach | None
    """How it is connected now, if it is."""
    nat: NatClass | None
    """How others reach it, by its own word."""
    age: float
    reputation: float | None
    """From 0 to 1; None for a peer that did nothing yet that it could be judged by."""
    banned_for: float | None
    """Seconds, while it is banned."""


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """`title` and `remedy` are the catalogue's."""

    code: str
    message: str
    age: float
    title: str = ""
    remedy: str = ""


class CurveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Losses by inner steps of this process, oldest first; each point may be the mean of several."""

    training: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()


class AllowanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the node uses of its owner's line and day, and what it may. Bytes, bytes per second; None for no limit."""

    sent: int = 0
    """All bytes on the connections to peers, heartbeats and all, by this process."""
    received: int = 0
    sending: float = 0.0
    receiving: float = 0.0
    max_upload: int | None = None
    max_download: int | None = None
    month: str = ""
    """Like "2025-06", UTC."""
    month_used: int = 0
    """Sent and received, over restarts."""
    monthly_budget: int | None = None
    hours: tuple[str, ...] = ()
    """Local time; empty for all hours."""
    pause_on_battery: bool = False
    paused: str = ""
    """ "hours", "battery" or "budget" while the node is paused."""
    paused_why: str = ""
    resumes_in: float | None = None
    """Seconds, where only time has to pass."""


class RelayRow(msgspec.Struct, frozen=True, kw_only=True):
    """A relay that keeps a place for this node, for `seconds` more unless it is renewed."""

    peer_id: str
    seconds: float


class CarriedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this node carries for others: now, and since it started."""

    reservations: int = 0
    open: int = 0
    circuits: int = 0
    bytes: int = 0


class ReachReport(msgspec.Struct, frozen=True, kw_only=True):
    """How others reach this node."""

    kind: NatClass | None = None
    """None while it is not known."""
    why: str = ""
    """What was seen, and what the owner can do about it."""
    addresses: tuple[str, ...] = ()
    """What peers are told, best first."""
    relays: tuple[RelayRow, ...] = ()
    punches: int = 0
    """Tries to replace a relayed connection by a straight one."""
    punched: int = 0
    """Those that succeeded."""
    healed: int = 0
    """Times that another part of the run was found again."""
    carried: CarriedReport = CarriedReport()


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a node tells about itself. Bytes, seconds, nats per token.

    Counts are those of this process: a restart begins them anew, while `round` goes on.
    """

    version: str
    peer_id: str
    run_id: str
    run_name: str
    addresses: tuple[str, ...]
    http: str
    pid: int
    uptime: float
    state: str
    waiting_for: str
    since: float
    """Seconds in this state."""
    round: int
    inner_steps: int
    tokens: int
    tokens_per_second: float
    """Mean of the last minute."""
    loss: float | None
    validation_loss_first: float | None
    validation_loss: float | None
    learning_rate: float | None
    outer_paired: int
    outer_solo: int
    exchanging_with: str | None
    exchanges_by_outcome: dict[str, int]
    exchanges: tuple[ExchangeRow, ...]
    """The last 20, newest first."""
    checkpoint_round: int | None
    checkpoint_age: float | None
    peers: tuple[PeerRow, ...]
    errors: tuple[ErrorRow, ...]
    """The last 20, newest first."""
    sent: int
    received: int
    utilisation: float
    """Share of the uptime spent in training steps."""
    tasks: int
    """Of the network process, all at this moment: a count that only grows is a leak."""
    allowance: AllowanceReport
    reach: ReachReport
    curve: CurveReport = CurveReport()


class StatusState:
    """Follows a node's events. `clock` gives monotonic seconds, the same that `snapshot` is given; `tasks` how many
    tasks the process runs."""

    def __init__(self, clock: Callable[[], float], tasks: Callable[[], int]) -> None:
        self.clock = clock
        self._tasks = tasks
        self._began = clock()
        self.news = 0
        """Grows with each event that a reader should see at once; inner steps and traffic can wait a second."""
        self._started: Started | None = None
        self._state = StateChanged("starting")
        self._state_since = self._began
        self._round = 0
        self._inner_steps = self._tokens = 0
        self._loss: float | None = None
        self._rate: float | None = None
        self._training_curve, self._validation_curve = Curve(), Curve()
        self._validation_first: float | None = None
        self._validation: float | None = None
        self._reports: deque[tuple[float, float, int]] = deque()  # (begin, end, tokens)
        self._trained = 0.0
        self._outer: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._exchanges: deque[tuple[float, ExchangeEnded, float | None]] = deque(maxlen=_KEPT)
        self._exchanging: PeerId | None = None
        self._checkpoint: tuple[float, int] | None = None
        self._members: dict[PeerId, tuple[float, PeerSeen]] = {}
        self._connected: dict[PeerId, tuple[float, Reach]] = {}
        self._reputations: dict[PeerId, float] = {}
        self._bans: dict[PeerId, float] = {}  # until when
        self._errors: deque[tuple[float, Troubled]] = deque(maxlen=_KEPT)
        self._sent = self._received = 0
        self._allowed: Allowed | None = None
        self._traffic: Traffic | None = None
        self._paused: tuple[float, Paused] | None = None
        self._reach = ReachFound(None, "", ())
        self._relays: dict[PeerId, float] = {}  # when each place ends
        self._carried = Relaying(0, 0, 0, 0)
        self._punches: Counter[bool] = Counter()
        self._healed = 0

    def follow(self, event: Event) -> None:
        """Take note of `event`. Never raises, never blocks."""
        now = self.clock()
        if not isinstance(event, _ROUTINE):
            self.news += 1
        match event:
            case Started():
                self._started = event
            case StateChanged():
                if event.state != self._state.state:
                    self._state_since = now
                self._state = event
            case Checkpointed():
                self._checkpoint = (now, event.round)
            case Troubled():
                self._errors.append((now, event))
            case PeerSeen() | PeerLost() | PeerConnected() | PeerDisconnected():
                self._follow_peers(event, now)
            case WeightsLoaded():
                self._round = event.round
            case InnerSteps() | Evaluated() | OuterStep():
                self._follow_training(event, now)
            case ExchangeStarted() | ExchangeEnded() | WeightsServed() | WeightsFetched():
                self._follow_transfers(event, now)
            case PeerJudged():
                _keep(self._reputations, event.peer_id, event.reputation)
            case PeerBanned():
                _keep(self._bans, event.peer_id, now + event.seconds)
            case Allowed():
                self._allowed = event
            case Traffic():
                self._traffic = event
            case Paused():
                self._paused = (now, event)
            case Resumed():
                self._paused = None
            case HostChecked():
                pass  # for whoever watches over days; the doctor looks at it anew
            case ReachFound() | RelayHeld() | RelayLost() | Punched() | Relaying() | PartitionHealed():
                self._follow_reach(event, now)

    def _follow_reach(
        self, event: ReachFound | RelayHeld | RelayLost | Punched | Relaying | PartitionHealed, now: float
    ) -> None:
        match event:
            case ReachFound():
                self._reach = event
            case RelayHeld():
                self._relays[event.relay] = now + event.seconds
            case RelayLost():
                self._relays.pop(event.relay, None)
            case Punched():
                self._punches[event.succeeded] += 1
            case Relaying():
                self._carried = event
            case PartitionHealed():
                self._healed += 1

    def _follow_training(self, event: InnerSteps | Evaluated | OuterStep, now: float) -> None:
        match event:
            case InnerSteps():
                self._inner_steps += event.steps
                self._tokens += event.tokens
                self._loss, self._rate = event.loss, event.learning_rate
                self._training_curve.add(self._inner_steps, event.loss)
                self._trained += event.seconds
                self._reports.append((now - event.seconds, now, event.tokens))
                while self._reports[0][1] < now - _RATE_WINDOW:
                    self._reports.popleft()
            case Evaluated():
                self._validation = event.loss
                self._validation_curve.add(self._inner_steps, event.loss)
                if self._validation_first is None:
                    self._validation_first = event.loss
            case OuterStep():
                self._round = event.round
                self._outer[event.kind] += 1
                self._note_spread(event)

    def _note_spread(self, step: OuterStep) -> None:
        for index in reversed(range(len(self._exchanges))):
            at, ended, spread = self._exchanges[index]
            if ended.partner == step.partner and ended.outcome == "committed":
                if spread is None:
                    self._exchanges[index] = (at, ended, step.spread)
                return

    def _follow_transfers(self, event: ExchangeStarted | ExchangeEnded | WeightsServed | WeightsFetched, now: float) -> None:
        match event:
            case ExchangeStarted():
                self._exchanging = event.partner
            case ExchangeEnded():
                self._exchanging = None
                self._outcomes[event.outcome] += 1
                self._exchanges.append((now, event, None))
                self._sent += event.sent
                self._received += event.received
            case WeightsServed():
                self._sent += event.size
            case WeightsFetched():
                self._received += event.size
                self._round = event.round

    def _follow_peers(self, event: PeerSeen | PeerLost | PeerConnected | PeerDisconnected, now: float) -> None:
        match event:
            case PeerSeen():
                self._members[event.peer_id] = (now, event)
            case PeerLost():
                self._members.pop(event.peer_id, None)
            case PeerConnected():
                self._connected[event.peer_id] = (now, event.reach)
            case PeerDisconnected():
                self._connected.pop(event.peer_id, None)

    def snapshot(self, now: float) -> StatusReport:
        """The report at `now` (seconds of the clock given)."""
        started = self._started or Started("", "", "", (), "")  # type: ignore[arg-type]  # an empty peer id: none yet
        uptime = max(now - self._began, 0.0)
        return StatusReport(
            version=__version__,
            peer_id=started.peer_id,
            run_id=started.run_id,
            run_name=started.run_name,
            addresses=self._reach.addresses or started.addresses,
            http=started.http,
            pid=os.getpid(),
            uptime=uptime,
            state=self._state.state,
            waiting_for=self._state.waiting_for,
            since=now - self._state_since,
            round=self._round,
            inner_steps=self._inner_steps,
            tokens=self._tokens,
            tokens_per_second=self._tokens_per_second(now),
            loss=_finite(self._loss),
            validation_loss_first=_finite(self._validation_first),
            validation_loss=_finite(self._validation),
            learning_rate=_finite(self._rate),
            outer_paired=self._outer["paired"],
            outer_solo=self._outer["solo"],
            exchanging_with=self._exchanging,
            exchanges_by_outcome=dict(sorted(self._outcomes.items())),
            exchanges=tuple(_exchange_row(ended, spread, now - at) for at, ended, spread in reversed(self._exchanges)),
            checkpoint_round=self._checkpoint[1] if self._checkpoint else None,
            checkpoint_age=now - self._checkpoint[0] if self._checkpoint else None,
            peers=self._peer_rows(now),
            errors=tuple(_error_row(error, now - at) for at, error in reversed(self._errors)),
            sent=self._sent,
            received=self._received,
            utilisation=min(self._trained / uptime, 1.0) if uptime else 0.0,
            tasks=self._tasks(),
            allowance=self._allowance(now),
            reach=self._reach_report(now),
            curve=CurveReport(training=self._training_curve.points, validation=self._validation_curve.points),
        )

    def _reach_report(self, now: float) -> ReachReport:
        carried = self._carried
        return ReachReport(
            kind=self._reach.kind,
            why=self._reach.why,
            addresses=self._reach.addresses,
            relays=tuple(RelayRow(peer_id=peer, seconds=max(0.0, end - now)) for peer, end in self._relays.items()),
            punches=self._punches.total(),
            punched=self._punches[True],
            healed=self._healed,
            carried=CarriedReport(
                reservations=carried.reservations, open=carried.open, circuits=carried.circuits, bytes=carried.bytes
            ),
        )

    def _allowance(self, now: float) -> AllowanceReport:
        allowed = self._allowed or Allowed(None, None, None, (), on_battery=True)
        traffic = self._traffic or Traffic(0, 0, 0.0, 0.0, "", 0, 0)
        at, paused = self._paused or (now, None)
        return AllowanceReport(
            sent=traffic.sent,
            received=traffic.received,
            sending=traffic.sending,
            receiving=traffic.receiving,
            max_upload=allowed.up,
            max_download=allowed.down,
            month=traffic.month,
            month_used=traffic.month_sent + traffic.month_received,
            monthly_budget=allowed.monthly,
            hours=allowed.hours,
            pause_on_battery=not allowed.on_battery,
            paused=paused.reason if paused else "",
            paused_why=paused.why if paused else "",
            resumes_in=max(0.0, paused.seconds - (now - at)) if paused and paused.seconds is not None else None,
        )

    def _tokens_per_second(self, now: float) -> float:
        """Tokens of the reports inside the window, over the time since the first of them began."""
        recent = [report for report in self._reports if report[1] >= now - _RATE_WINDOW]
        span = now - min((begin for begin, _, _ in recent), default=now)
        return sum(tokens for _, _, tokens in recent) / span if span > 0 else 0.0

    def _peer_rows(self, now: float) -> tuple[PeerRow, ...]:
        return tuple(self._peer_row(peer, now) for peer in sorted({*self._members, *self._connected, *self._banned(now)}))

    def _banned(self, now: float) -> list[PeerId]:
        return [peer for peer, until in self._bans.items() if until > now]

    def _peer_row(self, peer: PeerId, now: float) -> PeerRow:
        connected_at, reach = self._connected.get(peer, (None, None))
        seen_at, seen = self._members.get(peer, (None, None))
        banned_for = self._bans.get(peer, now) - now
        return PeerRow(
            peer_id=peer,
            reputation=self._reputations.get(peer),
            banned_for=banned_for if banned_for > 0 else None,
            round=seen.round if seen else None,
            tokens=seen.tokens if seen else None,
            loss=_finite(seen.loss) if seen else None,
            state=seen.state if seen else "",
            reach=reach,
            nat=seen.nat if seen else None,
            age=now - (seen_at if seen_at is not None else connected_at or now),
        )


def _exchange_row(ended: ExchangeEnded, spread: float | None, age: float) -> ExchangeRow:
    return ExchangeRow(
        partner=ended.partner,
        role="initiator" if ended.initiator else "responder",
        outcome=ended.outcome,
        sent=ended.sent,
        received=ended.received,
        seconds=ended.seconds,
        spread=_finite(spread),
        error=ended.error,
        reason=ended.reason,
        age=age,
    )


def _error_row(error: Troubled, age: float) -> ErrorRow:
    entry = CATALOGUE.get(error.code)
    title, remedy = (entry.title, entry.remedy) if entry else ("", "")
    return ErrorRow(code=error.code, message=error.message, age=age, title=title, remedy=remedy)


def _keep(table: dict[PeerId, float], peer: PeerId, value: float) -> None:
    """Note something of a peer, and forget it of the one that was told of longest ago: ids cost strangers nothing."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > _JUDGED:
        del table[next(iter(table))]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
