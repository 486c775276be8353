"""What carries bytes between two processes, one shape for each: raw sockets, TLS 1.3, stock py-libp2p, ours.

The rule: each is used as its own documentation says, with its own defaults; only this module of the benchmarks
knows libp2p, and here only what stock py-libp2p makes of itself.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from nolocod.identity import PeerId, load_or_create
from nolocod.p2p.host import open_host, quiet_libraries
from nolocod.studies.benchmarks.relayed import RelayedHost, relay_process
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nolocod.observe.events import Event
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

_PROTOCOL = "/nolocod/bench"
_READ = 1 << 20
_CHAIN = "end.pem"

RAW, TLS, STOCK, OURS = "raw", "tls", "stock", "ours"


class Pipe(Protocol):
    """A byte stream to the other process."""

    async def write(self, data: memoryview) -> None: ...

    async def take(self, count: int) -> None:
        """Read `count` bytes, and drop them."""
        ...


class End(Protocol):
    """One process's side of a carrier."""

    @property
    def address(self) -> str: ...

    async def dial(self, address: str) -> Pipe: ...


@asynccontextmanager
async def open_end(carrier: str, accepted: Callable[[Pipe], Awaitable[None]], host: str) -> AsyncIterator[End]:
    """Listen on `host`; `accepted` is called with what the other process dialled, and keeps it open while it runs."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        match carrier:
            case "raw" | "tls":
                yield await stack.enter_async_context(_sockets(carrier == TLS, accepted, host, folder))
            case "stock":
                yield await stack.enter_async_context(_stock(accepted, host))
            case "relayed":
                yield await stack.enter_async_context(_relayed(accepted, host, folder))
            case _:
                yield await stack.enter_async_context(_ours(accepted, host, folder))


# --- raw sockets, and TLS over them ---------------------------------------------------------------------


class _RawPipe:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._place = memoryview(bytearray(_READ))

    async def write(self, data: memoryview) -> None:
        await self._stream.send_all(data)

    async def take(self, count: int) -> None:
        while count > 0:
            got = await self._stream.socket.recv_into(self._place[: min(count, _READ)])
            if not got:
                raise trio.BrokenResourceError("the other process is gone")
            count -= got


class _TlsPipe:
    def __init__(self, stream: trio.SSLStream) -> None:
        self._stream = stream

    async def write(self, data: memoryview) -> None:
        await self._stream.send_all(data)

    async def take(self, count: int) -> None:
        while count > 0:
            data = await self._stream.receive_some(min(count, _READ))
            if not data:
                raise trio.BrokenResourceError("the other process is gone")
            count -= len(data)


class _SocketEnd:
    def __init__(self, address: str, client: ssl.SSLContext | None) -> None:
        self.address = address
        self._client = client

    async def dial(self, address: str) -> Pipe:
        there = Address.parse(address, "the address")
        stream = await trio.open_tcp_stream(there.host, there.port)
        if self._client is None:
            return _RawPipe(stream)
        wrapped = trio.SSLStream(stream, self._client, server_hostname="bench")
        await wrapped.do_handshake()
        return _TlsPipe(wrapped)


@asynccontextmanager
async def _sockets(
    secure: bool, accepted: Callable[[Pipe], Awaitable[None]], host: str, folder: Path
) -> AsyncIterator[_SocketEnd]:
    server = client = None
    if secure:
        chain = folder / _CHAIN
        _write_certificate(chain)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(chain)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # the other end's is as self-signed as ours
        server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3

    async def serve(stream: trio.SocketStream) -> None:
        tls = None if server is None else _TlsPipe(trio.SSLStream(stream, server, server_side=True))
        await accepted(tls or _RawPipe(stream))

    (listener,) = await trio.open_tcp_listeners(0, host=host)
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield _SocketEnd(f"{host}:{port}", client)
        nursery.cancel_scope.cancel()


def _write_certificate(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


# --- py-libp2p as it comes ------------------------------------------------------------------------------


class _StockPipe:
    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - libp2p is not typed for us
        self._stream = stream

    async def write(self, data: memoryview) -> None:
        await self._stream.write(bytes(data))

    async def take(self, count: int) -> None:
        while count > 0:
            data = await self._stream.read(min(count, _READ))
            if not data:
                raise trio.BrokenResourceError("the other process is gone")
            count -= len(data)


class _StockEnd:
    def __init__(self, host: Any) -> None:  # noqa: ANN401 - as above
        self._host = host
        self.address = str(host.get_addrs()[0])

    async def dial(self, address: str) -> Pipe:
        other = info_from_p2p_addr(Multiaddr(address))
        await self._host.connect(other)
        return _StockPipe(await self._host.new_stream(other.peer_id, [TProtocol(_PROTOCOL)]))


@asynccontextmanager
async def _stock(accepted: Callable[[Pipe], Awaitable[None]], host: str) -> AsyncIterator[_StockEnd]:
    quiet_libraries()
    basic = new_host(key_pair=create_new_key_pair())

    async def serve(stream: Any) -> None:  # noqa: ANN401 - as above
        await accepted(_StockPipe(stream))

    basic.set_stream_handler(TProtocol(_PROTOCOL), serve)
    async with basic.run([Multiaddr(f"/ip4/{host}/tcp/0")]):
        yield _StockEnd(basic)


# --- ours -----------------------------------------------------------------------------------------------


class _OurPipe:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._place = memoryview(bytearray(_READ))

    async def write(self, data: memoryview) -> None:
        await self._stream.write(data)

    async def take(self, count: int) -> None:
        while count > 0:
            piece = self._place[: min(count, _READ)]
            await self._stream.read_into(piece)
            count -= len(piece)


class _OurEnd:
    def __init__(self, host: Host) -> None:
        self._host = host
        self.address = host.addresses[0]

    async def dial(self, address: str) -> Pipe:
        return _OurPipe(await self._host.open_stream(PeerId(address.rpartition("/")[2]), _PROTOCOL, [address]))


@asynccontextmanager
async def _ours(accepted: Callable[[Pipe], Awaitable[None]], host: str, folder: Path) -> AsyncIterator[_OurEnd]:
    async def serve(stream: Stream) -> None:
        await accepted(_OurPipe(stream))

    async with open_host(load_or_create(folder / "identity.key"), (Address(host, 0),), (), _nothing) as opened:
        opened.serve(_PROTOCOL, serve)
        yield _OurEnd(opened)


class _RelayedEnd:
    def __init__(self, host: RelayedHost) -> None:
        self._host = host
        self.address = host.address

    async def dial(self, address: str) -> Pipe:
        return _OurPipe(await self._host.open_stream(address, _PROTOCOL))


@asynccontextmanager
async def _relayed(accepted: Callable[[Pipe], Awaitable[None]], host: str, folder: Path) -> AsyncIterator[_RelayedEnd]:
    """Each end starts a relay, and waits at it for the other."""

    async def serve(stream: Stream) -> None:
        await accepted(_OurPipe(stream))

    identity = load_or_create(folder / "identity.key")
    async with relay_process(host) as relay, open_host(identity, (Address(host, 0),), (), _nothing) as opened:
        opened.serve(_PROTOCOL, serve)
        ends = RelayedHost(opened, relay)
        await ends.wait()
        yield _RelayedEnd(ends)


def _nothing(_: Event) -> None:
    """Events are not measured."""
