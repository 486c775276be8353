"""The node's HTTP pages: the status page at /, /status.json, /badge.svg, /events, /metrics, /healthz, /readyz.

The rule: read only, but for POST /settings, by which the owner sets the node's limits. The pages are this package's own files
and the node's own report; `access` decides who may do what, `http` how much at once. The status page may load nothing from
anywhere but this node.
"""

from __future__ import annotations

import errno
import socket
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from nolocod.errors import LocalError, PortTakenError, UsageError
from nolocod.observe.status.access import PageAccess, is_loopback
from nolocod.observe.status.badge import svg
from nolocod.observe.status.http import Reply, Request, refusal, serve
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.observe.metrics import Metrics
    from nolocod.observe.status.state import StatusState

    Send = Callable[[bytes], Awaitable[None]]
    Change = Callable[[Mapping[str, str]], Mapping[str, str]]

_PAGE_FILES = {"/": "index.html"} | {
    f"/{name}": name
    for name in ("page.css", "page.js", "parts.js", "loss.js", "swarm.js", "words.js", "settings.js", "icon.svg")
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    ("content-security-policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
)
READERS = 16
"""Of /events, at once."""
_EVERY = 1.0
"""Seconds between two reports while nothing happens."""
_LOOKS = 5
"""How often it looks in that time whether something happened."""


class Answers(Protocol):
    """What is served: a node's pages or a run's."""

    def answer(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The reply to one request, whose sender may ask for it."""
        ...


class Pages:
    """The answers, without a socket."""

    def __init__(self, status: StatusState, metrics: Metrics, change: Change | None = None) -> None:
        """`change` takes settings by key and returns those that count then; raises LocalError."""
        self._change = change
        self._status = status
        self._metrics = metrics
        self._readers = 0

    def answer(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The reply to one request, whose sender may ask for it."""
        match path:
            case "/settings" if method == "POST" and self._change is not None:
                return _changed(self._change, body)
            case _ if method not in ("GET", "HEAD"):
                return refusal(405, f"{method} is not allowed: every page is read with GET", ("allow", "GET"))
            case "/metrics":
                return Reply(200, self._metrics.render(), self._metrics.content_type)
            case "/status.json":
                return Reply(200, self._report())
            case "/badge.svg":
                report = self._status.snapshot(self._status.clock())
                return Reply(200, svg(report.run_name, report.given), _KINDS["svg"])
            case "/events":
                if self._readers >= READERS:
                    return refusal(503, f"{READERS} readers watch already")
                return Reply(200, b"retry: 2000\n\n", "text/event-stream", feed=self._feed)
            case "/healthz":
                return Reply(200, b'{"alive":true}')
            case "/readyz":
                report = self._status.snapshot(self._status.clock())
                ready = report.state in ("training", "finished")
                told = {"ready": ready, "state": report.state}  # no more: anybody may ask, and `waiting_for` can name peers
                return Reply(200 if ready else 503, msgspec.json.encode(told))
            case _ if path in _PAGE_FILES:
                return page_file("status", _PAGE_FILES[path])
            case _:
                return refusal(
                    404, "no such page; the pages are /, /status.json, /events, /badge.svg, /metrics, /healthz, /readyz"
                )

    def _report(self) -> bytes:
        return msgspec.json.encode(self._status.snapshot(self._status.clock()))

    async def _feed(self, send: Send) -> None:
        """Send whole reports: as soon as something happens, else once a second. `http` cuts off slow readers."""
        if self._readers >= READERS:  # since it was answered
            return
        self._readers += 1
        try:
            while True:
                sent = self._status.news
                await send(b"data: " + self._report() + b"\n\n")
                for _ in range(_LOOKS):
                    await trio.sleep(_EVERY / _LOOKS)
                    if self._status.news != sent:
                        break
        finally:
            self._readers -= 1


def _changed(change: Change, body: bytes) -> Reply:
    try:
        return Reply(200, msgspec.json.encode(change(msgspec.json.decode(body, type=dict[str, str]))))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return refusal(400, 'settings are sent as JSON, like {"duty": "50%"}')
    except LocalError as error:
        told = {"error": error.cause, "code": error.code, "remedy": error.remedy}
        return Reply(400, msgspec.json.encode(told))


def page_file(package: str, name: str) -> Reply:
    """The file `name` of the page that lies in `nolocod.observe.PACKAGE`; it may load nothing from elsewhere."""
    content = resources.files(f"nolocod.observe.{package}").joinpath("page", name).read_bytes()
    return Reply(200, content, _KINDS[name.rpartition(".")[2]], _POLICY)


async def serve_http(
    address: Address, pages: Answers, access: PageAccess | None = None, task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the pages until cancelled; `task_status` is given the bound "host:port". Without `access`, only this machine
    may read them.

    Raises PortTakenError if the port is in use or needs more rights, UsageError if this machine has no such host.
    """
    access = access or PageAccess()
    listener = await _bind(address)
    host, port = listener.getsockname()[:2]
    only_local = is_loopback(host)

    def answer(request: Request) -> Reply:
        refused = access.judge(request, only_local=only_local, port=port)
        return pages.answer(request.method, request.path, request.body) if refused is None else refused

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
