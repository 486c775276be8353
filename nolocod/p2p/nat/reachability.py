"""How others reach this node: what is asked of whom and when, and what becomes of it.

The rule: helpers are asked soon after the start, at once when what they would answer has changed, and then now and
then; a class that is known is given up only when two rounds of questions in a row say otherwise.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RefusedError, RemoteError
from nolocod.observe.events import ReachFound
from nolocod.p2p.nat.autonat import AutoNatLimits, AutoNatServer, ask
from nolocod.p2p.nat.classify import Finding, Seen, Sighting, Verdict, find, inside
from nolocod.p2p.nat.port_mapping import PortMapper
from nolocod.p2p.transport.multiaddrs import endpoint, multiaddr_of, public
from nolocod.units import Address

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit, NatClass
    from nolocod.p2p.host import Host
    from nolocod.p2p.nat.classify import RelayUse
    from nolocod.p2p.settings import MeshSettings

_HELPERS = 4
"""Asked in one round."""
_ADDRESSES = 4
"""Told in one question."""
_KEPT = 16
"""Verdicts that are kept."""
_STEADY = 2
"""Rounds of questions in a row that must agree to change a class that is known."""


@dataclass(frozen=True)
class ReachTiming:
    """Seconds."""

    first: float = 5.0
    """From the start to the first questions, so that there is somebody to ask."""
    router: float = 10.0
    """That the first questions wait for the router's answer at most."""
    look: float = 2.0
    """Between two looks at what changed."""
    again: float = 15.0
    """Between rounds of questions while nothing is sure; doubled each time, up to `interval`."""
    interval: float = 300.0
    deaf: float = 1800.0
    """Who knows no AutoNAT is not asked for so long."""
    patience: float = 60.0
    """Without a relay, until it is said that there is none."""


class Reachability:
    """Finds out how others reach `host`. `kind` is None while that is not known; `why` tells the reasons in words.

    Answers the same question for others (AutoNAT), unless relays are all that we connect to. Sets `host.external`.
    """

    def __init__(
        self, host: Host, config: MeshSettings, emit: Emit, rng: random.Random, timing: ReachTiming | None = None
    ) -> None:
        self.kind: NatClass | None = None
        self.why = "nobody was asked yet."
        self._host = host
        self._config = config
        self._emit = emit
        self._rng = rng
        self._timing = timing or ReachTiming()
        self._port = own_port(host)
        self._mapper = self._new_mapper()
        self._verdicts: dict[PeerId, Verdict] = {}
        self._asked = False
        self._tried: set[PeerId] = set()
        """Both since the surroundings changed."""
        self._deaf: dict[PeerId, float] = {}
        self._contrary = 0
        self._told: ReachFound | None = None
        self._alone_since: float | None = None
        host.dialler.to_be_seen = lambda: self.kind is None

    async def run(self) -> None:
        """Find out, and keep finding out, until cancelled."""
        if not self._config.relaying.only:
            AutoNatServer(self._host).serve()
        async with trio.open_nursery() as nursery:
            if self._config.upnp:
                nursery.start_soon(self._keep_mapping)
            await self._keep_asking()

    def _new_mapper(self) -> PortMapper | None:
        """For the router of the network that we are in, if there is one to ask."""
        return PortMapper(self._port, self._rng) if self._config.upnp and _behind_router(self._host.local) else None

    async def _keep_mapping(self) -> None:
        """Ask the router for a port; when our addresses here are gone, or are the first, ask the new network's."""
        while True:
            network = _hosts4(self._host.local)
            async with trio.open_nursery() as nursery:
                if self._mapper is not None:
                    nursery.start_soon(self._mapper.run)
                while True:
                    await trio.sleep(self._timing.look)
                    now = _hosts4(self._host.local)
                    if not (now == network or (self._mapper is not None and now > network)):
                        break
                nursery.cancel_scope.cancel()
            self._mapper = self._new_mapper()

    async def _keep_asking(self) -> None:
        timing = self._timing
        pause = timing.again
        due = trio.current_time() + timing.first
        self._conclude()
        if self._mapper is not None:
            with trio.move_on_after(timing.router):
                await self._mapper.asked.wait()
        asked_about = self._surroundings()
        while True:
            await trio.sleep(timing.look)
            now = trio.current_time()
            if (surroundings := self._surroundings()) != asked_about:
                # what was found before was found about another address
                self._verdicts.clear()
                self._tried.clear()
                self._asked = False
                asked_about, pause = surroundings, timing.again
                due = min(due, now + timing.look)
            elif now >= due or (self.kind is None and self._host.observed.keys() - self._tried):
                await self._ask_around()
                self._asked = True
                sure = self._conclude(after_asking=True)
                due = trio.current_time() + (timing.interval if sure else pause)
                pause = timing.again if sure else min(2 * pause, timing.interval)
                continue
            self._conclude()

    def _surroundings(self) -> tuple[object, ...]:
        """What the helpers' answers depend on. Of where we are seen, in each family, what most addresses say, and the
        longest: one peer that tells another tale each time would have us ask for ever."""
        own = own_hosts(self._host)
        seen = Counter({one.observer: one.host for one in sightings(self._host) if not inside(one.host, own)}.values())
        families = ([host for host in seen if (":" in host) == six] for six in (False, True))
        mapping = self._mapper.mapping if self._mapper else None
        hosts = tuple(max(found, key=seen.__getitem__, default=None) for found in families)
        return self._host.local, mapping and mapping.external, hosts

    # --- asking -----------------------------------------------------------------------------------

    async def _ask_around(self) -> None:
        self._tried &= self._host.observed.keys()
        async with trio.open_nursery() as nursery:
            for helper in self._helpers():
                self._tried.add(helper)
                nursery.start_soon(self._ask, helper)

    def _helpers(self) -> list[PeerId]:
        """Some of those who see us, from as many addresses as can be; those outside of our own network if there are any."""
        now = trio.current_time()
        views = {
            peer: (observer, seen[0])
            for peer, one in self._host.observed.items()
            if now - self._deaf.get(peer, -self._timing.deaf) >= self._timing.deaf
            and (seen := endpoint(one.address)) is not None
            and (observer := endpoint(one.observer or "")) is not None
        }
        own = own_hosts(self._host)
        far = [peer for peer, (_, host) in views.items() if not inside(host, own)] or list(views)
        self._rng.shuffle(far)
        hosts = {views[peer][0][0]: peer for peer in far}
        first = list(hosts.values())
        return [*first, *(peer for peer in far if peer not in first)][:_HELPERS]

    async def _ask(self, helper: PeerId) -> None:
        view = self._host.observed.get(helper)
        seen = endpoint(view.address) if view else None
        if seen is None:
            return
        wanted = candidates(self._host, seen[0], self._config.announce, self._mapped())
        if not wanted:
            return
        try:
            found = await ask(self._host, helper, wanted, AutoNatLimits())
        except RefusedError:
            self._deaf[helper] = trio.current_time()
            return
        except RemoteError:
            return
        if found is not None:
            self._verdicts.pop(helper, None)  # the latest last
            self._verdicts[helper] = Verdict(found.observer, seen[0], found.dialled)
            for peer in [*self._verdicts][:-_KEPT]:
                del self._verdicts[peer]

    def _mapped(self) -> str | None:
        return self._mapper.mapping.address if self._mapper and self._mapper.mapping else None

    # --- concluding -------------------------------------------------------------------------------

    def _conclude(self, *, after_asking: bool = False) -> bool:
        """Whether the class is known, and nothing speaks against it."""
        for peer in [peer for peer, at in self._deaf.items() if trio.current_time() - at >= self._timing.deaf]:
            del self._deaf[peer]
        found = find(self._seen())
        agrees = found.kind == self.kind or self._may_change(found, after_asking)
        if agrees:
            self._contrary = 0
            self.kind, self.why = found.kind, found.why
            self._host.external = tuple(address for address in found.external if address not in self._host.local)
        self._tell()
        return agrees and found.kind is not None

    def _may_change(self, found: Finding, after_asking: bool) -> bool:
        if found.kind is None:
            return False
        if self.kind is None or {"client", "public"} & {found.kind, self.kind} == {"client"}:
            return True  # what relays there are is no matter of opinion
        if after_asking:
            self._contrary += 1
        return self._contrary >= _STEADY

    def _tell(self) -> None:
        told = ReachFound(self.kind, self.why, self._host.addresses)
        if told != self._told:
            self._told = told
            self._emit(told)

    def _seen(self) -> Seen:
        mapper = self._mapper
        return Seen(
            port=self._port,
            own=own_hosts(self._host),
            sightings=sightings(self._host),
            verdicts=tuple(self._verdicts.values()),
            asked=self._asked,
            announce=self._config.announce,
            mapped=self._mapped(),
            router=mapper.why if mapper else "",
            relays=self._relays(),
        )

    def _relays(self) -> RelayUse:
        relaying, now = self._config.relaying, trio.current_time()
        if relaying.only:
            return "only"
        if not relaying.use:
            return "off"
        if self._host.circuits:
            self._alone_since = None
            return "held"
        if self._alone_since is None:
            self._alone_since = now
        return "missing" if now - self._alone_since >= self._timing.patience else "sought"


def own_port(host: Host) -> int:
    """The port that `host` listens on; 0 without one."""
    return host.dialler.port("0.0.0.0") or host.dialler.port("::") or 0


def own_hosts(host: Host) -> frozenset[str]:
    """The IP addresses of `host`'s interfaces."""
    return frozenset(found[0] for found in map(endpoint, host.local) if found)


def sightings(host: Host) -> list[Sighting]:
    """Who sees `host` at what, the latest last."""
    found = []
    for one in sorted(host.observed.values(), key=lambda one: one.at):
        seen, observer = endpoint(one.address), endpoint(one.observer or "")
        if seen is not None and observer is not None:
            found.append(Sighting(observer[0], *seen, one.from_listen_port))
    return found


def candidates(host: Host, seen: str, announce: Sequence[str], mapped: str | None) -> list[str]:
    """Where one who sees us at the IP address `seen` may find us: helpers dial only that.

    Where the owner has said it (`announce`), only there. `mapped`: what the router maps to us.
    """
    observed = [one.address for one in host.observed.values() if one.from_listen_port]
    forwarded = multiaddr_of(Address(seen, own_port(host)))
    found = (*host.local, *host.external, *([mapped] if mapped else []), forwarded, *observed)
    known = dict.fromkeys(announce or found)
    return [text for text in known if (endpoint(text) or ("",))[0] == seen][:_ADDRESSES]


def _behind_router(local: tuple[str, ...]) -> bool:
    """Whether we have private IPv4 addresses only: there is a router to ask, and a reason to."""
    four = _hosts4(local)
    return bool(four) and not any(map(public, four))


def _hosts4(local: tuple[str, ...]) -> set[str]:
    """The IPv4 addresses among `local` but for loopback."""
    found = [ipaddress.ip_address(one[0]) for one in map(endpoint, local) if one]
    return {str(address) for address in found if address.version == 4 and not address.is_loopback}
