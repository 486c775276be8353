"""A party's end of the lines of JSON (parties.py), for parties that run on trio.

The rule: only answers go to standard output; one request is served at a time.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import trio

from nolocod.errors import NolocodError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

_MOST = 1 << 20


async def serve(handlers: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]]) -> None:
    """Answer each request with what its handler returns, until the other side is gone.

    An error of ours is told as the answer, and ends the serving.
    """
    waiting = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as requests:
        while data := await requests.receive_some(_MOST):
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                try:
                    answer = await handlers[request.pop("do")](**request)
                except NolocodError as error:
                    await _say({"error": f"{error.code} {error.cause}"})
                    return
                await _say(answer)


async def _say(answer: dict[str, Any]) -> None:
    async with trio.lowlevel.FdStream(os.dup(1)) as answers:
        await answers.send_all(json.dumps(answer).encode() + b"\n")
