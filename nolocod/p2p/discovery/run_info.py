"""How a newcomer that knows nothing but an address learns which run it is: the INFO protocol.

The rule: the manifest is believed for its owner's signature and its hash, whoever hands it over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nolocod.errors import ManifestError, OtherRunError, ProtocolError
from nolocod.identity import short
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import INFO
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.limits import Limits
from nolocod.run.manifest import MAX_MANIFEST_BYTES, Sealed, unseal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

LIMITS = Limits(envelope_bytes=MAX_MANIFEST_BYTES + (1 << 10))
"""An Info holds a manifest."""


async def fetch_info(host: Host, peer: PeerId, addresses: Sequence[str], terms: Terms) -> Sealed:
    """Ask `peer` for its run's manifest, and check it. Where `terms` name none any run will do; it may be the beginning
    of an id.

    Raises RemoteError (OtherRunError, PeerVersionError, ... ), ManifestError or VersionError.
    """
    stream = await host.open_stream(peer, INFO, addresses)
    body = await ask(stream, pb.Body(info_request=pb.InfoRequest()), replace(terms, run_id=None, limits=LIMITS))
    if not body.HasField("info"):
        raise ProtocolError(f"{short(peer)} answered a question about the run with another message.")
    sealed = unseal(body.info.manifest)
    if body.run_id != sealed.run_id:
        raise ManifestError(f"{short(peer)} is in run {body.run_id[:12]!r}, but sends the manifest of {sealed.run_id[:12]}.")
    if not sealed.run_id.startswith(wanted := terms.run_id or ""):
        raise OtherRunError(f"{short(peer)} is in run {sealed.run_id[:12]}, and {wanted[:12]} was asked for.")
    return sealed


async def serve_info(stream: Stream, terms: Terms, sealed: Sealed) -> None:
    """Answer one INFO stream about our run; a peer that names another run is refused by name."""

    def reply(body: pb.Body) -> pb.Body:
        if not body.HasField("info_request"):
            raise ProtocolError("an info stream began with another message.")
        return pb.Body(info=pb.Info(manifest=sealed.to_bytes()), run_id=sealed.run_id)

    await answer(stream, replace(terms, run_id=None, limits=LIMITS), reply)
