"""Port mapping by UPnP: a port of the router's, asked for, renewed, and given back at the end.

The rule: the router's answer counts for nothing until a peer has dialled the mapped address. The library blocks,
so that it runs in a thread, with a deadline; a router that is silent or odd costs nothing but a port.
Source: UPnP Forum, WANIPConnection:2 (error codes 718 and 725).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import miniupnpc
import trio

from nolocod.errors import RouterError
from nolocod.p2p.limits.address_groups import address_of
from nolocod.units import Address

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

T = TypeVar("T")

_PROTOCOL = "TCP"
_NAME = "nolocod"
_TRIES = 4
"""External ports that are tried: ours, then some at random."""
_DISCOVER = 1.5
"""Seconds that routers have to answer, for each of four kinds that are called in turn until one answers."""
_LEASE = 3600
_FAREWELL = 3.0
"""Seconds for giving the mapping back."""


@dataclass(frozen=True)
class UpnpTiming:
    """Seconds."""

    call: float = 15.0
    """For any one question, discovery included."""
    renew: float = 1200.0
    retry: float = 900.0
    """After a failure: the router may be replaced, or UPnP turned on."""


class PortMapper:
    """Keeps a mapping of `port`.

    `mapping` is the router's address and port that lead to ours now; `why` tells in words why there is none.
    """

    def __init__(self, port: int, rng: random.Random, timing: UpnpTiming | None = None) -> None:
        self.mapping: Address | None = None
        self.why = "no router has answered UPnP yet"
        self.asked = trio.Event()
        """The router gave a port, or turned out to give none."""
        self._port = port
        self._rng = rng
        self._timing = timing or UpnpTiming()
        self._threads = trio.CapacityLimiter(1)
        self._gateway: miniupnpc.UPnP | None = None
        """The router that gave the mapping, so that it need not be found again to end it."""

    async def run(self) -> None:
        """Have the mapping and renew it, until cancelled; then give it back."""
        try:
            while True:
                try:
                    self.mapping = await self.map()
                    self.why = ""
                except RouterError as error:
                    self.mapping, self.why = None, error.cause.rstrip(".")
                self.asked.set()
                await trio.sleep(self._timing.renew if self.mapping else self._timing.retry)
        finally:
            if self._gateway is not None and self.mapping is not None:
                give_back = partial(_call, self._gateway.deleteportmapping, self.mapping.port, _PROTOCOL, "")
                with trio.CancelScope(deadline=trio.current_time() + _FAREWELL, shield=True):
                    with suppress(RouterError):  # its lease will end
                        await self._ask(give_back)
                    self.mapping = None

    async def map(self) -> Address:
        """Ask once, for the port that we have already if we do. Raises RouterError with what the router said."""
        kept = self.mapping.port if self.mapping else self._port
        others = [self._rng.randrange(20_000, 60_000) for _ in range(_TRIES - 1)]
        self._gateway, mapping = await self._ask(partial(_map, self._port, [kept, *others]))
        return mapping

    async def _ask(self, question: Callable[[], T]) -> T:
        with trio.move_on_after(self._timing.call):
            return await trio.to_thread.run_sync(
                question,
                abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs know its old name
                limiter=self._threads,
            )
        raise RouterError("the router did not answer in time.")


def _map(port: int, wanted: list[int]) -> tuple[miniupnpc.UPnP, Address]:
    """The router of this network, and the first of the external ports `wanted` that it gives us. Blocks."""
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = int(_DISCOVER * 1000)
    try:
        _call(gateway.discover)
        _call(gateway.selectigd)
    except RouterError as error:
        raise RouterError("no router answers UPnP here.") from error
    host = _call(gateway.externalipaddress)
    address = address_of(host)
    if address is None or address.is_unspecified:
        raise RouterError("the router has no outside address.")
    refused = ""
    for external in wanted:
        for seconds in (_LEASE, 0):  # 725: some routers know only mappings without an end
            try:
                _call(gateway.addportmapping, external, _PROTOCOL, gateway.lanaddr, port, _NAME, "", seconds)
            except RouterError as error:
                refused = error.cause
            else:
                return gateway, Address(host, external)
    raise RouterError(refused)


def _call(method: Callable[..., T], *arguments: object) -> T:
    try:
        return method(*arguments)
    except Exception as error:  # the library raises nothing more exact
        raise RouterError(f"the router refused: {error}.") from error
