"""The log on stderr: "HH:MM:SS level message", or the same as JSON; one line per thing that happened.

The rule: events become lines here and nowhere else; what repeats more often than ten times a minute is
folded into a count, and no text of a peer can break a line or drive the terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

from nolocod.identity import short
from nolocod.observe.events import (
    MADE_ROOM,
    Allowed,
    Checkpointed,
    DoubtSettled,
    Evaluated,
    ExchangeEnded,
    ExchangeStarted,
    HostChecked,
    InnerSteps,
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

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event, NatClass

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("human", "json")
_PER_MINUTE = 10
_MINUTE = 60.0
_LOUD = ("noise", "zeroconf", "aioquic", "filelock", "urllib3", "httpx", "datasets", "transformers", "huggingface_hub")
"""Libraries that warn of everyday life, or that set their own level when imported; libp2p is `p2p.host`'s."""

REACHABLE: dict[NatClass | None, str] = {
    "public": "directly",
    "cone": "by punching",
    "symmetric": "through relays",
    "client": "by nobody",
    None: "in ways not known yet",
}
"""How others reach a node, in words."""

_log = logging.getLogger("nolocod")


def set_up(
    level: str = "info",
    form: str = "human",
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    source: str = "",
) -> None:
    """Send our log at `level` (one of LEVELS) in `form` (one of FORMATS), and the libraries' warnings, to `stream`
    (default stderr).

    `clock` gives seconds. `source` is put before each message when several processes share one stream.
    Calling it again replaces the former set-up.
    """
    handler = FoldingHandler(stream or sys.stderr, clock)
    handler.setFormatter(_JsonFormatter(source) if form == "json" else _Formatter(source))
    root = logging.getLogger()
    for former in [one for one in root.handlers if isinstance(one, FoldingHandler)]:
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    _log.setLevel(level.upper())
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING if level == "debug" else logging.ERROR)


def plain(text: str) -> str:
    """`text` on one line and without control characters: it may come from a peer."""
    return "".join(char if char.isprintable() else " " for char in text)


def amount(size: float) -> str:
    """Bytes for people, in powers of 1000: 3_350_000 is "3.35 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds for people: "12 s", "3 min", "2.5 h", "4.0 d"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


class _Formatter(logging.Formatter):
    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = f"{source}: " if source else ""

    def format(self, record: logging.LogRecord) -> str:
        # A record of somebody else's names its logger, so that the reader knows whom to ask.
        origin = "" if record.name == _log.name else f"{record.name}: "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower()} {self._source}{origin}{plain(record.getMessage())}"
        if record.exc_info and _log.isEnabledFor(logging.DEBUG):
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    """One object a line, of ASCII alone, so that no text of a peer can drive what shows it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        name, fields = _told(record)
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": name,
            "message": record.getMessage(),
            "fields": {
                key: None if isinstance(value, float) and not isfinite(value) else value for key, value in fields.items()
            },
        }
        if self._source:
            told["source"] = self._source
        if record.exc_info and _log.isEnabledFor(logging.DEBUG):
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str).replace("\x7f", "\\u007f")  # all else that is not printable ASCII is escaped


def _told(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The name of what a record tells, and its fields; "log" for one that was not made of an event."""
    event, more = getattr(record, "event", "log"), getattr(record, "more", {})
    if is_dataclass(event) and not isinstance(event, type):
        return _snake(type(event).__name__), asdict(event) | more
    return str(event), more


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class FoldingHandler(logging.StreamHandler[TextIO]):
    """Lets ten records of one template through per minute, then counts, and tells the count afterwards."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # (logger, template): (window's begin, records in it)

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._close_windows(now)
        key = (record.name, str(record.msg))
        begin, count = self._seen.get(key, (now, 0))
        self._seen[key] = (begin, count + 1)
        if count < _PER_MINUTE or record.levelno >= logging.CRITICAL:
            super().emit(record)

    def close(self) -> None:
        self._close_windows(float("inf"))
        super().close()

    def _close_windows(self, now: float) -> None:
        for key, (begin, count) in list(self._seen.items()):
            if now - begin >= _MINUTE:
                del self._seen[key]
                if count > _PER_MINUTE:
                    text = f"{count - _PER_MINUTE} more within a minute like: {key[1]}"
                    told = logging.LogRecord(key[0], logging.INFO, "", 0, "%s", (text,), None)
                    told.event, told.more = "folded", {"count": count - _PER_MINUTE, "like": key[1]}
                    super().emit(told)


class _Teller(logging.LoggerAdapter[logging.Logger]):
    """Gives each record the event that it tells of, and what else its line shows."""

    event: Event | None = None
    more: dict[str, object]

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {"event": self.event, "more": self.more}}


class LogFollower:
    """Turns a node's events into log lines."""

    def __init__(self) -> None:
        self._log = _Teller(_log)
        self._state = ""
        self._loss = float("nan")
        self._committed: dict[PeerId, ExchangeEnded] = {}
        self._members: set[PeerId] = set()
        self._paused = ""
        self._reach: NatClass | None = None
        self._relays: set[PeerId] = set()
        self._carried = 0

    def follow(self, event: Event) -> None:
        """Log `event`, if it is worth a line. Never raises, never blocks."""
        self._log.event, self._log.more = event, {}
        match event:
            case Started():
                where = ", ".join(event.addresses) or "no address"
                self._log.info("node …%s in run %s (%s) at %s", short(event.peer_id), event.run_name, event.run_id[:12], where)
                self._log.info("status page at http://%s/", event.http)
            case StateChanged():
                self._follow_state(event)
            case WeightsLoaded():
                self._log.info("starting from the %s's weights, round %d", event.source, event.round)
            case InnerSteps():
                self._loss = event.loss
                rate = event.tokens / event.seconds if event.seconds > 0 else 0.0
                self._log.debug("%d inner steps: loss %.4g, %.3g tokens/s", event.steps, event.loss, rate)
            case Evaluated():
                self._log.info("round %d: validation loss %.4g", event.round, event.loss)
            case OuterStep():
                self._follow_outer(event)
            case Checkpointed():
                self._log.info("checkpoint of round %d: %s in %.2f s", event.round, amount(event.size), event.seconds)
            case ExchangeStarted():
                self._log.debug("exchange with …%s %s", short(event.partner), "offered" if event.initiator else "accepted")
            case ExchangeEnded():
                self._follow_exchange(event)
            case DoubtSettled():
                decided = "its partner applied it, this node did not" if event.committed else "nobody applied it"
                self._log.info("exchange with …%s is in doubt no more: %s", short(event.partner), decided)
            case Troubled():
                self._log.warning("%s %s", event.code, event.message)
            case Paused() | Resumed():
                self._follow_pause(event)
            case Allowed() | Traffic() | HostChecked():
                pass
            case ReachFound() | RelayHeld() | RelayLost() | Punched() | Relaying() | PartitionHealed():
                self._follow_reach(event)
            case PeerJudged():
                self._log.debug("peer …%s: reputation %.2f (%s)", short(event.peer_id), event.reputation, event.why)
            case PeerBanned():
                self._log.warning("peer …%s is banned for %s: %s", short(event.peer_id), duration(event.seconds), event.why)
            case _:
                self._follow_peers(event)

    def _follow_reach(self, event: ReachFound | RelayHeld | RelayLost | Punched | Relaying | PartitionHealed) -> None:
        match event:
            case ReachFound():
                # how many saw what changes all the time: the new kind is news, the rest is detail
                level = logging.DEBUG if event.kind == self._reach else logging.INFO
                self._reach = event.kind
                self._log.log(level, "reachable %s, because %s", REACHABLE[event.kind], event.why)
            case RelayHeld():
                renewed = event.relay in self._relays
                self._relays.add(event.relay)
                level = logging.DEBUG if renewed else logging.INFO
                self._log.log(level, "relay …%s holds a place for us for %s", short(event.relay), duration(event.seconds))
            case RelayLost():
                self._relays.discard(event.relay)
                self._log.info("relay …%s lost: %s", short(event.relay), event.reason)
            case Punched(succeeded=True):
                self._log.info("straight connection to …%s punched in %.1f s", short(event.peer_id), event.seconds)
            case Punched():
                self._log.info("no straight connection to …%s: %s", short(event.peer_id), event.reason)
            case Relaying():
                if event.reservations != self._carried:
                    self._carried = event.reservations
                    self._log.info("places held for other peers: %d", event.reservations)
            case PartitionHealed():
                self._log.info("another part of the run found through …%s: %d members", short(event.peer_id), event.members)

    def _follow_pause(self, event: Paused | Resumed) -> None:
        # The same reason again only puts right when it ends.
        reason = event.reason if isinstance(event, Paused) else ""
        if reason == self._paused:
            return
        self._paused = reason
        if isinstance(event, Paused):
            after = f"; goes on in {duration(event.seconds)}" if event.seconds is not None else ""
            self._log.info("paused, %s%s", event.why, after)
        else:
            self._log.info("resumed")

    def _follow_state(self, event: StateChanged) -> None:
        # Waiting for a partner comes and goes with every round: a new state is news, a new wait is detail.
        # That it is paused was told with its reason; the last exchange ends as if training went on.
        told = event.state == self._state or (self._paused and event.state in ("paused", "training"))
        level = logging.DEBUG if told else logging.INFO
        self._state = event.state
        waiting = f", waiting for {event.waiting_for}" if event.waiting_for else ""
        self._log.log(level, "%s%s", event.state, waiting)

    def _follow_outer(self, event: OuterStep) -> None:
        self._log.more = {"loss": self._loss}
        if event.partner is None:
            self._log.info("round %d solo, no partner: loss %.4g", event.round, self._loss)
            return
        exchange = self._committed.pop(event.partner, None)
        parts = []
        if exchange is not None:
            parts.append(_traffic(exchange))
            self._log.more |= {"sent": exchange.sent, "received": exchange.received, "exchange_seconds": exchange.seconds}
        if event.spread is not None:
            parts.append(f"spread {event.spread:.3g}")
        parts.append(f"loss {self._loss:.4g}")
        self._log.info("round %d paired with …%s: %s", event.round, short(event.partner), ", ".join(parts))

    def _follow_exchange(self, event: ExchangeEnded) -> None:
        if event.outcome == "committed":
            self._committed[event.partner] = event
            if event.error:
                _log.warning("exchange with …%s committed: %s %s", short(event.partner), event.error, event.reason)
            return
        level = {"busy": logging.DEBUG, "aborted": logging.WARNING, "in_doubt": logging.WARNING}.get(
            event.outcome, logging.INFO
        )
        why = " ".join(filter(None, (event.error, event.reason))) or "no reason given"
        self._log.log(level, "exchange with …%s %s: %s", short(event.partner), event.outcome.replace("_", " "), why)

    def _follow_peers(
        self, event: PeerSeen | PeerLost | PeerConnected | PeerDisconnected | WeightsServed | WeightsFetched
    ) -> None:
        match event:
            case PeerSeen():
                if event.peer_id not in self._members:
                    self._members.add(event.peer_id)
                    self._log.info("peer …%s is here: %s, round %d", short(event.peer_id), event.state, event.round)
            case PeerLost():
                self._members.discard(event.peer_id)
                self._committed.pop(event.peer_id, None)
                level = logging.DEBUG if event.reason == MADE_ROOM else logging.INFO
                self._log.log(level, "peer …%s is gone: %s", short(event.peer_id), event.reason)
            case PeerConnected():
                self._log.debug("connected to …%s (%s)", short(event.peer_id), event.reach)
            case PeerDisconnected():
                self._log.debug("disconnected from …%s", short(event.peer_id))
            case WeightsServed():
                how = "gave weights to" if event.whole else "gave a part of the weights to"
                self._log.info("%s …%s: %s in %.2f s", how, short(event.peer_id), amount(event.size), event.seconds)
            case WeightsFetched():
                got = (event.round, short(event.donor), amount(event.size), event.seconds)
                self._log.info("weights of round %d from …%s: %s in %.2f s", *got)


def _traffic(exchange: ExchangeEnded) -> str:
    if exchange.sent == exchange.received:
        return f"{amount(exchange.sent)} each way in {exchange.seconds:.2f} s"
    return f"{amount(exchange.sent)} out and {amount(exchange.received)} in, {exchange.seconds:.2f} s"
