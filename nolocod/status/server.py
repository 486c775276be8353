"""The node's HTTP pages: /metrics, /status.json, /healthz, /readyz.

The rule: read only. There is no authentication, so the default address is this machine's alone, and a
node listens elsewhere only if its user said so with --http; bound to a loopback address it answers
only requests that name a loopback host, so that a web page cannot read it by DNS rebinding.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import hypercorn.config
import hypercorn.trio
import msgspec
import trio

from nolocod.config import Address
from nolocod.errors import PortTakenError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.metrics import Metrics
    from nolocod.status.state import StatusState

    Scope = dict[str, Any]
    Receive = Callable[[], Awaitable[dict[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SEND_BUFFER = 1 << 20
"""Bytes that a reply may fill without its reader: more than any page of ours, so that no write waits."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"


async def serve_http(
    address: Address, status: StatusState, metrics: Metrics, task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the pages until cancelled; `task_status` is given the bound "host:port".

    Raises PortTakenError if the port is in use or not ours to take, UsageError if this machine has no
    such host.
    """
    listener = await _bind(address)
    host, port = listener.getsockname()[:2]
    config = hypercorn.config.Config()
    descriptor = listener.detach()
    config.bind = [f"fd://{descriptor}"]
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    config.read_timeout = 10
    config.graceful_timeout = 0.5
    app = _app(partial(answer, status, metrics), only_local=ip_address(host).is_loopback)
    async with trio.open_nursery() as nursery:
        await nursery.start(hypercorn.trio.serve, app, config)
        # hypercorn makes it inheritable, and the trainer is our child.
        os.set_inheritable(descriptor, False)
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind(target)
        listener.listen(64)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortTakenError(f"--http {address}: {error.strerror}.") from error
        raise UsageError(f"--http {address}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def _app(answer_to: Callable[[str, str], Reply], *, only_local: bool) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An ASGI application; see https://asgi.readthedocs.io for the message shapes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if only_local and not _is_local(host):
                reply = _error(403, "this address answers only to localhost")
            else:
                reply = answer_to(scope["method"], scope["path"])
            await _send(send, reply, with_body=scope["method"] != "HEAD")

    return app


async def _send(send: Send, reply: Reply, *, with_body: bool) -> None:
    headers = {
        "content-type": reply.content_type,
        "content-length": str(len(reply.body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        # One reply per connection: a client cannot pile up replies that it does not read.
        "connection": "close",
    }
    if reply.status == 405:
        headers["allow"] = "GET"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body if with_body else b""})


def answer(status: StatusState, metrics: Metrics, method: str, path: str) -> Reply:
    """The reply to one request; it touches no socket."""
    match path:
        case _ if method != "GET":
            return _error(405, f"{method} is not allowed: every page is read with GET")
        case "/metrics":
            return Reply(200, metrics.render(), metrics.content_type)
        case "/status.json":
            return Reply(200, msgspec.json.encode(status.snapshot(status.clock())))
        case "/healthz":
            return Reply(200, b'{"alive":true}')
        case "/readyz":
            report = status.snapshot(status.clock())
            ready = report.state in ("training", "finished")
            body = {"ready": ready, "state": report.state, "waiting_for": report.waiting_for}
            return Reply(200 if ready else 503, msgspec.json.encode(body))
        case _:
            return _error(404, "no such page; there are /metrics, /status.json, /healthz and /readyz")


def _error(status: int, text: str) -> Reply:
    return Reply(status, msgspec.json.encode({"error": text}))


def _is_local(host: str) -> bool:
    """Whether a Host header ("name", "name:port", "[v6]:port") names this machine's loopback."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
    return name.lower() in _LOOPBACK_HOSTS
