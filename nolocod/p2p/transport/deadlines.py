"""Deadlines, and groups of tasks, for every protocol driver.

The rule: a wait ends with one of our errors as it is, never with a group of them.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from nolocod.errors import NolocodError, PeerTooSlowError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator


@contextmanager
def deadline(seconds: float, what: str, error: type[PeerTooSlowError] = PeerTooSlowError) -> Iterator[None]:
    """`error`("`what` ...") if the block takes longer."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise error(f"{what} took more than {seconds:.0f} s.")


@asynccontextmanager
async def reset_unless_done(reset: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """`reset` a stream if the block is not done to its end, whatever keeps it from that."""
    try:
        yield
    except BaseException:
        await reset()
        raise


def shielded(seconds: float) -> trio.CancelScope:
    """A scope that outer cancellation does not reach, for at most `seconds`."""
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)


async def to_the_end(work: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Await `work`. Who cancels this waits until it is done, for `seconds` at most."""
    scope, over = trio.CancelScope(shield=True), trio.Event()
    failures: list[NolocodError] = []

    async def run() -> None:
        with scope:
            try:
                await work()
            except NolocodError as error:
                failures.append(error)
        over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            await over.wait()
        except trio.Cancelled:
            scope.deadline = trio.current_time() + seconds
            raise
    if failures:
        raise failures[0]


async def together(main: Callable[[], Awaitable[None]], *helpers: Callable[[], Awaitable[None]]) -> None:
    """Run all at once until `main` returns, and cancel the rest; the first NolocodError of any ends all.

    It is raised as it is, not in a group.
    """
    failures: list[NolocodError] = []

    async def run(scope: trio.CancelScope, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except NolocodError as error:
            failures.append(error)
            scope.cancel()
        if part is main:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for part in (main, *helpers):
            nursery.start_soon(run, nursery.cancel_scope, part)
    if failures:
        raise failures[0]
