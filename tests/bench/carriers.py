"""What carries bytes between two processes: raw sockets, TLS 1.3, stock py-libp2p, ours, and ours through a relay.

The rule: each is used as its own documentation says, with its own defaults. Started as `python -m tests.bench.carriers HOST`
this is the relay: it prints its address, and ends with its standard input.
"""

from __future__ import annotations

import datetime
import os
import ssl
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from nolocod.p2p.host import open_host
from nolocod.p2p.libp2p_patches import quiet_libraries
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.units import Address
from tests.bench.parties import python

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from nolocod.observe.events import Event
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

_PROTOCOL = "/nolocod/bench"
_CIRCUIT = "/p2p-circuit/p2p/"
_READ = 1 << 20


class Pipe(Protocol):
    """A byte stream to the other process."""

    async def write(self, data: memoryview) -> None: ...

    async def take(self, count: int) -> None:
        """Read `count` bytes, and drop them."""
        ...


if TYPE_CHECKING:
    Accepted = Callable[[Pipe], Awaitable[None]]


@dataclass(frozen=True)
class End:
    """One process's side of a carrier: where it listens, and how it dials the other."""

    address: str
    dial: Callable[[str], Awaitable[Pipe]]


def open_end(carrier: str, accepted: Accepted, host: str) -> AbstractAsyncContextManager[End]:
    """Listen on `host`; `accepted` is called with what the other process dialled, and keeps it open while it runs."""
    return {"raw": _raw, "tls": _tls, "stock": _stock, "ours": _ours, "relayed": _relayed}[carrier](accepted, host)


class _Pipe:
    """Over a `write` and a read of at most so many bytes."""

    def __init__(self, write: Callable[[Any], Awaitable[object]], read: Callable[[int], Awaitable[bytes | bytearray]]) -> None:
        self.write = write
        self._read = read

    async def take(self, count: int) -> None:
        while count > 0:
            data = await self._read(min(count, _READ))
            if not data:
                raise trio.BrokenResourceError("the other process is gone")
            count -= len(data)


class _PipeInto:
    """Over a `write` and a read into a buffer, which copies nothing; it returns how much it read, or fills the buffer."""

    def __init__(
        self, write: Callable[[memoryview], Awaitable[None]], read_into: Callable[[memoryview], Awaitable[Any]]
    ) -> None:
        self.write = write
        self._read_into = read_into
        self._buffer = memoryview(bytearray(_READ))

    async def take(self, count: int) -> None:
        while count > 0:
            piece = self._buffer[: min(count, _READ)]
            got = await self._read_into(piece)
            if got == 0:
                raise trio.BrokenResourceError("the other process is gone")
            count -= len(piece) if got is None else got


# --- raw sockets, and TLS over them ---------------------------------------------------------------------


def _over_socket(stream: trio.SocketStream) -> Pipe:
    return _PipeInto(stream.send_all, stream.socket.recv_into)


def _over_tls(stream: trio.SSLStream[trio.SocketStream]) -> Pipe:
    return _Pipe(stream.send_all, stream.receive_some)


@asynccontextmanager
async def _listening(serve: Callable[[trio.SocketStream], Awaitable[None]], host: str) -> AsyncIterator[str]:
    (listener,) = await trio.open_tcp_listeners(0, host=host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"{host}:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def _connected(address: str) -> trio.SocketStream:
    there = Address.parse(address, "the address")
    return await trio.open_tcp_stream(there.host, there.port)


@asynccontextmanager
async def _raw(accepted: Accepted, host: str) -> AsyncIterator[End]:
    async def dial(address: str) -> Pipe:
        return _over_socket(await _connected(address))

    async with _listening(lambda stream: accepted(_over_socket(stream)), host) as address:
        yield End(address, dial)


@asynccontextmanager
async def _tls(accepted: Accepted, host: str) -> AsyncIterator[End]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with tempfile.TemporaryDirectory() as folder:
        chain = Path(folder) / "end.pem"
        _write_certificate(chain)
        server.load_cert_chain(chain)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # the other end's is as self-signed as ours
    server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3

    async def dial(address: str) -> Pipe:
        stream = trio.SSLStream(await _connected(address), client, server_hostname="bench")
        await stream.do_handshake()
        return _over_tls(stream)

    def serve(stream: trio.SocketStream) -> Awaitable[None]:
        return accepted(_over_tls(trio.SSLStream(stream, server, server_side=True)))

    async with _listening(serve, host) as address:
        yield End(address, dial)


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


@asynccontextmanager
async def _stock(accepted: Accepted, host: str) -> AsyncIterator[End]:
    quiet_libraries()
    basic = new_host(key_pair=create_new_key_pair())

    def pipe(stream: Any) -> Pipe:  # noqa: ANN401 - libp2p is not typed for us
        return _Pipe(lambda data: stream.write(bytes(data)), stream.read)

    async def serve(stream: Any) -> None:  # noqa: ANN401 - as above
        await accepted(pipe(stream))

    async def dial(address: str) -> Pipe:
        other = info_from_p2p_addr(Multiaddr(address))
        await basic.connect(other)
        return pipe(await basic.new_stream(other.peer_id, [TProtocol(_PROTOCOL)]))

    basic.set_stream_handler(TProtocol(_PROTOCOL), serve)
    async with basic.run([Multiaddr(f"/ip4/{host}/tcp/0")]):
        yield End(str(basic.get_addrs()[0]), dial)


# --- ours, straight and through a relay of ours -----------------------------------------------------------


def _over_ours(stream: Stream) -> Pipe:
    return _PipeInto(stream.write, stream.read_into)


@asynccontextmanager
async def _host(host: str) -> AsyncIterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        identity = load_or_create(Path(folder) / "identity.key")
        async with open_host(identity, (Address(host, 0),), (), _nothing) as opened:
            yield opened


@asynccontextmanager
async def _ours(accepted: Accepted, host: str) -> AsyncIterator[End]:
    async with _host(host) as opened:
        opened.serve(_PROTOCOL, lambda stream: accepted(_over_ours(stream)))

        async def dial(address: str) -> Pipe:
            return _over_ours(await opened.open_stream(_peer_in(address), _PROTOCOL, [address]))

        yield End(opened.addresses[0], dial)


@asynccontextmanager
async def _relayed(accepted: Accepted, host: str) -> AsyncIterator[End]:
    """Each end starts a relay, and waits at it for the other."""
    async with _relay_process(host) as relay, _host(host) as opened:
        opened.serve(_PROTOCOL, lambda stream: accepted(_over_ours(stream)))
        client = RelayClient(opened)
        await opened.connect(_peer_in(relay), [relay])
        client.serve()
        await client.reserve(_peer_in(relay))

        async def dial(address: str) -> Pipe:
            there, _, other = address.partition(_CIRCUIT)
            await opened.connect(_peer_in(there), [there])
            await client.connect(_peer_in(there), PeerId(other))
            return _over_ours(await opened.open_stream(PeerId(other), _PROTOCOL))

        yield End(f"{relay}{_CIRCUIT}{opened.own}", dial)


def _peer_in(address: str) -> PeerId:
    return PeerId(address.rpartition("/")[2])


@asynccontextmanager
async def _relay_process(host: str) -> AsyncIterator[str]:
    """The address of a relay in a process of its own."""
    command = python("tests.bench.carriers", host)
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None  # a pipe was asked for
    try:
        yield (await process.stdout.receive_some()).decode().strip()
    finally:
        process.kill()


async def _serve_as_relay(host: str) -> None:
    async with _host(host) as opened:
        Relay(opened).serve()
        sys.stdout.write(opened.addresses[0] + "\n")
        sys.stdout.flush()
        async with trio.lowlevel.FdStream(os.dup(0)) as requests:
            await requests.receive_some()


def _nothing(_: Event) -> None:
    """Events are not measured."""


if __name__ == "__main__":
    trio.run(_serve_as_relay, sys.argv[1])
