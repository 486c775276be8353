"""Noise transport records, sealed and opened in place: `| length, 2 bytes | ciphertext | tag, 16 bytes |`.

The rule: no sockets and no waiting here. A nonce is used once, in order; what was sealed must be sent, and
a record that does not open ends the connection. Source: the Noise Protocol Framework, revision 34, §3, §5.1
and §11.4; libp2p's noise specification for the length in front.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.io.exceptions import IOException

HEAD = 2
TAG = 16
MOST_SEALED = 65_535
MOST_PLAIN = MOST_SEALED - TAG
RECORD = HEAD + MOST_SEALED
"""Bytes on the wire of a full record."""
LAST_NONCE = 2**64 - 2
"""2^64 - 1 is reserved by Noise."""


class RecordError(IOException):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """A record that cannot be opened, or a key that is used up: the connection ends."""


def sealed_size(plain: int) -> int:
    """Bytes on the wire for `plain` bytes sealed in records as full as can be."""
    return plain + (HEAD + TAG) * -(-plain // MOST_PLAIN)


class _Key:
    """A cipher and the count of its uses."""

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._nonce = nonce

    def _next(self) -> bytes:
        if self._nonce > LAST_NONCE:
            raise RecordError("the connection's key is used up.")
        nonce = self._nonce
        self._nonce += 1
        return b"\0\0\0\0" + nonce.to_bytes(8, "little")


class Sealer(_Key):
    """Our direction."""

    def seal_into(self, plain: bytes | memoryview, out: memoryview) -> int:
        """Write `plain` (bytes, at most MOST_PLAIN of them) as one record to the front of `out`; its size there."""
        sealed = len(plain) + TAG
        out[0] = sealed >> 8
        out[1] = sealed & 0xFF
        self._cipher.encrypt_into(self._next(), plain, None, out[HEAD : HEAD + sealed])
        return HEAD + sealed


class Opener(_Key):
    """The peer's direction."""

    def open_into(self, sealed: memoryview, out: memoryview) -> None:
        """Decrypt what follows a record's length into `out`, which has its exact size.

        RecordError if it was altered; what is in `out` then is worthless.
        """
        try:
            self._cipher.decrypt_into(self._next(), sealed, None, out)
        except InvalidTag as error:
            raise RecordError("a record was altered on its way.") from error


def pending(buffer: memoryview) -> int | None:
    """The plaintext size of the whole record at the front of `buffer`; None while it is not all there.

    RecordError for a length that no record has.
    """
    if len(buffer) < HEAD:
        return None
    sealed = buffer[0] << 8 | buffer[1]
    if sealed < TAG:
        raise RecordError("a record is too short.")
    return sealed - TAG if len(buffer) >= HEAD + sealed else None
