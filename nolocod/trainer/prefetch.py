"""Text that is read and tokenised beside training, and an outage that does not stop it.

The rule: a thread reads ahead, as far as a bounded queue goes. Where nothing new comes, because the source is not there or is
too slow, training goes on with the last windows again, and the thread asks for ever. The position is that of what was
trained on, so that a resumed node reads again what was only read ahead. For a GPU the thread lays windows where the card reads
them by itself (bus.lay_for), and they stay there while a step on them may be under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, TypeVar

from nolocod.errors import NolocodError, TrainerError
from nolocod.observe.events import TextSupply
from nolocod.trainer.hub import cause_of, failures

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from nolocod.trainer.windows import Position, Source

    Lay = Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Puts windows where they are to be read from; done by the thread that reads ahead."""

T = TypeVar("T")

AHEAD = 32 << 20
"""Bytes that are read ahead, and as many that are kept to be trained on again."""
TOKEN_BYTES = 8
"""A window's tokens are int64."""
MOST = 256
"""Inner steps' windows that are, where they are small."""
_DOUBLE = 2
"""So many are kept however large they are: a GPU may read those of the step before while it is asked for the next (duty.py)."""
_PATIENCE = 10.0
"""Seconds for which training waits for a source that is not known to be broken."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Between two tries to read, in seconds; twice as long each time."""
_TICK = 0.1


def steps_kept(tokens: int) -> int:
    """For how many inner steps of so many tokens there are windows ahead at most, and as many more that were trained on."""
    return min(max(_DOUBLE, AHEAD // (TOKEN_BYTES * tokens)), MOST)


class Supply:
    """Tells once that no text comes, and once that it comes again."""

    def __init__(self, tell: Callable[[TextSupply], None]) -> None:
        self._tell = tell
        self._since: float | None = None

    @property
    def is_out(self) -> bool:
        return self._since is not None

    def out(self, why: str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self._tell(TextSupply(why, 0.0))

    def back(self) -> None:
        if self._since is not None:
            self._tell(TextSupply("", time.monotonic() - self._since))
            self._since = None


def persist(work: Callable[[], T], trouble: Callable[[str], None], closed: threading.Event) -> T:
    """What `work` returns, asked for until it does; each failure of the source is `trouble`. TrainerError once `closed`."""
    pause = _FIRST_PAUSE
    while not closed.is_set():
        try:
            return work()
        except failures() as error:
            trouble(cause_of(error))
            closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    raise TrainerError("its text was closed.")


class Prefetched:
    """A windows.Source: `stream`, read ahead by `count` windows at a time; `held_out` are those that nobody trains on."""

    def __init__(self, stream: Source, count: int, held_out: NDArray[np.int64], supply: Supply, lay: Lay | None = None) -> None:
        self._stream = stream
        self._lay = lay or (lambda windows: windows)
        self._count = count
        self._held_out = held_out
        self._supply = supply
        self._position = stream.position
        kept = steps_kept(count * held_out.shape[1])
        self._ahead: Queue[tuple[NDArray[np.int64], Position] | NolocodError] = Queue(kept)
        self._recent: deque[NDArray[np.int64]] = deque(maxlen=kept)
        self.waited = 0.0
        """Seconds for which training waited for text."""
        self._trouble = ""
        """What the last try to read failed of."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def position(self) -> Position:
        return self._position

    def seek(self, position: Position) -> None:
        """Before the first windows are taken."""
        self._stream.seek(position)
        self._position = position

    def held_out(self, count: int) -> NDArray[np.int64]:
        return self._held_out[:count]

    def begin(self) -> None:
        """Read ahead from the position on, and wait until the first windows are there, for ever."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        while self._ahead.empty():
            if self._trouble:
                self._supply.out(self._trouble)
            time.sleep(_TICK)

    def close(self) -> None:
        self._closed.set()

    def take(self, count: int) -> NDArray[np.int64]:
        """The next windows, or the last ones again. Raises what is wrong with the text."""
        if count != self._count:
            raise AssertionError(f"{count} windows were asked for, and {self._count} are read at a time")
        if self._thread is None:
            self.begin()
        try:
            can_wait, began = not (self._supply.is_out or self._trouble), time.perf_counter()
            try:
                found = self._ahead.get(timeout=_PATIENCE) if can_wait or not self._recent else self._ahead.get_nowait()
            finally:
                self.waited += time.perf_counter() - began
        except Empty:
            self._supply.out(self._trouble or f"nothing new came for {_PATIENCE:.0f} s")
            if self._recent:
                self._recent.rotate(-1)
                return self._recent[-1]
            return self.take(count)
        if isinstance(found, NolocodError):
            raise found
        self._supply.back()
        windows, self._position = found
        self._recent.append(windows)
        return windows

    def _read(self) -> None:
        """Fill the queue until closed; what the text is not usable for is the last in it."""
        error: NolocodError = TrainerError("reading its text ended.")
        try:
            while True:
                windows = persist(lambda: self._stream.take(self._count), self._note, self._closed)
                self._trouble = ""
                self._put((self._lay(windows), self._stream.position))
        except NolocodError as found:
            error = found
        finally:
            self._put(error)

    def _note(self, trouble: str) -> None:
        self._trouble = trouble

    def _put(self, item: tuple[NDArray[np.int64], Position] | NolocodError) -> None:
        while not self._closed.is_set():
            try:
                self._ahead.put(item, timeout=_TICK)
            except Full:
                continue
            return
