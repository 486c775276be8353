"""Which protocol an incoming stream speaks, settled so that nobody can end the node by it.

The rule: a workaround for libp2p 0.8.1. It looks a handler up, writes its answer, and looks the handler up again, which
raises KeyError where the handler was taken away meanwhile, as the DHT's is when a node turns out to be behind a NAT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect

if TYPE_CHECKING:
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator


class Negotiation(Multiselect):  # type: ignore[misc]  # libp2p has no types
    """Multiselect whose failures are all its own."""

    async def negotiate(self, communicator: MultiselectCommunicator, *arguments: int) -> tuple[object, object]:
        """As Multiselect's; MultiselectError for a protocol that is served no more."""
        try:
            protocol, handler = await super().negotiate(communicator, *arguments)
        except KeyError as error:
            raise MultiselectError(f"{error} is served no more.") from error
        return protocol, handler
