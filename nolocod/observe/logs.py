"""The log on stderr: "HH:MM:SS level message", or the same as JSON; one line per thing that happened.

The rule: events become lines here and nowhere else. A line that repeats more than ten times a minute is counted instead,
and no text of a peer can break a line or drive the terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from logging import DEBUG, INFO, WARNING
from math import isfinite
from typing import TYPE_CHECKING, TextIO

import msgspec

from nolocod.identity import short
from nolocod.observe import events
from nolocod.observe.words import REACHABLE, amount, duration, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event, NatClass

_PER_MINUTE = 10
_MINUTE = 60.0
_LOUD = ("noise", "zeroconf", "aioquic", "filelock", "urllib3", "httpx", "datasets", "transformers", "huggingface_hub")
"""Libraries that warn of everyday life, or that set their own level when imported; libp2p is `p2p.libp2p_patches`'s."""

_log = logging.getLogger("nolocod")


def set_up(
    level: str = "info",
    form: str = "human",
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    source: str = "",
) -> None:
    """Send our log at `level` in `form` ("human" or "json"), and the libraries' warnings, to `stream`
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
    root.setLevel(WARNING)
    _log.setLevel(level.upper())
    for name in _LOUD:
        logging.getLogger(name).setLevel(WARNING if level == "debug" else logging.ERROR)


class _Formatter(logging.Formatter):
    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        origin = "" if record.name == _log.name else f"{record.name}: "  # a library's record names its logger
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        source = f"{self._source}: " if self._source else ""
        line = f"{clock} {record.levelname.lower()} {source}{origin}{plain(record.getMessage())}"
        if record.exc_info and _log.isEnabledFor(DEBUG):
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(_Formatter):
    """One object per line, in ASCII alone, so that no text of a peer can drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = getattr(record, "event", "log"), getattr(record, "fields", {})
        if isinstance(event, events.Event):
            fields = msgspec.structs.asdict(event) | fields
            event = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            "message": record.getMessage(),
            "fields": {
                key: None if isinstance(value, float) and not isfinite(value) else value for key, value in fields.items()
            },
        }
        if self._source:
            line["source"] = self._source
        if record.exc_info and _log.isEnabledFor(DEBUG):
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")  # json escapes all else that is not printable


class FoldingHandler(logging.StreamHandler[TextIO]):
    """Lets ten records of one template through per minute, counts the others, and writes the count afterwards."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int, tuple[object, ...] | Mapping[str, object] | None]] = {}
        """(logger, template): when the window began, the records in it, the last one's values for the template."""

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._close_windows(now)
        key = (record.name, str(record.msg))
        begin, count, _ = self._seen.get(key, (now, 0, None))
        self._seen[key] = (begin, count + 1, record.args)
        if count < _PER_MINUTE or record.levelno >= logging.CRITICAL:
            super().emit(record)

    def close(self) -> None:
        self._close_windows(float("inf"))
        super().close()

    def _close_windows(self, now: float) -> None:
        for key, (begin, count, last) in list(self._seen.items()):
            if now - begin >= _MINUTE:
                del self._seen[key]
                if count > _PER_MINUTE:
                    name, template = key
                    text = f"{count - _PER_MINUTE} more within a minute, the last: {template}"
                    summary = logging.LogRecord(name, INFO, "", 0, text, None, None)
                    summary.args = last
                    summary.event, summary.fields = "folded", {"count": count - _PER_MINUTE, "like": template}
                    super().emit(summary)


def _say(event: Event, level: int, template: str, *values: object, **fields: object) -> None:
    """Log a line about `event`; `fields` are what the JSON line shows beside the event's own."""
    _log.log(level, template, *values, extra={"event": event, "fields": fields})


class LogFollower:
    """Turns a node's events into log lines."""

    def __init__(self) -> None:
        self._state = ""
        self._loss = float("nan")
        self._committed: dict[PeerId, events.ExchangeEnded] = {}
        self._members: set[PeerId] = set()
        self._paused = self._eased = ""
        self._limits: dict[str, str] = {}
        self._reach: NatClass | None = None
        self._relays: set[PeerId] = set()
        self._reservations = 0

    def follow(self, event: Event) -> None:
        """Log `event`, if it is worth a line. Never raises, never blocks."""
        self._follow_node(event)
        self._follow_training(event)
        self._follow_exchanges(event)
        self._follow_peers(event)
        self._follow_reach(event)

    def _follow_node(self, event: Event) -> None:
        match event:
            case events.Started():
                where = ", ".join(event.addresses) or "no address"
                node = (short(event.peer_id), event.run_name, event.run_id[:12], where)
                _say(event, INFO, "node …%s in run %s (%s) at %s", *node)
                _say(event, INFO, "status page at http://%s/", event.http)
            case events.RunFound():
                named = (event.run_name, event.run_id, short(event.peer_id))
                _say(event, INFO, "joining run %s (%s) on the word of …%s alone; --run ID names the run to join", *named)
            case events.StateChanged():
                # Waiting for a partner comes and goes in every round: a new state is worth a line, a new wait is detail.
                # A pause has its own line, and its last exchange ends as if training went on.
                known = event.state == self._state or (self._paused and event.state in ("paused", "training"))
                self._state = event.state
                waiting = f", waiting for {event.waiting_for}" if event.waiting_for else ""
                _say(event, DEBUG if known else INFO, "%s%s", event.state, waiting)
            case events.Paused():
                if event.reason != self._paused:  # the same reason again only corrects the time
                    after = f"; resumes in {duration(event.seconds)}" if event.seconds is not None else ""
                    _say(event, INFO, "paused, %s%s", event.why, after)
                self._paused = event.reason
            case events.Resumed():
                if self._paused:
                    _say(event, INFO, "resumed")
                self._paused = ""
            case events.Allowed():
                if event.limits != self._limits:
                    self._limits = event.limits
                    _say(event, INFO, "limits: %s", ", ".join(f"{key} {text}" for key, text in event.limits.items()) or "none")
            case events.Eased():
                level = DEBUG if event.why == self._eased else INFO
                self._eased = event.why
                _say(event, level, "computes %.0f %% of the time%s", 100 * event.share, f", {event.why}" if event.why else "")
            case events.MicroBatch():
                _say(
                    event,
                    INFO,
                    "%d of a step's %d windows are computed at once: memory takes no more",
                    event.at_once,
                    event.windows,
                )
            case events.MemoryTaken():
                parts = sorted(msgspec.structs.asdict(event).items(), key=lambda part: -part[1])
                _say(event, DEBUG, "memory: %s", ", ".join(f"{name} {amount(size)}" for name, size in parts))
            case events.DevicesChosen(devices, made_on):
                _say(
                    event,
                    INFO if devices[1:] else DEBUG,
                    "%d devices share each inner step: %s. Messages are made on %s",
                    len(devices),
                    ", ".join(devices),
                    made_on,
                )
            case events.SamplesRead():
                told = event.samples, f" of {event.dataset}" * bool(event.dataset), event.left_out, event.cut
                _say(event, INFO, "of %d samples%s %d are left out, and %d are cut to the length of a window", *told)
            case events.TextSupply(trouble=""):
                _say(event, INFO, "new text to train on comes again, after %s", duration(event.seconds))
            case events.TextSupply():
                _say(event, WARNING, "no new text to train on: %s; the last is trained on again", event.trouble)
            case events.Amended():
                _say(event, INFO, "the run's owners change it from round %d on: %s", event.at, event.what)
            case events.Troubled():
                _say(event, WARNING, f"{event.code} %s", event.message)  # many of one code fold no other one

    def _follow_training(self, event: Event) -> None:
        match event:
            case events.WeightsLoaded():
                _say(event, INFO, "starting from the %s's weights, round %d", event.source, event.round)
            case events.InnerSteps():
                self._loss = event.loss
                rate = event.tokens / event.seconds if event.seconds > 0 else 0.0
                _say(event, DEBUG, "%d inner steps: loss %.4g, %.3g tokens/s", event.steps, event.loss, rate)
            case events.Evaluated():
                _say(event, INFO, "round %d: validation loss %.4g", event.round, event.loss)
            case events.OuterStep(partner=None):
                _say(event, INFO, "round %d solo, no partner: loss %.4g", event.round, self._loss, loss=self._loss)
            case events.OuterStep(partner=partner) if partner is not None:
                exchange = self._committed.pop(partner, None)
                parts, fields = [], {"loss": self._loss}
                if exchange is not None:
                    parts.append(_traffic(exchange))
                    fields |= {"sent": exchange.sent, "received": exchange.received, "exchange_seconds": exchange.seconds}
                if event.spread is not None:
                    parts.append(f"spread {event.spread:.3g}")
                parts.append(f"loss {self._loss:.4g}")
                step = (event.round, short(partner), ", ".join(parts))
                _say(event, INFO, "round %d paired with …%s: %s", *step, **fields)
            case events.Checkpointed():
                _say(event, INFO, "checkpoint of round %d: %s in %.2f s", event.round, amount(event.size), event.seconds)

    def _follow_exchanges(self, event: Event) -> None:
        match event:
            case events.ExchangeStarted():
                _say(event, DEBUG, "exchange with …%s %s", short(event.partner), "offered" if event.initiator else "accepted")
            case events.ExchangeEnded(outcome="committed"):
                self._committed[event.partner] = event
                if event.error:
                    _log.warning("exchange with …%s committed: %s %s", short(event.partner), event.error, event.reason)
            case events.ExchangeEnded():
                level = {"busy": DEBUG, "aborted": WARNING, "in_doubt": WARNING}.get(event.outcome, INFO)
                why = " ".join(filter(None, (event.error, event.reason))) or "no reason given"
                template = f"exchange with …%s {event.outcome.replace('_', ' ')}: %s"  # many that are busy fold no other one
                _say(event, level, template, short(event.partner), why)
            case events.DoubtSettled():
                decided = "the partner applied it, this node did not" if event.committed else "neither node applied it"
                _say(event, INFO, "exchange with …%s is no longer in doubt: %s", short(event.partner), decided)
            case events.WeightsServed():
                what = "weights" if event.whole else "a part of the weights"
                sent = (what, short(event.peer_id), amount(event.size), event.seconds)
                _say(event, INFO, "sent %s to …%s: %s in %.2f s", *sent)
            case events.WeightsComing():
                coming = (short(event.donor), amount(event.here), amount(event.size))
                _say(event, DEBUG, "weights of …%s come: %s of %s", *coming)
            case events.WeightsFetched():
                fetched = (event.round, short(event.donor), amount(event.size), event.seconds)
                _say(event, INFO, "fetched weights of round %d from …%s: %s in %.2f s", *fetched)

    def _follow_peers(self, event: Event) -> None:
        match event:
            case events.PeerSeen():
                if event.peer_id not in self._members:
                    self._members.add(event.peer_id)
                    _say(event, INFO, "peer …%s is here: %s, round %d", short(event.peer_id), event.state, event.round)
            case events.PeerLost():
                self._members.discard(event.peer_id)
                self._committed.pop(event.peer_id, None)
                level = DEBUG if event.reason == events.MADE_ROOM else INFO
                _say(event, level, "peer …%s is gone: %s", short(event.peer_id), event.reason)
            case events.PeerConnected():
                _say(event, DEBUG, "connected to …%s (%s)", short(event.peer_id), event.reach)
            case events.PeerDisconnected():
                _say(event, DEBUG, "disconnected from …%s", short(event.peer_id))
            case events.PeerJudged():
                _say(event, DEBUG, "peer …%s: reputation %.2f (%s)", short(event.peer_id), event.reputation, event.why)
            case events.PeerBanned():
                banned = (short(event.peer_id), duration(event.seconds), event.why)
                _say(event, WARNING, "peer …%s is banned for %s: %s", *banned)

    def _follow_reach(self, event: Event) -> None:
        match event:
            case events.ReachFound():
                # the reason names a number of peers, which changes all the time: only a new kind is worth a line
                level = DEBUG if event.kind == self._reach else INFO
                self._reach = event.kind
                _say(event, level, "reachable: %s, because %s", REACHABLE[event.kind], event.why)
            case events.RelayHeld():
                level = DEBUG if event.relay in self._relays else INFO
                self._relays.add(event.relay)
                relay = (short(event.relay), duration(event.seconds))
                _say(event, level, "relay …%s keeps a reservation for this node for %s", *relay)
            case events.RelayLost():
                self._relays.discard(event.relay)
                _say(event, INFO, "reservation at relay …%s lost: %s", short(event.relay), event.reason)
            case events.Punched(succeeded=True):
                _say(event, INFO, "direct connection to …%s punched in %.1f s", short(event.peer_id), event.seconds)
            case events.Punched():
                _say(event, INFO, "no direct connection to …%s: %s", short(event.peer_id), event.reason)
            case events.Relaying():
                if event.reservations != self._reservations:
                    self._reservations = event.reservations
                    _say(event, INFO, "reservations for other peers: %d", event.reservations)
            case events.PartitionHealed():
                found = (short(event.peer_id), event.members)
                _say(event, INFO, "found another part of the run through …%s: %d members", *found)


def _traffic(exchange: events.ExchangeEnded) -> str:
    if exchange.sent == exchange.received:
        return f"{amount(exchange.sent)} each way in {exchange.seconds:.2f} s"
    return f"{amount(exchange.sent)} out and {amount(exchange.received)} in, {exchange.seconds:.2f} s"
