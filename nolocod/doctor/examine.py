"""All checks of one machine: their order, which run at once, and their deadlines.

The rule: a finding is shown as soon as it and all before it are known. Every check has its deadline, all together have
`TOTAL` seconds, and any exception in a check becomes that check's failure.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from nolocod.doctor import local, network, reach
from nolocod.doctor.findings import CHECKS, Finding, Findings, fail, failed, ok, skipped, warn
from nolocod.doctor.training import Job, Line
from nolocod.errors import PortTakenError, RefusedError, RemoteError
from nolocod.identity import Identity
from nolocod.p2p.discovery.address_book import AddressBook
from nolocod.p2p.host import HostLimits, open_host
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from nolocod.doctor.findings import Report
    from nolocod.doctor.network import Member, Visit
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
_REMEMBERED = 3
"""Peers of the address book that are asked where no bootstrap address is given."""
_TRIES = 3
"""Ports that the doctor's host tries where any will do."""
_BY_CHILD = ("D02", "D10", "D03", "D04")
"""The child's checks, in its order."""


async def examine(
    config: MeshSettings,
    show: Callable[[Finding], None],
    devices: str = "auto",
    data: Path | None = None,
    seconds: float = TOTAL,
) -> Report:
    """Make all checks for a node with these settings, which would train on `devices`, with the text in `data`."""
    doctor = _Doctor(config, devices, data, Findings(show))
    with trio.move_on_after(seconds):
        await doctor.run()
    doctor.findings.skip_from("D01", f"no time was left of {seconds:.0f} s.")
    return doctor.findings.report()


class _Doctor:
    """One examination. Its attributes are what earlier checks found out for later ones."""

    def __init__(self, config: MeshSettings, devices: str, data: Path | None, findings: Findings) -> None:
        self.findings = findings
        self._config = config
        self._devices = devices
        self._data = str(data.absolute()) if data else ""
        self._here = local.Here()
        self._identity: Identity | None = None
        self._credentials = local.Credentials()
        self._sealed: Sealed | None = None
        self._run_settled = trio.Event()
        """Set once it is known which run, or that none is."""
        self._parameters: int | None = None
        self._kind: NatClass | None = None
        self._members: list[Member] = []

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._training)
            await self._local()
            await self._network()
            self._run_settled.set()

    async def _check(self, code: str, look: Callable[[], Awaitable[Finding | tuple[Finding, T]]]) -> T | None:
        """Make one check, whose failure is whatever it raises; returns what it found beside the finding."""
        seconds = CHECKS[code].seconds
        try:
            with trio.fail_after(seconds):
                found = await look()
        except trio.TooSlowError:
            found = fail(code, f"no result within {seconds:.0f} s.")
        except Exception as error:  # noqa: BLE001  # the doctor's promise: it never crashes
            found = failed(code, error)
        finding, beside = found if isinstance(found, tuple) else (found, None)
        self.findings.put(code, finding)
        return beside

    # --- this machine -----------------------------------------------------------------------------

    async def _check_here(self, code: str, look: Callable[[], Finding | tuple[Finding, T]]) -> T | None:
        """A check of this machine, in a thread: disks can hang too."""
        in_thread = partial(trio.to_thread.run_sync, look, abandon_on_cancel=True)  # type: ignore[call-arg] # old stubs
        return await self._check(code, in_thread)

    async def _local(self) -> None:
        config, paths = self._config, self._config.paths
        await self._check_here("D01", local.python_version)
        await self._check_here("D06", partial(local.data_directory, paths))
        self._identity = await self._check_here("D07", partial(local.identity_file, paths))
        self._here = await self._check_here("D08", partial(local.node_here, paths)) or self._here
        self._sealed = await self._check_here("D09", partial(local.stored_run, paths))
        if self._sealed is not None:
            self._run_settled.set()
        await self._check_here("D11", partial(local.port, config.listen, self._here))
        await self._check_here("D12", partial(local.own_addresses, config.listen, config.announce, self._here.running))
        own = self._identity.peer_id if self._identity else None
        in_order = partial(local.credentials_in_order, config, own, self._sealed, time.time())
        self._credentials = await self._check_here("D13", in_order) or self._credentials

    # --- training ---------------------------------------------------------------------------------

    async def _training(self) -> None:
        """D02, D03, D04, D10 in a child, and D05, which needs the model's size."""
        ended = ""
        with trio.move_on_after(_CHILD):
            try:
                ended = await self._child()
            except Exception as error:  # noqa: BLE001  # as in _check
                ended = failed("D02", error).found
        missing = [code for code in _BY_CHILD if code in self.findings.missing()]
        for code in missing:
            if code != missing[0]:
                self.findings.put(code, skipped(code, f"see {missing[0]}."))
            elif ended or code == "D02":
                self.findings.put(code, fail(code, f"torch's process: {ended or f'no result within {_CHILD:.0f} s.'}"))
            else:  # torch itself is there
                text = f"no result within {_CHILD:.0f} s: this machine is slow or busy."
                self.findings.put(code, warn(code, text, "Run the doctor again when the machine is less busy."))
        await self._check_here("D05", partial(local.disk, self._config.paths, self._parameters))

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
                        told = msgspec.json.decode(line, type=Line)
                        self._parameters = told.parameters or self._parameters
                        if told.finding is not None:
                            self.findings.put(told.finding.code, told.finding)
                nursery.cancel_scope.cancel()
            status = await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
        return f"it was killed by {signal.Signals(-status).name}." if status < 0 else f"it ended with status {status}."

    async def _instruct(self, stdin: trio.abc.SendStream) -> None:
        """Send the job as soon as the run is known: torch is imported meanwhile."""
        await self._run_settled.wait()
        manifest = self._sealed.to_bytes() if self._sealed else b""
        base = str(self._config.paths.base.absolute())
        job = Job(devices=self._devices, data=self._data, manifest=manifest, loaded=self._here.held, base=base)
        try:
            async with stdin:
                await stdin.send_all(msgspec.json.encode(job))
        except trio.BrokenResourceError:
            return  # the child has ended, which its output shows

    # --- peers --------------------------------------------------------------------------------------

    async def _network(self) -> None:
        """A host of the doctor's own, and all checks that need one; any exception fails the first check without a finding."""
        identity, listen, whose = self._identity, self._config.listen, "as this node"
        if self._here.held or identity is None:
            identity, whose = Identity.generate(), "with an identity of its own"
        port_is_free = all(one.status == "ok" for one in self.findings.of("D11"))
        if self._here.held or not port_is_free:
            listen = tuple(Address(address.host, 0) for address in listen)
        events: list[Event] = []
        why = "the doctor's host did not start (D20)."
        try:
            async with AsyncExitStack() as stack:
                host = await self._open_host(stack, identity, listen, events)
                host.vouch((*self._config.announce, *self._config.bootstrap, *self._credentials.bootstrap))
                self.findings.put("D20", ok("D20", f"{whose}, at {', '.join(host.announced[:3])}."))
                why = "the doctor's host failed."
                await self._peers(host, identity, events)
        except Exception as error:  # noqa: BLE001  # as in _check
            for code in [code for code in self.findings.missing() if code >= "D20"][:1]:
                self.findings.put(code, failed(code, error))
        self.findings.skip_from("D20", why)

    async def _open_host(
        self, stack: AsyncExitStack, identity: Identity, listen: Sequence[Address], events: list[Event]
    ) -> Host:
        """Where any port will do, one that another process took between choice and bind is no failure."""
        tries = 1 if any(address.port for address in listen) else _TRIES
        while True:
            tries -= 1
            opened = open_host(
                identity, listen, self._config.announce, events.append, HostLimits(), None, self._credentials.gater
            )
            try:
                return await stack.enter_async_context(opened)
            except* PortTakenError:
                if not tries:
                    raise

    def _addresses(self) -> list[str]:
        """Whom to ask: bootstraps, given or in the invitation; without them, peers of the address book."""
        if named := (*self._config.bootstrap, *self._credentials.bootstrap):
            return list(dict.fromkeys(named))
        recent = AddressBook(self._config.paths.peers, lambda _: None).recent()
        return [f"{places[0].partition('/p2p/' + peer)[0]}/p2p/{peer}" for peer, places in recent[:_REMEMBERED] if places]

    async def _peers(self, host: Host, identity: Identity, events: list[Event]) -> None:
        client = reach.prepare(host, events)
        visits = await self._visits(host, identity)
        self._sealed = self._sealed or next((one.sealed for one in visits if one.good), None)
        self._run_settled.set()
        found = network.combined(visits, beside_node=self._here.held)
        for code in network.BOOTSTRAP:
            none = skipped(code, "no bootstrap address was given, and no peer is remembered.")
            self.findings.put(code, *([one for one in found if one.code == code] or [none]))
        peers = list(dict.fromkeys(one.peer for one in visits if one.peer is not None))
        report = self._here.report
        for finding in reach.reported(report.reach) if report is not None else ():
            self.findings.put(finding.code, finding)
        if not peers or self._sealed is None:
            self.findings.skip_from("D24", "no peer of the run answers (D21 to D23).")
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "D24", partial(self._clock, host, peers, self._sealed, identity))
            nursery.start_soon(self._check, "D25", partial(network.dht, host, peers, self._sealed))
            if report is None:
                nursery.start_soon(self._reach, host, peers)
        if report is None:
            relays = [peer for peer in peers if host.straight(peer)]
            await self._check("D28", partial(reach.relay, host, client, relays, self._kind))
            await self._check("D29", partial(reach.punch, host, self._members, events, self._kind))

    async def _visits(self, host: Host, identity: Identity) -> list[Visit]:
        """All bootstrap addresses at once; the visits in the order of the addresses."""
        own = {one.peer_id for one in (self._identity, self._here.running) if one is not None}
        run_id = self._sealed.run_id if self._sealed else None
        visits = [network.Visit(text) for text in self._addresses()]
        async with trio.open_nursery() as nursery:
            for visit in visits:
                nursery.start_soon(visit.go, host, identity, run_id, own)
        return visits

    async def _clock(self, host: Host, peers: Sequence[PeerId], sealed: Sealed, identity: Identity) -> Finding:
        offsets = []
        for peer in peers:
            try:
                members = await network.members(host, peer, sealed, identity)
            except RefusedError as error:
                return skipped("D24", f"members tell their time to members only: {error.cause}")
            except RemoteError:
                continue  # D23 was fine a moment ago, and one peer is enough
            offsets += [member.offset for member in members if member.peer == peer]
            self._members += [member for member in members if member.peer not in peers]
        return network.clock(offsets)

    async def _reach(self, host: Host, peers: Sequence[PeerId]) -> None:
        """D27 before D26, because helpers may get through to the port that the router maps."""
        async with reach.router(host, self._config, random.Random()) as asked:
            self.findings.put("D27", asked.finding)
            self._kind = await self._check("D26", partial(reach.reachability, host, peers, self._config.announce, asked))
