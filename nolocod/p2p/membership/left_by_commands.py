"""Looking again and again at what the owner's commands left in the data directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.errors import LocalError, RefusedError
from nolocod.observe.events import Troubled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nolocod.observe.events import Emit

_REREAD = 2.0
"""Seconds between two looks."""


async def keep_looking(look: Callable[[], Awaitable[None]], emit: Emit) -> None:
    """`look` until cancelled; what goes wrong with that is told once, until it goes well again or wrong otherwise."""
    trouble: str | None = None
    while True:
        try:
            await look()
            trouble = None
        except (LocalError, RefusedError) as error:
            if error.cause != trouble:
                emit(Troubled(error.code, f"{error.cause} {error.remedy}"))
            trouble = error.cause
        await trio.sleep(_REREAD)
