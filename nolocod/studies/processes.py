"""Ending daemons that were started as processes of their own.

The rule: each leads a session, so that what it started ends with it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from subprocess import Popen


def end(processes: Sequence[Popen[bytes]], seconds: float) -> None:
    """SIGTERM to all, so that each writes its checkpoint; SIGKILL to what is left after so many seconds, or when a
    second Ctrl-C ends the waiting."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            with suppress(TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
