"""A port of the router's, by UPnP: asked for, renewed, and given back at the end.

The rule: the router's word counts for nothing until a peer has dialled the mapped address. The library blocks,
so that it runs in a thread, with a deadline; a router that is silent or odd costs nothing but a port.
Source: UPnP Forum, WANIPConnection:2 (error codes 718 and 725).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import miniupnpc
import trio

from nolocod.errors import RouterError
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.units import Address

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

T = TypeVar("T")

_PROTOCOL = "TCP"
_NAME = "nolocod"
_TRIES = 4
"""External ports that are tried: ours, then some at random."""


@dataclass(frozen=True)
class Mapping:
    """`external`, an IP address and a port of the router's, leads to our port. `lease` is in seconds, 0 for ever."""

    external: Address
    lease: int

    @property
    def address(self) -> str:
        """As a multiaddr."""
        return multiaddr_of(self.external)


@dataclass(frozen=True)
class UpnpTiming:
    """Seconds."""

    discover: float = 1.5
    """How long routers have to answer, for each of four kinds that are called in turn until one answers."""
    call: float = 15.0
    """For any one question, discovery included."""
    lease: int = 3600
    renew: float = 1200.0
    retry: float = 900.0
    """After a failure: the router may be replaced, or UPnP turned on."""
    farewell: float = 3.0


class PortMapper:
    """Keeps a mapping of `port`. `mapping` is what there is now, `why` tells in words why there is none."""

    def __init__(self, port: int, rng: random.Random, timing: UpnpTiming | None = None) -> None:
        self.mapping: Mapping | None = None
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
            if self.mapping is not None:
                with trio.CancelScope(deadline=trio.current_time() + self._timing.farewell, shield=True):
                    await self._unmap(self.mapping)

    async def map(self) -> Mapping:
        """Ask once, for the port that we have already if we do. Raises RouterError with what the router said."""
        kept = self.mapping.external.port if self.mapping else self._port
        others = [self._rng.randrange(20_000, 60_000) for _ in range(_TRIES - 1)]
        gateway, mapping = await self._ask(partial(_map, self._port, [kept, *others], self._timing))
        self._gateway = gateway
        return mapping

    async def _unmap(self, mapping: Mapping) -> None:
        try:
            await self._ask(partial(_unmap, self._gateway, mapping.external.port))
        except RouterError as error:
            self.why = error.cause.rstrip(".")  # its lease will end
        self.mapping = None

    async def _ask(self, question: Callable[[], T]) -> T:
        with trio.move_on_after(self._timing.call):
            return await trio.to_thread.run_sync(
                question,
                abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs know its old name
                limiter=self._threads,
            )
        raise RouterError("the router did not answer in time.")


def _map(port: int, wanted: list[int], timing: UpnpTiming) -> tuple[miniupnpc.UPnP, Mapping]:
    """Blocks. The router, and the first of the external ports `wanted` that the router gives us."""
    gateway = _find(timing)
    host = _call(gateway.externalipaddress)
    if not _usable(host):
        raise RouterError("the router has no address outside.")
    lease = timing.lease
    refused = ""
    for external in wanted:
        for seconds in (lease, 0):  # 725: some routers know only mappings without an end
            try:
                _call(gateway.addportmapping, external, _PROTOCOL, gateway.lanaddr, port, _NAME, "", seconds)
            except RouterError as error:
                refused = error.cause
            else:
                return gateway, Mapping(Address(host, external), seconds)
    raise RouterError(refused)


def _usable(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _unmap(gateway: miniupnpc.UPnP, external: int) -> None:
    """Blocks."""
    _call(gateway.deleteportmapping, external, _PROTOCOL, "")


def _find(timing: UpnpTiming) -> miniupnpc.UPnP:
    """The router of this network. Blocks."""
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = int(timing.discover * 1000)
    try:
        _call(gateway.discover)
        _call(gateway.selectigd)
    except RouterError as error:
        raise RouterError("no router answers UPnP here.") from error
    return gateway


def _call(method: Callable[..., T], *arguments: object) -> T:
    try:
        return method(*arguments)
    except Exception as error:  # the library raises nothing more exact
        raise RouterError(f"the router refused: {error}.") from error
