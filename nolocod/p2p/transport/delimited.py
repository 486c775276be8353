"""libp2p's small messages: a varint length, then protobuf.

The rule: no byte of a message is read before its length is known to be allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message
from libp2p.utils.varint import encode_varint_prefixed

from nolocod.errors import ProtocolError
from nolocod.p2p.transport.exceptions import FOREIGN

if TYPE_CHECKING:
    from nolocod.p2p.transport.stream import Stream

M = TypeVar("M", bound=Message)


async def send_message(stream: Stream, message: Message) -> None:
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def receive_message(stream: Stream, kind: type[M], most: int) -> M:
    """One message of at most `most` bytes. Raises ProtocolError, or what the stream raises."""
    length = shift = 0
    while True:
        (byte,) = await stream.read_exactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 21:
            raise ProtocolError("a message's length prefix is too long.")
    if length > most:
        raise ProtocolError(f"a {kind.__name__} of {length} bytes.")
    message, raw = kind(), await stream.read_exactly(length)
    try:
        message.ParseFromString(raw)
    except FOREIGN as error:
        raise ProtocolError(f"a {kind.__name__} that cannot be parsed.") from error
    return message
