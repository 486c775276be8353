"""HTTP/1.1 for a few readers: one request per connection, answered whole or as a stream of server-sent events.

The rule: connections are limited in number, in all and per address; one too many is closed at once. A request must arrive
within seconds, and a reader that does not take the answer within seconds loses its connection. h11 parses the bytes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11
import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CONNECTIONS = 64
"""At once."""
PER_ADDRESS = 48
"""At once from one address, so that one reader leaves room for others (Prometheus, a health check)."""
_REQUEST_SECONDS = 10.0
_WRITE_SECONDS = 10.0
_REQUEST_BYTES = 8 << 10
REQUEST_LINES = 100  # to parse 2000 takes several milliseconds of the loop
_PIECE = 1 << 10


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: str = ""
    host: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """By lower-case name."""
    client: str = ""
    """Its IP address, ..."""
    server: str = ""
    """... and ours, that it connected to."""
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """`feed`, if given, is called with a function that sends bytes after `body`, and ends the reply by returning."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    feed: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]] | None = None


def refusal(status: int, text: str, *headers: tuple[str, str]) -> Reply:
    """An error as JSON."""
    return Reply(status, msgspec.json.encode({"error": text}), headers=headers)


async def serve(listener: trio.SocketListener, answer: Callable[[Request], Reply]) -> None:
    """Answer requests until cancelled."""
    open_from: Counter[str] = Counter()

    async def handle(stream: trio.SocketStream) -> None:
        try:
            address, own = stream.socket.getpeername()[0], stream.socket.getsockname()[0]
        except OSError:  # gone again
            address = None
        if address is None or open_from.total() >= CONNECTIONS or open_from[address] >= PER_ADDRESS:
            await trio.aclose_forcefully(stream)
            return
        open_from[address] += 1
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                await _Connection(stream, address, own).run(answer)
        finally:
            open_from[address] -= 1
            if not open_from[address]:
                del open_from[address]
            await trio.aclose_forcefully(stream)

    await trio.serve_listeners(handle, [listener])


class _Connection:
    def __init__(self, stream: trio.SocketStream, client: str = "", server: str = "") -> None:
        self._stream, self._client, self._server, self._lines = stream, client, server, 0
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_REQUEST_BYTES)

    async def run(self, answer: Callable[[Request], Reply]) -> None:
        try:
            with trio.fail_after(_REQUEST_SECONDS):
                request = await self._request()
        except h11.RemoteProtocolError as error:
            await self._send(refusal(error.error_status_hint, "this is not an HTTP request"), with_body=True)
            return
        if request is not None:
            await self._send(answer(request), with_body=request.method != "HEAD")

    async def _request(self) -> Request | None:
        request = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                piece = bytes(await self._stream.receive_some(_PIECE))
                self._lines += piece.count(b"\n")
                if self._lines > REQUEST_LINES:
                    raise h11.RemoteProtocolError("too many lines", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                self._http.receive_data(piece)
            elif isinstance(event, h11.Request):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                path, _, query = event.target.decode("latin-1").partition("?")
                method, host = event.method.decode("latin-1"), headers.get("host", "")
                request = Request(method, path, query, host, headers, self._client, self._server)
                if method != "POST":
                    return request
            elif isinstance(event, h11.Data) and request is not None:
                request = replace(request, body=request.body + event.data)
                if len(request.body) > _REQUEST_BYTES:
                    raise h11.RemoteProtocolError("too long", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            else:
                return request

    async def _send(self, reply: Reply, *, with_body: bool) -> None:
        headers = [
            ("content-type", reply.content_type),
            ("x-content-type-options", "nosniff"),
            ("connection", "close"),
            *reply.headers,
        ]
        if not any(name == "cache-control" for name, _ in reply.headers):
            headers.append(("cache-control", "no-store"))
        if reply.feed is None:
            headers.append(("content-length", str(len(reply.body))))
        await self._write(h11.Response(status_code=reply.status, headers=headers, reason=HTTPStatus(reply.status).phrase))
        if with_body:
            await self._data(reply.body)
            if reply.feed is not None:
                await reply.feed(self._data)
        await self._write(h11.EndOfMessage())
        await self._stream.send_eof()
        with trio.move_on_after(1):  # closing at once would lose what the reader has not read yet
            while await self._stream.receive_some(_PIECE):  # noqa: ASYNC110 - nor is what comes now read as fast as it is sent
                await trio.sleep(0.1)

    async def _data(self, data: bytes) -> None:
        if data:
            await self._write(h11.Data(data=data))

    async def _write(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            with trio.fail_after(_WRITE_SECONDS):
                await self._stream.send_all(data)
