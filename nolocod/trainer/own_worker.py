"""The trainer's side of the pipe in somebody's own training loop: commands are done in its steps, by the code of worker.py.

The rule: a step never waits for the network, and takes in what was asked for meanwhile. What the daemon pauses goes on here: a
loop is its owner's. When the daemon is gone, that is one error, and whoever catches it trains on alone.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nolocod.errors import CheckpointError
from nolocod.trainer import pipe
from nolocod.trainer.attached import STILL
from nolocod.trainer.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nolocod.run.manifest import Sealed
    from nolocod.trainer.checkpoint import Found
    from nolocod.trainer.child_end import ChildEnd
    from nolocod.trainer.own import OwnReplica

_STOPS = 10.0
"""A step that took so many times as long as the one before was no step but a stop, if the next one is short again."""


class OwnWorker(Worker):
    """Serves one daemon, in the thread that trains. Raises EOFError or ConnectionError once it is gone."""

    def __init__(self, daemon: ChildEnd, memory: int) -> None:
        super().__init__(daemon, memory)
        self.replica: OwnReplica | None = None
        self._make: Callable[[Sealed], OwnReplica] | None = None
        self._asked: pipe.Request | None = None
        self._resumed = 0.0
        self._stood = False

    def wait_setup(self) -> pipe.Setup:
        """What the daemon tells once it has found the run and its files."""
        while self._asked is None:
            request = self._requests.next()
            if request is None:
                raise EOFError
            if isinstance(request.command, pipe.Setup):
                self._asked = request
            else:
                self._do(request)
        assert isinstance(self._asked.command, pipe.Setup)
        return self._asked.command

    def begin(self, make: Callable[[Sealed], OwnReplica]) -> None:
        """Answer the setup, and serve until training is due, and no further: the weights are then those to start from."""
        self.wait_setup()
        assert self._asked is not None
        self._make = make
        self._do(self._asked)
        if not self.serve(wait=lambda: True, until=lambda: self._training):
            raise EOFError
        self._resumed = time.perf_counter()

    def stepped(self, replica: OwnReplica, loss: Tensor | float | None) -> None:
        """The caller took an inner step: count it, and do what was asked for since the last one."""
        seconds = time.perf_counter() - self._resumed
        replica.count(loss)
        self._stood = not self._stood and seconds > max(STILL, _STOPS * self._step_seconds) and self._step_seconds > 0
        try:
            with _uninterrupted():
                self._stepped(self._step_seconds if self._stood else seconds)
                if not self.serve(wait=lambda: False):
                    raise EOFError
                if self._training:
                    replica.train_on()
        except (EOFError, ConnectionError):
            with suppress(EOFError, ConnectionError):
                self._settle()  # what was committed is merged; the answer reaches nobody
            replica.discard()
            raise
        self._resumed = time.perf_counter()

    def finish(self) -> None:
        """Serve until the daemon has done with the loop, or is gone."""
        with suppress(EOFError, ConnectionError):
            while self.serve(wait=lambda: True):
                pass
        if self._files is not None:
            self._files.close()
        self._thread.shutdown()

    def _open(self, setup: pipe.Setup, sealed: Sealed) -> tuple[OwnReplica, Found]:
        again = self.replica is not None
        if self.replica is None:
            assert self._make is not None
            self.replica = self._make(sealed)
        found = self.replica.resume(setup.checkpoints)
        if again and found.path is None:
            raise CheckpointError("there is none to go back to.")
        return self.replica, found

    def _evaluate(self) -> float:
        return super()._evaluate() if self.replica is not None and self.replica.can_evaluate else 0.0


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts afterwards: an outer step that it cut in two would leave weights of no use."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[object] = []
    signal.signal(signal.SIGINT, lambda _, frame: pressed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(signal.SIGINT, None)
