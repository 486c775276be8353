"""Who may amend a run, `[owners]` of the run file, and what an amendment may change (amendments.py)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nolocod.errors import SignatureError
from nolocod.identity import public_key

PeerIdText = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]


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


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is otherwise from round `at` on, until a later change says otherwise again. None: as it was."""

    at: Annotated[int, Meta(ge=0, lt=1 << 53)]
    rounds: Annotated[int, Meta(ge=0, lt=1 << 53)] | None = None
    """The run's goal; one that lies before `at` ends the run there, and 0 is none."""
    learning_rate: Annotated[float, Meta(gt=0, lt=10)] | None = None
    schedule: Literal["wsd", "cosine", "constant"] | None = None
    dataset: Text | None = None
    subset: Text | None = None
    split: Text | None = None
    field: Text | None = None
    release: Annotated[str, Meta(pattern=r"^\d{1,4}(\.\d{1,4}){0,2}\Z")] | None = None
    """Older releases train no more."""
    bootstrap: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)] = ()
    """Further addresses at which the run is found."""
    paused: bool | None = None
    """Nobody trains until a change says otherwise; rounds stand still meanwhile."""
    note: Text = ""
    """To people."""
    unknown: tuple[str, ...] = ()
    """Names of what this release does not know; never sent."""

    @property
    def words(self) -> str:
        """What it changes, for people."""
        said = {key: value for key, value in msgspec.to_builtins(self).items() if key not in ("at", "note", "unknown")}
        told = [f"{key.replace('_', ' ')} {_shown(value)}" for key, value in said.items()]
        told += [f"{key} (not known to this release)" for key in self.unknown]
        return ", ".join(told) + (f": {self.note}" if self.note else "")


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
