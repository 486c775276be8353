"""Reachability, how others reach this node: who is asked to dial us and when (AutoNAT), and what we conclude from it.

The rule: helpers are asked soon after the start, at once when what they would answer has changed, and then now and
then. A class that is known is given up only when two rounds of questions in a row say otherwise.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RefusedError, RemoteError
from nolocod.observe.events import ReachFound
from nolocod.p2p.limits.newest import Newest
from nolocod.p2p.nat import autonat
from nolocod.p2p.nat.classify import Conclusion, DialBack, Evidence, Observed, classify, inside
from nolocod.p2p.nat.port_mapping import PortMapper
from nolocod.p2p.transport.multiaddrs import endpoint, host_of, multiaddr_of, public
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
"""Dial-backs that are kept."""
_STEADY = 2
"""Rounds of questions in a row that must agree to change a class that is known."""
_ROUTER = 10.0
"""Seconds that the first questions wait for the router's answer at most."""
_NO_AUTONAT = 1800.0
"""Who knows no AutoNAT is not asked for so long."""
_PATIENCE = 60.0
"""Seconds without a relay, until it is said that there is none."""


@dataclass(frozen=True)
class ReachTiming:
    """Seconds."""

    first: float = 5.0
    """From the start to the first questions, so that there is somebody to ask."""
    look: float = 2.0
    """Between two looks at what changed."""
    again: float = 15.0
    """Between rounds of questions while nothing is sure; doubled each time, up to `interval`."""
    interval: float = 300.0


class Reachability:
    """Finds out how others reach `host`. `kind` is None while that is not known; `why` tells the reasons in words.

    Answers the same question for others (AutoNAT), unless relays are all that we connect to. Sets `host.external`.
    """

    def __init__(
        self, host: Host, settings: MeshSettings, emit: Emit, rng: random.Random, timing: ReachTiming | None = None
    ) -> None:
        self.kind: NatClass | None = None
        self.why = "nobody was asked yet."
        self._host = host
        self._settings = settings
        self._emit = emit
        self._rng = rng
        self._timing = timing or ReachTiming()
        self._mapper = self._new_mapper()
        self._dial_backs: Newest[PeerId, DialBack] = Newest(_KEPT)
        self._asked: set[PeerId] | None = None
        """Since the surroundings changed; None before the first round."""
        self._no_autonat: dict[PeerId, float] = {}  # until when they are not asked
        self._contrary = 0
        self._told: ReachFound | None = None
        self._relayless_since: float | None = None
        host.dialer.to_be_seen = lambda: self.kind is None

    async def run(self) -> None:
        """Find out, and keep finding out, until cancelled."""
        if not self._settings.relaying.only:
            autonat.AutoNatServer(self._host)
        async with trio.open_nursery() as nursery:
            if self._settings.upnp:
                nursery.start_soon(self._keep_mapping)
            await self._keep_asking()

    # --- the router -------------------------------------------------------------------------------

    def _new_mapper(self) -> PortMapper | None:
        """For the router of the network that we are in; None where a public address needs none."""
        four = _hosts4(self._host)
        behind = bool(four) and not any(map(public, four))
        return PortMapper(own_port(self._host), self._rng) if self._settings.upnp and behind else None

    async def _keep_mapping(self) -> None:
        """Ask the router for a port; when our addresses here are gone, or are the first, ask the new network's."""
        while True:
            network = _hosts4(self._host)
            async with trio.open_nursery() as nursery:
                if self._mapper is not None:
                    nursery.start_soon(self._mapper.run)
                while True:
                    await trio.sleep(self._timing.look)
                    now = _hosts4(self._host)
                    if not (now == network or (self._mapper is not None and now > network)):
                        break
                nursery.cancel_scope.cancel()
            self._mapper = self._new_mapper()

    def _mapped(self) -> str | None:
        return multiaddr_of(self._mapper.mapping) if self._mapper and self._mapper.mapping else None

    # --- asking -----------------------------------------------------------------------------------

    async def _keep_asking(self) -> None:
        timing = self._timing
        pause = timing.again
        due = trio.current_time() + timing.first
        self._conclude()
        if self._mapper is not None:
            with trio.move_on_after(_ROUTER):
                await self._mapper.asked.wait()
        asked_about = self._surroundings()
        while True:
            await trio.sleep(timing.look)
            now = trio.current_time()
            if (surroundings := self._surroundings()) != asked_about:
                # what was found before was found about another address
                self._dial_backs.clear()
                self._asked = None
                asked_about, pause = surroundings, timing.again
                due = min(due, now + timing.look)
            elif now >= due or (self.kind is None and self._host.observed.keys() - (self._asked or set())):
                await self._ask_around()
                sure = self._conclude(after_asking=True)
                due = trio.current_time() + (timing.interval if sure else pause)
                pause = timing.again if sure else min(2 * pause, timing.interval)
                continue
            self._conclude()

    def _surroundings(self) -> tuple[object, ...]:
        """What the helpers' answers depend on. Of where we are seen, in each family, what most addresses say, and have said
        longest: else one peer that says something else each time would have us ask for ever."""
        own = own_hosts(self._host)
        seen = Counter({one.observer: one.host for one in observed(self._host) if not inside(one.host, own)}.values())
        families = ([host for host in seen if (":" in host) == six] for six in (False, True))
        return self._host.local, self._mapped(), tuple(max(found, key=seen.__getitem__, default=None) for found in families)

    async def _ask_around(self) -> None:
        asked = (self._asked or set()) & self._host.observed.keys()
        async with trio.open_nursery() as nursery:
            for peer in self._untold():
                nursery.start_soon(self._host.learn, peer)
            for helper in self._helpers():
                asked.add(helper)
                nursery.start_soon(self._ask, helper)
        self._asked = asked

    def _untold(self) -> list[PeerId]:
        """Some of those who are connected straight and have not told where they see us: they were too busy when we met them."""
        silent = [peer for peer, reach in self._host.peers().items() if reach != "relayed" and peer not in self._host.observed]
        return self._rng.sample(silent, min(len(silent), _HELPERS))

    def _helpers(self) -> list[PeerId]:
        """Some of those who see us, from as many addresses as can be; those outside of our own network if there are any."""
        own, views = own_hosts(self._host), self._host.observed
        known = {peer: host_of(one.observer or "") for peer, one in views.items() if host_of(one.address)}
        observers = {peer: host for peer, host in known.items() if host and peer not in self._no_autonat}
        far = [peer for peer in observers if not inside(host_of(views[peer].address), own)] or list(observers)
        self._rng.shuffle(far)
        first = list({observers[peer]: peer for peer in far}.values())
        return [*first, *(peer for peer in far if peer not in first)][:_HELPERS]

    async def _ask(self, helper: PeerId) -> None:
        try:
            found = await ask(self._host, helper, self._settings.announce, self._mapped())
        except RefusedError:
            self._no_autonat[helper] = trio.current_time() + _NO_AUTONAT
        except RemoteError:
            return
        else:
            if found is not None:
                self._dial_backs[helper] = found

    # --- concluding -------------------------------------------------------------------------------

    def _conclude(self, *, after_asking: bool = False) -> bool:
        """Whether the class is known, and nothing speaks against it."""
        self._no_autonat = {peer: until for peer, until in self._no_autonat.items() if until > trio.current_time()}
        found = classify(self._evidence())
        agrees = found.kind == self.kind or self._may_change(found, after_asking=after_asking)
        if agrees:
            self._contrary = 0
            self.kind, self.why = found.kind, found.why
            self._host.external = tuple(address for address in found.external if address not in self._host.local)
        told = ReachFound(self.kind, self.why, self._host.addresses)
        if told != self._told:
            self._told = told
            self._emit(told)
        return agrees and found.kind is not None

    def _may_change(self, found: Conclusion, *, after_asking: bool) -> bool:
        if found.kind is None:
            return False
        if self.kind is None or {"client", "public"} & {found.kind, self.kind} == {"client"}:
            return True  # what relays there are needs no second round
        if after_asking:
            self._contrary += 1
        return self._contrary >= _STEADY

    def _evidence(self) -> Evidence:
        return Evidence(
            port=own_port(self._host),
            own=own_hosts(self._host),
            observed=observed(self._host),
            dial_backs=tuple(self._dial_backs.values()),
            asked=self._asked is not None,
            announce=self._settings.announce,
            mapped=self._mapped(),
            router=self._mapper.why if self._mapper else "",
            relays=self._relays(),
        )

    def _relays(self) -> RelayUse:
        relaying, now = self._settings.relaying, trio.current_time()
        if relaying.only or not relaying.use:
            return "only" if relaying.only else "off"
        since = self._relayless_since = None if self._host.circuits else self._relayless_since or now
        return "missing" if since is not None and now - since >= _PATIENCE else "open"


async def ask(host: Host, helper: PeerId, announce: Sequence[str], mapped: str | None) -> DialBack | None:
    """Have a connected `helper` dial us where it sees us; None if it does not see us, or would not. Raises RemoteError.

    It is told the addresses that we may have there; where the owner has said them (`announce`), only these. `mapped` is
    what the router maps to us.
    """
    view = host.observed.get(helper)
    seen = host_of(view.address) if view else ""
    others = [one.address for one in host.observed.values() if one.from_listen_port]
    forwarded = multiaddr_of(Address(seen, own_port(host)))
    known = announce or (*host.local, *host.external, *([mapped] if mapped else []), forwarded, *others)
    wanted = [text for text in dict.fromkeys(known) if seen and host_of(text) == seen][:_ADDRESSES]
    return await autonat.ask(host, helper, wanted) if wanted else None


def own_port(host: Host) -> int:
    """The port that `host` listens on; 0 without one."""
    return host.dialer.port("0.0.0.0") or host.dialer.port("::") or 0


def own_hosts(host: Host) -> frozenset[str]:
    """The IP addresses of `host`'s interfaces."""
    return frozenset(filter(None, map(host_of, host.local)))


def observed(host: Host) -> list[Observed]:
    """Who sees `host` at what, the latest last."""
    found = []
    for one in sorted(host.observed.values(), key=lambda one: one.at):
        seen, observer = endpoint(one.address), host_of(one.observer or "")
        if seen is not None and observer:
            found.append(Observed(observer, *seen, one.from_listen_port))
    return found


def _hosts4(host: Host) -> set[str]:
    """`host`'s IPv4 addresses but for loopback."""
    return {one for one in own_hosts(host) if ":" not in one and not ipaddress.ip_address(one).is_loopback}
