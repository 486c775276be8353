"""A worker's end of the lines of JSON (see tests/bench/parties.py).

The rule: runs in a neighbour's environment, so nothing but the standard library is imported here; whatever a
library prints goes to standard error, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Talk:
    """Serve requests by name until the other side is gone or says quit."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def serve(self, handlers: dict[str, Callable[..., dict[str, Any]]], close: Callable[[], None] | None = None) -> None:
        """Answer each request with what its handler returns; a failure is told, and ends the process after `close`."""
        for line in sys.stdin:
            request = json.loads(line)
            name = request.pop("do")
            try:
                answer = handlers[name](**request)
            except Exception as error:  # noqa: BLE001 - whatever a neighbour raises is the result of measuring it
                traceback.print_exc()
                answer = {"error": f"{name}: {type(error).__name__}: {error}"}
            self._out.write(json.dumps(answer) + "\n")
            self._out.flush()
            if "error" in answer:
                break
        if close is not None:
            close()
        sys.stderr.flush()
        os._exit(0)  # a neighbour's threads would keep it alive


def timed(work: Callable[[], None]) -> dict[str, Any]:
    """Run `work`; the times are of the clock that all processes of a machine share."""
    began = time.monotonic()
    work()
    return {"began": began, "ended": time.monotonic()}
