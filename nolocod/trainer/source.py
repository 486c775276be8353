"""Which source a run trains on, opened for one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.trainer.data import Tokenizer, local_tokens
from nolocod.trainer.windows import Shard, Source, Windows

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Manifest


def open_source(manifest: Manifest, tokenizer: Tokenizer, peer_id: str, data: Path | None, cache: Path) -> Source:
    """Open the run's text for the node `peer_id`; DataError if it cannot be used."""
    settings = manifest.data
    if settings.source == "hub":
        from nolocod.trainer.hub import Stream, open_hub  # `datasets` takes seconds to import

        return Stream(open_hub(settings), manifest, tokenizer, peer_id)
    tokens = local_tokens(settings, data, tokenizer, cache)
    return Shard(Windows(tokens, manifest.inner.sequence, settings.held_out), manifest.seed, peer_id)
