"""How a newcomer that knows nothing but an address learns which run it is: the INFO protocol.

The rule: the manifest is believed for its owner's signature and its hash, whoever hands it over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nolocod.errors import ManifestError, OtherRunError
from nolocod.identity import short
from nolocod.p2p.transport.requests import Terms, answer, ask, off_the_loop
from nolocod.p2p.transport.stream import INFO
from nolocod.proto import nolocod_pb2 as pb
from nolocod.run.manifest import Sealed, unseal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream


async def fetch_info(host: Host, peer: PeerId, addresses: Sequence[str], terms: Terms) -> Sealed:
    """Ask `peer` for its run's manifest, and check it. Where `terms` name none any run will do; it may be the beginning
    of an id.

    Raises RemoteError (OtherRunError, PeerVersionError, ... ), ManifestError or VersionError.
    """
    stream = await host.open_stream(peer, INFO, addresses)
    body = await ask(stream, pb.Body(info_request=pb.InfoRequest()), replace(terms, run_id=None), "info")
    sealed = unseal(body.info.manifest)
    if body.run_id != sealed.run_id:
        raise ManifestError(f"{short(peer)} is in run {body.run_id[:12]!r}, but sends the manifest of {sealed.run_id[:12]}.")
    if not sealed.run_id.startswith(wanted := terms.run_id or ""):
        raise OtherRunError(f"{short(peer)} is in run {sealed.run_id[:12]}, and {wanted[:12]} was asked for.")
    return sealed


async def serve_info(stream: Stream, terms: Terms, sealed: Sealed) -> None:
    """Answer one INFO stream about our run; a peer that names another run is refused by name."""

    async def reply(_: pb.Body) -> pb.Body:
        return await off_the_loop(lambda: pb.Body(info=pb.Info(manifest=sealed.to_bytes()), run_id=sealed.run_id), large=True)

    await answer(stream, replace(terms, run_id=None), "info_request", reply)
