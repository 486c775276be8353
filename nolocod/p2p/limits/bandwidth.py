"""How many bytes this node may move: a rate each way, and an amount per month.

The rule: the secure channel is the one place that asks; it counts sealed bytes, so that the DHT, gossip and chunks are
all in. What goes over a circuit is paid for by the connection to the relay, once. Whoever sends pays before, whoever
receives pays after, in the order in which they came; a wait that is cancelled costs nothing. Over any span of T seconds
no more than rate * (T + _BURST) bytes are sent. What was moved in a month is on the disk within `_SAVE_SECONDS` or
`_SAVE_BYTES`, so that a kill forgets no more than that.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
import trio
from msgspec import Meta

from nolocod.disk import written_whole
from nolocod.errors import DataDirError, LocalError
from nolocod.observe.events import Traffic, Troubled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.observe.events import Emit
    from nolocod.p2p.settings import Allowance

_BURST = 0.1
"""Seconds at the rate that may be saved up while nobody sends: 5 % of any two seconds."""
_PIECE = 0.05
"""Seconds at the rate that one connection may take at once: what a ping of another one waits behind it."""
_LEAST_PIECE = 1024
_ROUNDING = 1e-9
"""Seconds too short to be slept: what additions of floats leave over."""
_RESERVE = 0.02
"""Share of the month's bytes kept for heartbeats, when exchanges have used up the rest."""
_OVERHEAD = 1.05
"""Bytes on the wire per byte of a message: sealing, frames, hashes."""
_SAVE_SECONDS = 60.0
_SAVE_BYTES = 16 << 20
_TICK = 1.0
_RATE_SECONDS = 5.0
"""The span over which the rates that are shown are averaged."""
_MONTHS_KEPT = 12
_SPENT_SECONDS = 60.0
"""Between two looks whether the month is over, by those that wait for its end."""


class Meter(Protocol):
    """One per node, shared by its connections."""

    def piece(self, most: int) -> int:
        """How many bytes (at most `most`) may be moved at once without making others wait noticeably."""
        ...

    async def up(self, count: int) -> None:
        """Return when `count` bytes may be sent, and count them. May be cancelled: then they are not counted."""
        ...

    async def down(self, count: int) -> None:
        """Count `count` bytes that were received, and return when more may be read."""
        ...


class Unmetered:
    """Counts nothing and waits for nothing. `pieces`: the meter of whoever pays, which still says in what pieces."""

    def __init__(self, pieces: Meter | None = None) -> None:
        self._pieces = pieces

    def piece(self, most: int) -> int:
        return self._pieces.piece(most) if self._pieces else most

    async def up(self, count: int) -> None:
        return

    async def down(self, count: int) -> None:
        return


class Bucket:
    """Tokens at `rate` bytes per second (None: as many as you like). Time is passed in, in seconds."""

    def __init__(self, rate: float | None, now: float) -> None:
        self.rate = rate
        self._depth = rate * _BURST if rate else 0.0
        self._tokens = self._depth
        self._filled = now

    def wait(self, count: float, now: float) -> float:
        """Seconds until there are `count` tokens for the one who is first in the queue; 0 if there are."""
        if self.rate is None:
            return 0.0
        # Above the depth only for a need that is greater: saved up by the one who waits, for itself.
        full = max(self._depth, count)
        self._tokens = min(full, self._tokens + (now - self._filled) * self.rate)
        self._filled = now
        seconds = (count - self._tokens) / self.rate
        return seconds if seconds > _ROUNDING else 0.0

    def take(self, count: float) -> None:
        """Take tokens, also those that are not there: the next one waits for them."""
        if self.rate is not None:
            self._tokens -= count


class _Month(msgspec.Struct, forbid_unknown_fields=True):
    up: Annotated[int, Meta(ge=0)] = 0
    down: Annotated[int, Meta(ge=0)] = 0


class Ledger:
    """Bytes per calendar month (UTC) in the file at `path`. `wall` gives the time of day in seconds.

    A month's count is kept when the clock leaves it, and found again when the clock comes back; a time
    before all known months counts as the first of them. So a clock that is set back forgives nothing.
    Raises DataDirError for a file that cannot be read: to begin anew unasked would break the budget.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall = wall
        self._months = _read(path)
        self._day = -1
        self._name = ""
        self._unsaved = 0
        self._saved_at = wall()

    @property
    def name(self) -> str:
        """The month that is counted now, like "2025-06"."""
        day = int(self._wall() // 86_400)
        if day != self._day:  # months change with days, and this is asked for every record
            self._day = day
            name = datetime.fromtimestamp(day * 86_400, tz=UTC).strftime("%Y-%m")
            self._name = max(name, min(self._months, default=name))
            self._months.setdefault(self._name, _Month())
            for old in sorted(self._months)[:-_MONTHS_KEPT]:
                if old != self._name:
                    del self._months[old]
        return self._name

    @property
    def used(self) -> tuple[int, int]:
        """Bytes (sent, received) in this month."""
        month = self._months[self.name]
        return month.up, month.down

    @property
    def total(self) -> int:
        return sum(self.used)

    def add(self, up: int, down: int) -> None:
        month = self._months[self.name]
        month.up += up
        month.down += down
        self._unsaved += up + down

    def seconds_left(self) -> float:
        """Until the next month begins."""
        year, month = map(int, self.name.split("-"))
        end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        return max(0.0, end.timestamp() - self._wall())

    @property
    def due(self) -> bool:
        """Whether enough is not yet on the disk, or for long enough."""
        late = not 0 <= self._wall() - self._saved_at < _SAVE_SECONDS
        return self._unsaved >= _SAVE_BYTES or (self._unsaved > 0 and late)

    def save(self) -> None:
        """Write the file. Blocks on the disk; raises DiskFullError or DataDirError."""
        self._unsaved = 0
        self._saved_at = self._wall()
        content = msgspec.json.encode(self._months)
        with written_whole(self._path) as file:
            file.write(content)


def _read(path: Path) -> dict[str, _Month]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataDirError(f"{path}: {error.strerror or error}.") from error
    try:
        return msgspec.json.decode(raw, type=dict[Annotated[str, Meta(pattern=r"^\d{4}-(0[1-9]|1[0-2])$")], _Month])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = f"{path} does not tell what was used in which month ({error})."
        raise DataDirError(cause, remedy="Fix it, or remove it to start the count again.") from error


def shortfalls(allowance: Allowance, size: int, patience: float) -> list[str]:
    """Why exchanges of `size` bytes each way, for which partners have `patience` seconds, cannot work; one line each."""
    found = []
    for flag, rate in (("--max-upload", allowance.up), ("--max-download", allowance.down)):
        if rate is not None and size * _OVERHEAD > rate * patience:
            least = size * _OVERHEAD * 8 / patience / 1e6
            found.append(
                f"at {flag} an exchange takes {size / rate:.0f} s, and partners wait {patience:.0f} s: {least:.1f}Mbit do."
            )
    if allowance.monthly is not None and 2 * size * _OVERHEAD > allowance.monthly:
        found.append(f"--monthly-budget is less than one exchange, {2 * size * _OVERHEAD / 1e9:.3g} GB: this node only rests.")
    return found


def piece(rate: int, queue: trio.Lock) -> int:
    """Bytes of `_PIECE` seconds at `rate`, shared by those in the queue."""
    return max(_LEAST_PIECE, int(rate * _PIECE / (1 + queue.statistics().tasks_waiting)))


async def paid(bucket: Bucket, count: float) -> None:
    """Return when `count` bytes may be taken from `bucket`."""
    while (seconds := bucket.wait(count, trio.current_time())) > 0:  # noqa: ASYNC110 - the clock is what is waited for
        await trio.sleep(seconds)


class Budget:
    """What an allowance leaves (a Meter), counted in `ledger`. One per node; `run` does what is due."""

    def __init__(self, allowance: Allowance, ledger: Ledger, emit: Emit) -> None:
        now = trio.current_time()
        self.sent = self.received = 0
        self._ledger = ledger
        self._emit = emit
        self._monthly = allowance.monthly
        self._reserve = (allowance.monthly or 0) * _RESERVE
        self._up = Bucket(allowance.up, now)
        self._down = Bucket(allowance.down, now)
        self._sending, self._receiving = trio.Lock(), trio.Lock()
        self._samples: deque[tuple[float, int, int]] = deque([(now, 0, 0)])
        self._told: Traffic | None = None
        self._slowest = min((rate for rate in (allowance.up, allowance.down) if rate is not None), default=None)

    # --- Meter ----------------------------------------------------------------------------------------

    def piece(self, most: int) -> int:
        """At most `_PIECE` seconds of the slower rate, shared by those that wait to send."""
        return most if self._slowest is None else min(most, piece(self._slowest, self._sending))

    async def up(self, count: int) -> None:
        """Pay for `count` bytes and return when they may be sent; cancelled, they are not paid."""
        if self._up.rate is not None or self._monthly is not None:
            async with self._sending:
                while self._monthly is not None and self._ledger.total + count > self._monthly:
                    await self._next_month()
                await paid(self._up, count)
                self._up.take(count)
        self._count(count, 0)

    async def down(self, count: int) -> None:
        """Pay for `count` bytes that came, and return when they are paid."""
        self._count(0, count)
        if self._down.rate is not None or self._monthly is not None:
            async with self._receiving:
                self._down.take(count)
                await paid(self._down, 0)
                while self._monthly is not None and self._ledger.total > self._monthly:
                    await self._next_month()

    def _count(self, up: int, down: int) -> None:
        self.sent += up
        self.received += down
        self._ledger.add(up, down)

    async def _next_month(self) -> None:
        """The reserve is used up too: the line is as good as cut."""
        await trio.sleep(min(_SPENT_SECONDS, self._ledger.seconds_left() + 1.0))

    # --- what is left ---------------------------------------------------------------------------------

    @property
    def spent(self) -> bool:
        """Whether what is left of the month's bytes is for heartbeats alone."""
        return self._monthly is not None and self._ledger.total >= self._monthly - self._reserve

    def keep_back(self, size: int) -> None:
        """Begin no exchange (`size` bytes each way) that the month's bytes would not let us finish."""
        self._reserve = max(self._reserve, 2 * size * _OVERHEAD)

    @property
    def seconds_left(self) -> float:
        """Until the next month begins."""
        return self._ledger.seconds_left()

    async def run(self) -> None:
        """Tell the traffic once a second, and keep the file up to date; a disk that fails is told, not raised."""
        while True:
            self._tell()
            if self._ledger.due:
                await self.save()
            await trio.sleep(_TICK)

    async def save(self) -> None:
        """Write the month's count."""
        try:
            await trio.to_thread.run_sync(self._ledger.save)
        except LocalError as error:
            self._emit(Troubled(error.code, error.cause))

    def _tell(self) -> None:
        now = trio.current_time()
        self._samples.append((now, self.sent, self.received))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()
        begin, sent, received = self._samples[0]
        span = max(now - begin, _TICK)
        rates = (self.sent - sent) / span, (self.received - received) / span
        traffic = Traffic(self.sent, self.received, *rates, self._ledger.name, *self._ledger.used)
        if traffic != self._told:
            self._told = traffic
            self._emit(traffic)
