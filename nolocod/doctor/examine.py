"""All checks of one machine: in which order, beside each other or not, within which time.

The rule: a finding is told as soon as it and all before it are there. Every check has its deadline, all together
have `TOTAL` seconds, and whatever goes wrong in a check that nobody thought of is that check's failure.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from nolocod.doctor import local, network, reach
from nolocod.doctor.findings import CHECKS, Finding, Report, fail, failed, ok, skipped, warn
from nolocod.doctor.training import Job, Line
from nolocod.errors import NolocodError, PortTakenError, RefusedError, RemoteError, on_one_line
from nolocod.identity import Identity
from nolocod.p2p.discovery.address_book import AddressBook
from nolocod.p2p.host import HostLimits, open_host
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from nolocod.doctor.network import Told, Visit
    from nolocod.identity import PeerId
    from nolocod.observe.events import Event, NatClass
    from nolocod.p2p.host import Host
    from nolocod.p2p.settings import MeshSettings
    from nolocod.run.manifest import Sealed

T = TypeVar("T")

TOTAL = 40.0
"""Seconds for everything."""
_CHILD = 36.0
"""Seconds for the checks that need torch."""
_TRIES = 3
_REMEMBERED = 3
"""Peers of earlier days that stand in where no bootstrap address is given."""
_CHILDS = ("D02", "D10", "D03", "D04")
"""The child's checks, in its order."""


class Findings:
    """Collects what checks found and passes it on in the order of their codes."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell = tell
        self._found: dict[str, tuple[Finding, ...]] = {}
        self._pending = list(CHECKS)

    def put(self, code: str, *found: Finding) -> None:
        """What check `code` found; the first word counts. Several where it looked at several things."""
        self._found.setdefault(code, found)
        while self._pending and self._pending[0] in self._found:
            for finding in self._found[self._pending.pop(0)]:
                self._tell(finding)

    def missing(self) -> list[str]:
        return [code for code in CHECKS if code not in self._found]

    def report(self) -> Report:
        return Report.of(finding for found in self._found.values() for finding in found)


@dataclass
class _Known:
    """What checks have found out for others."""

    here: local.Here = field(default_factory=local.Here)
    identity: Identity | None = None
    sealed: Sealed | None = None
    run_settled: trio.Event = field(default_factory=trio.Event)
    """Set once it is known which run, or that none is."""
    parameters: int | None = None
    exchange: int | None = None
    measured: trio.Event = field(default_factory=trio.Event)
    """Set once the child is done."""
    credentials: local.Credentials = field(default_factory=local.Credentials)
    kind: NatClass | None = None
    members: list[Told] = field(default_factory=list)


async def examine(
    config: MeshSettings,
    tell: Callable[[Finding], None],
    device: str = "auto",
    data: Path | None = None,
    seconds: float = TOTAL,
) -> Report:
    """Make all checks for a node with these settings, which would train on `device`, with the text in `data`."""
    doctor = _Doctor(config, device, data, Findings(tell))
    with trio.move_on_after(seconds):
        await doctor.run()
    for code in doctor.findings.missing():
        doctor.findings.put(code, skipped(code, f"no time was left of {seconds:.0f} s."))
    return doctor.findings.report()


class _Doctor:
    def __init__(self, config: MeshSettings, device: str, data: Path | None, findings: Findings) -> None:
        self.findings = findings
        self._config = config
        self._device = device
        self._data = str(data.absolute()) if data else ""
        self._known = _Known()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._training)
            await self._local()
            await self._network()
            self._known.run_settled.set()

    # --- one check --------------------------------------------------------------------------------

    async def _check(self, code: str, look: Callable[[], Awaitable[Finding | Sequence[Finding]]]) -> bool:
        """Make one check; whatever it raises is its failure. Whether nothing failed."""
        found = await self._guarded(code, look)
        listed = (found,) if isinstance(found, Finding) else tuple(found)
        self.findings.put(code, *listed)
        return all(one.status != "fail" for one in listed)

    async def _guarded(
        self, code: str, look: Callable[[], Awaitable[Finding | Sequence[Finding]]]
    ) -> Finding | Sequence[Finding]:
        seconds = CHECKS[code].seconds
        try:
            with trio.fail_after(seconds):
                return await look()
        except trio.TooSlowError:
            return fail(code, f"no result within {seconds:.0f} s.")
        except NolocodError as error:
            return failed(code, error)
        except Exception as error:  # noqa: BLE001  # the doctor's promise: it never crashes
            return _broken(code, error)

    async def _here(self, code: str, look: Callable[[], Finding | tuple[Finding, T]]) -> T | None:
        """A check of this machine, in a thread: disks can hang too. Returns what it found beside the finding."""
        beside: list[T] = []

        async def ask() -> Finding:
            found = await trio.to_thread.run_sync(look, abandon_on_cancel=True)  # type: ignore[call-arg] # old stubs
            if isinstance(found, tuple):
                beside.append(found[1])
                return found[0]
            return found

        await self._check(code, ask)
        return beside[0] if beside else None

    # --- this machine -----------------------------------------------------------------------------

    async def _local(self) -> None:
        config, paths, known = self._config, self._config.paths, self._known
        await self._here("D01", local.python_version)
        await self._here("D06", partial(local.data_directory, paths))
        known.identity = await self._here("D07", partial(local.identity_file, paths))
        known.here = await self._here("D08", partial(local.node_here, paths)) or local.Here()
        known.sealed = await self._here("D09", partial(local.stored_run, paths))
        if known.sealed is not None:
            known.run_settled.set()
        await self._here("D11", partial(local.port, config.listen, known.here))
        await self._here("D12", partial(local.own_addresses, config.listen, config.announce, known.here.running))
        own = known.identity.peer_id if known.identity else None
        in_order = partial(local.credentials_in_order, config, own, known.sealed, time.time())
        known.credentials = await self._here("D13", in_order) or known.credentials

    # --- training ---------------------------------------------------------------------------------

    async def _training(self) -> None:
        """D02, D03, D04, D10 in a child, and D05, which needs the model's size."""
        told = ""
        with trio.move_on_after(_CHILD):
            try:
                told = await self._child()
            except Exception as error:  # noqa: BLE001  # as in _guarded
                told = f"the check itself failed ({type(error).__name__}: {error})."
        missing = [code for code in _CHILDS if code in self.findings.missing()]
        for code in missing:
            if code != missing[0]:
                self.findings.put(code, skipped(code, f"see {missing[0]}."))
            elif told or code == "D02":
                self.findings.put(code, fail(code, f"torch's process: {told or f'no result within {_CHILD:.0f} s.'}"))
            else:  # torch itself is there
                text = f"no result within {_CHILD:.0f} s: this machine is slow, or busy."
                self.findings.put(code, warn(code, text, "Run the doctor again when less else runs."))
        self._known.measured.set()
        await self._here("D05", partial(local.disk, self._config.paths, self._known.parameters))

    async def _child(self) -> str:
        """Run the child and take its lines; how it ended, in words."""
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "nolocod.doctor.training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._instruct, process.stdin)
                rest = b""
                async for part in process.stdout:
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self._take(msgspec.json.decode(line, type=Line))
                nursery.cancel_scope.cancel()
            status = await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
        if status < 0:
            return f"it was killed by {signal.Signals(-status).name}."
        return f"it ended with status {status}."

    async def _instruct(self, stdin: trio.abc.SendStream) -> None:
        """Send the job as soon as the run is known: torch is imported meanwhile."""
        await self._known.run_settled.wait()
        sealed = self._known.sealed
        job = Job(
            device=self._device,
            data=self._data,
            manifest=sealed.to_bytes() if sealed else b"",
            loaded=self._known.here.held,
        )
        try:
            async with stdin:
                await stdin.send_all(msgspec.json.encode(job))
        except trio.BrokenResourceError:
            return  # it has ended, which its output tells

    def _take(self, line: Line) -> None:
        if line.finding is not None:
            self.findings.put(line.finding.code, line.finding)
        self._known.parameters = line.parameters or self._known.parameters
        self._known.exchange = line.exchange or self._known.exchange

    # --- peers --------------------------------------------------------------------------------------

    async def _network(self) -> None:
        config, known = self._config, self._known
        addresses = self._addresses()
        identity = Identity.generate() if known.here.held or known.identity is None else known.identity
        listen = config.listen
        if known.here.held or not self._listens():
            listen = tuple(Address(address.host, 0) for address in config.listen)
        why = "there is no host to look with (D20)."
        try:
            async with self._host(identity, listen) as (host, events):
                whose = "with an identity of its own" if identity is not known.identity else "as this node"
                self.findings.put("D20", ok("D20", f"{whose}, at {', '.join(host.announced[:3])}."))
                why = "the doctor's host failed."
                await self._peers(host, identity, addresses, events)
        except Exception as error:  # noqa: BLE001  # as in _guarded
            self._fail_next("D20", error)
        for code in [code for code in self.findings.missing() if code > "D20"]:
            self.findings.put(code, skipped(code, why))

    def _fail_next(self, first: str, error: Exception) -> None:
        """What befell the doctor itself is the failure of the first check from `first` on that has no word yet."""
        for code in [code for code in self.findings.missing() if code >= first][:1]:
            self.findings.put(code, failed(code, error) if isinstance(error, NolocodError) else _broken(code, error))

    @asynccontextmanager
    async def _host(self, identity: Identity, listen: Sequence[Address]) -> AsyncIterator[tuple[Host, list[Event]]]:
        """The doctor's host, and what it tells; where any port will do, one that was snatched away is no failure."""
        events: list[Event] = []
        for attempt in range(_TRIES):
            async with AsyncExitStack() as stack:
                opened = open_host(
                    identity, listen, self._config.announce, events.append, HostLimits(), None, self._known.credentials.gate
                )
                try:
                    host = await stack.enter_async_context(opened)
                except PortTakenError:
                    if any(address.port for address in listen) or attempt == _TRIES - 1:
                        raise
                else:
                    yield host, events
                    return

    def _listens(self) -> bool:
        """Whether D11 found nothing to say against --listen."""
        return all(one.status == "ok" for one in self.findings.report().findings if one.code == "D11")

    def _addresses(self) -> list[str]:
        """Whom to ask: bootstraps, given or in the invitation, else peers of earlier days."""
        if named := (*self._config.bootstrap, *self._known.credentials.bootstrap):
            return list(named)
        recent = AddressBook(self._config.paths.peers, lambda _: None).recent()
        return [f"{places[0].partition('/p2p/' + peer)[0]}/p2p/{peer}" for peer, places in recent[:_REMEMBERED] if places]

    async def _peers(self, host: Host, identity: Identity, addresses: Sequence[str], events: list[Event]) -> None:
        known = self._known
        client = reach.prepare(host, events)
        visits = await self._visits(host, identity, addresses)
        known.sealed = known.sealed or next((one.sealed for one in visits if one.good), None)
        known.run_settled.set()
        found = network.tempered(visits, in_passing=known.here.held)
        none = "no bootstrap address was given, and no peer is remembered."
        for code in ("D21", "D22", "D23"):
            self.findings.put(code, *([one for one in found if one.code == code] or [skipped(code, none)]))
        peers = list(dict.fromkeys(one.peer for one in visits if one.peer is not None))
        report = known.here.report
        if report is not None:
            for finding in reach.told(report.reach):
                self.findings.put(finding.code, finding)
        if not peers or known.sealed is None:
            for code in [code for code in self.findings.missing() if code > "D23"]:
                self.findings.put(code, skipped(code, "no peer of the run answers (D21 to D23)."))
            return
        sealed = known.sealed
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "D24", partial(self._clock, host, peers, sealed, identity))
            nursery.start_soon(self._check, "D25", partial(network.dht, host, peers, sealed))
            if report is None:
                nursery.start_soon(self._reach, host, peers)
        if report is None:
            relays = [peer for peer in peers if host.straight(peer)]
            await self._check("D28", partial(reach.relay, host, client, relays, known.kind))
            await self._check("D29", partial(reach.punch, host, known.members, events, known.kind))
        with trio.move_on_after(CHECKS["D30"].seconds / 2):
            await known.measured.wait()  # a figure about a line should not be one about a processor that is busy
        await self._check("D30", partial(network.throughput, host, peers[0], known.exchange))

    async def _visits(self, host: Host, identity: Identity, addresses: Sequence[str]) -> list[Visit]:
        """All addresses at once; in their order."""
        known = self._known
        own = {one.peer_id for one in (known.identity, known.here.running) if one is not None}
        run_id = known.sealed.run_id if known.sealed else None
        visits: dict[int, Visit] = {}

        async def go(number: int, text: str) -> None:
            try:
                with trio.fail_after(sum(CHECKS[code].seconds for code in ("D21", "D22", "D23"))):
                    visits[number] = await network.visit(host, text, identity, run_id, own)
            except trio.TooSlowError:
                visits[number] = network.Visit(text, [fail("D23", "no result in time.", "", text)])
            except Exception as error:  # noqa: BLE001  # as in _guarded
                visits[number] = network.Visit(text, [_broken("D21", error, text)])

        async with trio.open_nursery() as nursery:
            for number, text in enumerate(dict.fromkeys(addresses)):
                nursery.start_soon(go, number, text)
        return [visits[number] for number in sorted(visits)]

    async def _clock(self, host: Host, peers: Sequence[PeerId], sealed: Sealed, identity: Identity) -> Finding:
        offsets = []
        for peer in peers:
            try:
                told = await network.members(host, peer, sealed, identity)
            except RefusedError as error:
                return skipped("D24", f"members tell their time to members only: {error.cause}")
            except RemoteError:
                continue  # D23 was fine a moment ago; one of them suffices
            offsets += [member.offset for member in told if member.peer == peer]
            self._known.members += [member for member in told if member.peer not in peers]
        return network.clock(offsets)

    async def _reach(self, host: Host, peers: Sequence[PeerId]) -> None:
        """D27 before D26, because a port of the router's may be what helpers get through to."""
        config, known = self._config, self._known
        beside: list[NatClass | None] = []

        async def ask(asked: reach.Router) -> Finding:
            found, kind = await reach.reachability(host, peers, config, asked)
            beside.append(kind)
            return found

        async with reach.router(host, config, random.Random()) as asked:
            self.findings.put("D27", asked.finding)
            await self._check("D26", partial(ask, asked))
        known.kind = beside[0] if beside else None


def _broken(code: str, error: Exception, about: str = "") -> Finding:
    text = f"the check itself failed ({type(error).__name__}: {on_one_line(error, 200)})."
    return fail(code, text, "Report it, with this line.", about, NolocodError.entry.code)
