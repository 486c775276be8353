"""The secure channel: libp2p's Noise XX handshake, and a transport phase that moves many records at once.

The rule: bytes that were given a nonce are sent, in order, before any others; a cancelled `flush` is
continued by the next one. One task reads and one at a time writes. Same bytes on the wire as libp2p's own
class, which receives twice and sends once per record, and copies each one four times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio
from cryptography.exceptions import InvalidTag
from libp2p.abc import ISecureTransport
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.secure_session import SecureSession
from noise.exceptions import NoiseValueError

from nolocod.errors import BannedError, PeerNetworkKeyError, PeerNotAllowedError, RemoteError
from nolocod.identity import PeerId, short
from nolocod.p2p.limits.bandwidth import Unmetered
from nolocod.p2p.transport.buffers import BATCH, SIZE, Pool
from nolocod.p2p.transport.endpoints import CircuitEndpoint
from nolocod.p2p.transport.exceptions import already_gone
from nolocod.p2p.transport.noise_records import HEAD, MOST_PLAIN, RECORD, TAG, Opener, Sealer, pending, sealed_size

if TYPE_CHECKING:
    from libp2p.crypto.keys import KeyPair
    from libp2p.security.noise.io import NoiseState

    from nolocod.p2p.limits.bandwidth import Meter
    from nolocod.p2p.limits.connection_gater import ConnectionGater
    from nolocod.p2p.transport.connection import Connection

NOISE_PROTOCOL = TProtocol("/noise")
_GARBAGE = (InvalidTag, NoiseValueError, ValueError)
"""What the handshake lets through when the other side sends nonsense."""
_LEAST_ANSWER = 32 + 48 + 16 + 64
"""Bytes of the handshake's second message at least: two keys, two tags, and a payload that holds a signature."""
MAX_HANDSHAKE = 2048
"""Bytes of one: who proves itself with the largest RSA key that libp2p takes needs 1200. Larger keys cost us seconds."""
_TURNED_AWAY = b"\x1b/nolocod/not-allowed/1.0.0\n"
"""The last word to a peer that is not on the allow list. To others it is a multistream message that they do not know."""
_LAST_WORD = 1.0
"""Seconds that such a peer has to read it."""


class NoiseTransport(ISecureTransport):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """/noise for `new_host(sec_opt=...)`; one per host, whose connections share its meter and buffers.

    `progress`: seconds without a byte moved, while something is due, after which a connection ends. `gater` says
    whom we talk to.
    """

    def __init__(self, keys: KeyPair, progress: float, meter: Meter, gater: ConnectionGater) -> None:
        self._keys = keys
        self._gater = gater
        self._static = create_new_key_pair().private_key
        self._progress, self._meter, self._pool = progress, meter, Pool()

    async def secure_inbound(self, conn: Connection) -> SecureChannel:
        return await self._secure(conn, None)

    async def secure_outbound(self, conn: Connection, peer_id: ID) -> SecureChannel:
        return await self._secure(conn, peer_id)

    async def _secure(self, raw: Connection, dialled: ID | None) -> SecureChannel:
        """HandshakeFailure if the other side does not prove who it is, or another than `dialled`; caused by
        PeerNetworkKeyError or PeerNotAllowedError if we want nothing of each other."""
        if dialled is not None and not self._gater.allows(PeerId(str(dialled))):
            raise _failure(PeerNotAllowedError(f"{short(str(dialled))} is not on this node's allow list."))
        own = ID.from_pubkey(self._keys.public_key)
        pattern = _Pattern(own, self._keys.private_key, self._static, prologue=self._gater.prologue)
        try:
            if dialled is None:
                session = await pattern.handshake_inbound(raw)
            else:
                session = await pattern.handshake_outbound(raw, dialled)
        except _GARBAGE as error:
            raise HandshakeFailure(f"the other side does not speak noise ({error}).") from error
        paid = isinstance(raw.stream, CircuitEndpoint)  # by the connection to the relay
        channel = SecureChannel(session, raw, self._progress, Unmetered(self._meter) if paid else self._meter, self._pool)
        remote = PeerId(str(session.get_remote_peer()))
        if dialled is None and not self._gater.allows(remote):
            await channel.turn_away()
            raise _failure(PeerNotAllowedError(f"{short(remote)} is not on this node's allow list."))
        if dialled is None and self._gater.banned(remote):
            raise _failure(BannedError(f"{short(remote)} is banned here, and comes again and again."))
        return channel


class _Pattern(PatternXX):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """Noise XX that can tell another network key from nonsense.

    The first message is the same with any prologue; the answer to it cannot be opened by who has another. An answer
    of the right size that cannot be opened was most likely made with one.
    """

    def create_noise_state(self, prologue: bytes | None = None) -> NoiseState:
        state = super().create_noise_state(prologue)
        read = state.read_message

        def read_message(data: bytes) -> bytearray:
            if len(data) > MAX_HANDSHAKE:
                raise HandshakeFailure(f"a handshake's message of {len(data)} bytes.")
            try:
                return cast("bytearray", read(data))
            except InvalidTag:
                if len(data) < _LEAST_ANSWER:
                    raise
            raise _failure(PeerNetworkKeyError("it has another network key than this node, or one of the two has none."))

        state.read_message = read_message
        return state


def _failure(reason: RemoteError) -> HandshakeFailure:
    """`reason` as libp2p lets it through; `map_exceptions` finds it again."""
    failure = HandshakeFailure(reason.cause)
    failure.__cause__ = reason
    return failure


class SecureChannel(SecureSession):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """Sealed records both ways. `read` and `write` are libp2p's interface; the muxer uses the rest."""

    def __init__(self, session: SecureSession, raw: Connection, progress: float, meter: Meter, pool: Pool) -> None:
        super().__init__(
            local_peer=session.local_peer,
            local_private_key=session.local_private_key,
            remote_peer=session.remote_peer,
            remote_permanent_pubkey=session.remote_permanent_pubkey,
            is_initiator=session.is_initiator,
            conn=session.conn,
        )
        ciphers = session.conn.noise_state.noise_protocol
        self._sealer, self._opener = Sealer(ciphers.cipher_state_encrypt.k), Opener(ciphers.cipher_state_decrypt.k)
        self._end = raw.stream
        self.origin = raw.origin
        self._progress = progress
        self._pool = pool
        self._in: memoryview | None = None
        self._start = self._stop = 0
        self._partial = b""
        """The beginning of a record, while there is no buffer."""
        self._out: memoryview | None = None
        self._sent = self._sealed = 0
        self._plain = memoryview(b"")
        """Opened for `read` and not taken yet."""
        self._writing = trio.Lock()
        self.heard_at = trio.current_time()
        """When bytes last came in (trio's time)."""
        self.meter = meter

    # --- receiving --------------------------------------------------------------------------------

    def pending(self) -> int | None:
        """The plaintext size of the next record; None if it has not arrived in full."""
        return pending(self._in[self._start : self._stop]) if self._in is not None else None

    def open_into(self, view: memoryview) -> None:
        """Decrypt the record of which `pending` told; `view` has its size."""
        assert self._in is not None
        start = self._start + HEAD
        self._start = start + len(view) + TAG
        self._opener.open_into(self._in[start : self._start], view)

    def open(self, size: int) -> memoryview:
        """The same in memory that all connections of the host share: to be used before anything is awaited."""
        plain = self._pool.scratch[:size]
        self.open_into(plain)
        return plain

    def leftover(self) -> memoryview:
        """What `read` has opened and nobody has taken."""
        plain, self._plain = self._plain, memoryview(b"")
        return plain

    async def fill(self, *, due: bool = False, bulk: bool = False) -> None:
        """Receive what is there, or wait for it; as much as a large buffer holds where `bulk` comes, else a record or two.
        Nothing, where a whole record still waits to be opened.

        If bytes are `due`, or a record has begun, not for longer than the deadline on progress:
        trio.TooSlowError. ConnectionClosedError at the end of the connection, wherever that comes.
        """
        buffer = self._make_room(bulk)
        if self.pending() is not None:
            return  # who reads did not take all
        while (count := self._end.receive_now(self._allowed(buffer))) is None:
            self._let_go(buffer)
            with trio.fail_after(self._progress if due or self._partial else float("inf")):
                await self._end.receivable()
            buffer = self._make_room(bulk)
        self._stop += count
        if not count:
            raise ConnectionClosedError("the connection ended.")
        self.heard_at = trio.current_time()
        if self.meter.piece(SIZE) == SIZE:
            await self.meter.down(count)
            return
        self._let_go(buffer)  # at a slow rate many connections wait for long
        try:
            await self.meter.down(count)
        finally:
            self._make_room(bulk)

    def release(self) -> int:
        """Keep no large buffer while others run; how many bytes are kept, of a record of which only a part has come."""
        if self._in is not None:
            self._let_go(self._in)
        return len(self._partial)

    def _allowed(self, buffer: memoryview) -> memoryview:
        """The part of the room in `buffer` that may be filled at once: what came has to be paid in one go."""
        return buffer[self._stop : self._stop + self.meter.piece(len(buffer) - self._stop)]

    def _make_room(self, bulk: bool) -> memoryview:
        """A buffer with the beginning of the next record at its front."""
        if self._in is None:
            self._in = self._pool.take(SIZE if bulk or len(self._partial) > RECORD else RECORD)
            self._start, self._stop = 0, len(self._partial)
            self._in[: self._stop] = self._partial
            self._partial = b""
        elif self._start:
            left = self._stop - self._start
            self._in[:left] = self._in[self._start : self._stop]
            self._start, self._stop = 0, left
        return self._in

    def _let_go(self, buffer: memoryview) -> None:
        """Keep no buffer while waiting."""
        self._partial = bytes(buffer[self._start : self._stop])
        self._pool.give(buffer)
        self._in = None

    # --- sending ----------------------------------------------------------------------------------

    @property
    def unsent(self) -> bool:
        return self._sent < self._sealed

    def seal(self, front: bytes, content: memoryview) -> None:
        """Seal `front` and at most BATCH bytes of `content`, to be sent by `flush`.

        What is large is not copied: `front` then has a record of its own, so that the receiver's records
        hold content alone, and it can open them where they are wanted.
        """
        assert not self.unsent, "what is sealed is sent first"
        assert len(front) <= MOST_PLAIN
        assert len(content) <= BATCH
        if len(front) + len(content) <= MOST_PLAIN:
            front, content = b"".join((front, content)), content[:0]
        out = self._out = self._pool.take(sealed_size(len(front)) + sealed_size(len(content)))
        self._sent = self._sealed = 0
        at = self._sealer.seal_into(front, out) if front else 0  # libp2p takes an empty record for the end
        for start in range(0, len(content), MOST_PLAIN):
            at += self._sealer.seal_into(content[start : start + MOST_PLAIN], out[at:])
        self._sealed = at

    async def flush(self) -> None:
        """Send what is sealed; trio.TooSlowError if not a byte was taken for the deadline on progress.

        May be cancelled: what is not sent yet stays for the next call.
        """
        while self.unsent:
            assert self._out is not None
            self._sent += await self._end.send_some(self._out[self._sent : self._sealed], self._progress)
        if self._out is not None:
            self._pool.give(self._out)
            self._out = None

    # --- libp2p's interface -----------------------------------------------------------------------

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes; at least one, unless `n` is 0."""
        await trio.lowlevel.checkpoint()
        while not self._plain and n != 0:
            while (size := self.pending()) is None:
                await self.fill()
            view = memoryview(bytearray(size))
            self.open_into(view)
            if view == _TURNED_AWAY:
                reason = PeerNotAllowedError(f"this node is not on the allow list of {short(str(self.remote_peer))}.")
                raise ConnectionClosedError(reason.cause) from reason
            self._plain = view
        piece = bytes(self._plain if n is None else self._plain[:n])
        self._plain = self._plain[len(piece) :]
        return piece

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            piece, view = view[:BATCH], view[BATCH:]
            async with self._writing:
                await self.flush()
                await self.meter.up(sealed_size(len(piece)))
                self.seal(b"", piece)
                await self.flush()

    async def turn_away(self) -> None:
        """Tell the other side that it is not allowed, and give it a moment to read that and hang up."""
        with trio.move_on_after(_LAST_WORD), already_gone():
            await self.write(_TURNED_AWAY)
            while True:
                await self.read()

    async def close(self) -> None:
        try:
            await super().close()
        finally:  # not back to the pool: a task that has not heard of it yet may still hold a view
            self._in = self._out = None
            self._start = self._stop = self._sent = self._sealed = 0
            self._partial = b""
