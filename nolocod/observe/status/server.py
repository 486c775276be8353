"""The node's HTTP pages: the status page at /, /status.json, /events, /metrics, /healthz, /readyz.

The rule: read only. What is served are this package's own files and the node's own report; `guard` says to whom, and
`http` how much of it at once. The status page may load nothing from anywhere but this node.
"""

from __future__ import annotations

import errno
import socket
from importlib import resources
from ipaddress import ip_address
from typing import TYPE_CHECKING

import msgspec
import trio

from nolocod.errors import PortTakenError, UsageError
from nolocod.observe.status.access import PageAccess, refusal
from nolocod.observe.status.http import Reply, Request, serve
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.observe.metrics import Metrics
    from nolocod.observe.status.state import StatusState

    Send = Callable[[bytes], Awaitable[None]]

_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/loss.js": ("loss.js", "text/javascript; charset=utf-8"),
    "/swarm.js": ("swarm.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    ("content-security-policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
)
READERS = 16
"""Of /events, at once."""
_EVERY = 1.0
"""Seconds between two reports where nothing happens."""
_LOOKS = 5
"""In that time, at whether something did."""


class Pages:
    """The answers, without a socket."""

    def __init__(self, status: StatusState, metrics: Metrics) -> None:
        self._status = status
        self._metrics = metrics
        self._readers = 0

    def answer(self, method: str, path: str) -> Reply:
        """The reply to one request of somebody who may ask."""
        match path:
            case _ if method not in ("GET", "HEAD"):
                return _not_allowed(method)
            case "/metrics":
                return Reply(200, self._metrics.render(), self._metrics.content_type)
            case "/status.json":
                return Reply(200, self._report())
            case "/events":
                if self._readers >= READERS:
                    return refusal(503, f"{READERS} others watch already")
                return Reply(200, b"retry: 2000\n\n", "text/event-stream", feed=self._feed)
            case "/healthz":
                return Reply(200, b'{"alive":true}')
            case "/readyz":
                report = self._status.snapshot(self._status.clock())
                ready = report.state in ("training", "finished")
                # no more than that: anybody may ask, and what it waits for can name peers
                body = {"ready": ready, "state": report.state}
                return Reply(200 if ready else 503, msgspec.json.encode(body))
            case _ if path in _PAGE_FILES:
                name, kind = _PAGE_FILES[path]
                return Reply(200, resources.files("nolocod.observe.status").joinpath("page", name).read_bytes(), kind, _POLICY)
            case _:
                return refusal(404, "no such page; there are /, /status.json, /events, /metrics, /healthz and /readyz")

    def _report(self) -> bytes:
        return msgspec.json.encode(self._status.snapshot(self._status.clock()))

    async def _feed(self, send: Send) -> None:
        """Whole reports: as soon as something happened, else once a second. Who reads too slowly is cut off by `http`."""
        if self._readers >= READERS:  # since it was answered
            return
        self._readers += 1
        try:
            while True:
                told = self._status.news
                await send(b"data: " + self._report() + b"\n\n")
                for _ in range(_LOOKS):
                    await trio.sleep(_EVERY / _LOOKS)
                    if self._status.news != told:
                        break
        finally:
            self._readers -= 1


def _not_allowed(method: str) -> Reply:
    text = f"{method} is not allowed: every page is read with GET"
    return Reply(405, msgspec.json.encode({"error": text}), headers=(("allow", "GET"),))


async def serve_http(
    address: Address,
    pages: Pages,
    guard: PageAccess | None = None,
    task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the pages until cancelled; `task_status` is given the bound "host:port". Without a `guard` they are this
    machine's alone.

    Raises PortTakenError if the port is in use or not ours to take, UsageError if this machine has no
    such host.
    """
    guard = guard or PageAccess()
    listener = await _bind(address)
    host, port = listener.getsockname()[:2]
    only_local = ip_address(host).is_loopback

    def answer(request: Request) -> Reply:
        refused = guard.judge(request, only_local=only_local, port=port)
        return pages.answer(request.method, request.path) if refused is None else refused

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, trio.SocketListener(trio.socket.from_stdlib_socket(listener)), answer)
        task_status.started(str(Address(host, port)))


async def _bind(address: Address) -> socket.socket:
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(f"--http {address}: no such host.") from error
    family, kind, proto, _, target = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(64)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortTakenError(f"--http {address}: {error.strerror}.") from error
        raise UsageError(f"--http {address}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener
