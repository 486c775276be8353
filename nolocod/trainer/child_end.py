"""The trainer's end of the pipe to the network process.

The rule: blocking, framed as pipe.py does it; one thread receives, any may send.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nolocod.trainer import pipe

if TYPE_CHECKING:
    from collections.abc import Callable


class ChildEnd:
    """The child's end of the pipe `descriptor`: blocking; any thread may send. EOFError or ConnectionError if the parent is
    gone."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)  # which frames as pipe.py does
        self._lock = threading.Lock()

    def receive(self) -> pipe.Request:
        return pipe.REQUESTS.decode(self._connection.recv_bytes(pipe.MAX_MESSAGE))

    def send(self, make: Callable[[], pipe.Reply]) -> None:
        """What `make` makes: one that was made later is never sent before."""
        with self._lock:
            self._connection.send_bytes(pipe.encode(make()))

    def close(self) -> None:
        self._connection.close()
