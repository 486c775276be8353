"""Who may amend a run: `[owners]` of the run file."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from nolocod.errors import SignatureError
from nolocod.identity import public_key

PeerIdText = Annotated[str, Meta(max_length=128)]


class Owners(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose signatures amend the run (docs/amendments.md). Without this table: those of whoever founds it, alone."""

    others: Annotated[tuple[PeerIdText, ...], Meta(max_length=8)] = ()
    """Peer ids of further owners, as `nolocod id` prints them."""
    needed: Annotated[int, Meta(ge=1, le=9)] = 1
    """How many of them, with whoever founds the run, have to sign an amendment."""
    successor: PeerIdText = ""
    """The peer id of one who signs in the place of an owner that lost its key. Of two amendments that an owner and the
    successor made at the same time, that of whoever founded the run counts."""

    def __post_init__(self) -> None:
        for peer in self.all:
            try:
                public_key(peer)
            except SignatureError as error:
                raise ValueError(f"{peer[:64]!r} is no peer id") from error
        if len(set(self.all)) < len(self.all):
            raise ValueError("a peer id is there twice")
        if self.needed > 1 + len(self.all):
            raise ValueError(f"{self.needed} signatures are needed, and there are {1 + len(self.all)} keys")

    @property
    def all(self) -> tuple[str, ...]:
        """All but whoever founds the run."""
        return (*self.others, *([self.successor] if self.successor else []))
