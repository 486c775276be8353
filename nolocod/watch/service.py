"""One observer put together: found the run, asks its members, keeps its history, serves its page."""

from __future__ import annotations

import gc
import random
import signal
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.disk import make_folder
from nolocod.errors import LocalError
from nolocod.identity import load_or_create
from nolocod.observe.events import Troubled
from nolocod.observe.run.pages import RunPages
from nolocod.observe.run.state import RunState
from nolocod.observe.status.access import PageAccess, is_loopback, make_token, read_token
from nolocod.observe.status.server import serve_http
from nolocod.p2p.transport.multiaddrs import split, via
from nolocod.run import credentials
from nolocod.run.amendments import goal
from nolocod.run.invitations import unchecked
from nolocod.run.manifest import RunId
from nolocod.watch.observer import Observer, open_seeker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.observe.events import Emit
    from nolocod.observe.run.report import RunReport
    from nolocod.p2p.settings import MeshSettings
    from nolocod.run.manifest import Sealed
    from nolocod.units import Address
    from nolocod.watch.observer import Seeker

_LOOK_EVERY = 1.0
_SAVE_EVERY = 60.0
_FIRST = 10.0
"""Seconds that are given to the members to answer where the report is printed once."""


@dataclass(frozen=True)
class WatchConfig:
    """What one observer is told."""

    mesh: MeshSettings
    http: Address
    http_token: Path | None = None
    hosts: tuple[str, ...] = ()
    """Under which a reverse proxy passes requests on."""


@asynccontextmanager
async def seeking(mesh: MeshSettings, emit: Emit) -> AsyncIterator[tuple[Seeker, RunId]]:
    """Be on the network with the identity of the data directory; and which run was asked for.

    Raises UsageError for an address that is none, and what `credentials.accept` raises for an invitation.
    """
    make_folder(mesh.data_dir)
    identity = load_or_create(mesh.paths.identity)
    access = mesh.access
    token = credentials.accept(mesh.paths, access.invite, identity.peer_id, time.time()) if access.invite else None
    texts = (*mesh.bootstrap, *(token.bootstrap if token else ()))
    bootstrap = [(peer, (address,)) for peer, address in map(split, texts)]
    bootstrap += [(found[0], (found[1],)) for _, (address,) in bootstrap if (found := via(address))]
    prologue = credentials.prologue(credentials.network_key(mesh.paths, access.network_key))
    async with open_seeker(identity, bootstrap, prologue, emit) as seeker:
        yield seeker, RunId(mesh.run or (unchecked(token).run_id if token else ""))


async def watch(config: WatchConfig, emit: Emit, tell: Callable[[Sealed, str], None]) -> None:
    """Serve the run's page until SIGTERM or SIGINT; `tell` is given the run, and where the page is."""
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_on_signal, nursery.cancel_scope)
        nursery.start_soon(_serve, config, emit, tell)


async def _end_on_signal(everything: trio.CancelScope, task_status: TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            everything.cancel()


async def _serve(config: WatchConfig, emit: Emit, tell: Callable[[Sealed, str], None]) -> None:
    async with seeking(config.mesh, emit) as (seeker, run_id), trio.open_nursery() as nursery:
        sealed = await seeker.find(run_id)
        observer = Observer(seeker, sealed, config.mesh, random.SystemRandom())
        state = RunState(sealed, trio.current_time)
        history = config.mesh.data_dir / f"history-{sealed.run_id[:16]}.json"
        state.restore(history)
        http = await nursery.start(serve_http, config.http, RunPages(lambda: state.report), access_of(config))
        tell(sealed, http)
        gc.collect()
        gc.freeze()
        nursery.start_soon(observer.run)
        nursery.start_soon(_look, state, observer)
        try:
            while True:
                await trio.sleep(_SAVE_EVERY)
                try:
                    await trio.to_thread.run_sync(state.save, history)
                except LocalError as error:
                    emit(Troubled(error.code, error.cause))
        finally:
            with suppress(LocalError):
                state.save(history)


async def report_once(mesh: MeshSettings, emit: Emit) -> RunReport:
    """The run as it is after some seconds of asking."""
    async with seeking(mesh, emit) as (seeker, run_id), trio.open_nursery() as nursery:
        sealed = await seeker.find(run_id)
        observer, state = Observer(seeker, sealed, mesh, random.SystemRandom()), RunState(sealed, trio.current_time)
        nursery.start_soon(observer.run)
        nursery.start_soon(_look, state, observer)
        await trio.sleep(_FIRST)
        nursery.cancel_scope.cancel()
    return state.report


async def _look(state: RunState, observer: Observer) -> None:
    while True:
        state.look(observer.live(), observer.contributions(), observer.exchanges(), goal(observer.amended.sealed))
        await trio.sleep(_LOOK_EVERY)


def access_of(config: WatchConfig) -> PageAccess:
    """Who may read the page: HttpTokenError for a token file that holds none."""
    hosts = frozenset(host.lower() for host in config.hosts)
    if config.http_token is not None:
        return PageAccess(read_token(config.http_token), hosts=hosts)
    if is_loopback(config.http.host):
        return PageAccess(hosts=hosts)
    return PageAccess(make_token(config.mesh.paths.http_token), hosts=hosts)
