"""What the parent asks the trainer for, one request after another.

The rule: an outer step that is asked for before it is due waits until the inner steps before it are taken. So the parent can
ask in the last of them, and theta is copied right at its end. Who asks for something else meanwhile has given it up: the parent
waits for each answer.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue

from nolocod.trainer import pipe


class Requests:
    """In their order, from any thread to the one that serves. None stands for the end: the parent is gone."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[pipe.Request | None] = SimpleQueue()
        self._early: pipe.Request | None = None

    def put(self, request: pipe.Request | None) -> None:
        self._queue.put(request)

    def next(self, seconds: float | None = None, steps: int | None = None) -> pipe.Request | None:
        """Wait for the next one that is due: at most so many seconds, or as long as it takes. queue.Empty if none came.
        `steps`: inner steps since the last outer step; None while none are taken, and all is due."""
        early, self._early = self._early, None
        if early is not None and not _is_early(early, steps):
            return early
        try:
            request = self._queue.get(timeout=seconds)
        except Empty:
            self._early = early
            raise
        if request is not None and _is_early(request, steps):
            self._early = request
            raise Empty
        return request


def _is_early(request: pipe.Request, steps: int | None) -> bool:
    command = request.command
    return steps is not None and isinstance(command, pipe.Capture | pipe.Solo) and steps < command.after
