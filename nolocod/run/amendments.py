"""Amendments: what the owners of a run change of it while it runs, as bytes that anybody can check.

The rule: one document holds all changes of a run, in order. Of two the later version counts, whoever brings it, if enough
owners signed it; so all nodes come to the same one. Each change counts from a round on, so that all nodes apply it at the same
one, and what is in force at a node is not taken back there. A change that this release does not know is told, not guessed.
No clock and no files in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import blake3
import msgspec
from msgspec import Meta

from nolocod import __version__
from nolocod.errors import AmendmentError, ProtocolError, SignatureError
from nolocod.identity import verify
from nolocod.run.manifest import unseal
from nolocod.run.owners import Change
from nolocod.units import release_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nolocod.identity import Identity
    from nolocod.run.manifest import Manifest, Sealed

MAX_DOCUMENT = 8192
"""Bytes, signatures and all: each gossip message carries it."""
MOST = 32
"""Changes of one run."""
_DOMAIN = b"nolocod amendments 1\0"
_KNOWN = frozenset(Change.__struct_fields__) - {"unknown"}


class _Document(msgspec.Struct, frozen=True):
    run_id: str
    version: Annotated[int, Meta(ge=1, lt=1 << 31)]
    changes: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=MOST)]


class _Signed(msgspec.Struct, frozen=True):
    body: Annotated[bytes, Meta(max_length=MAX_DOCUMENT)]
    signatures: Annotated[dict[str, bytes], Meta(max_length=10)]


@dataclass(frozen=True)
class Amendments:
    """One document, checked. `raw` is its bytes; `signers` are owners, in the manifest's order."""

    version: int = 0
    changes: tuple[Change, ...] = ()
    signers: tuple[str, ...] = ()
    raw: bytes = b""

    def before(self, other: Amendments, founder: str) -> bool:
        """Whether `other` counts instead of this one."""

        def rank(one: Amendments) -> tuple[int, bool, bytes]:
            return one.version, founder in one.signers, blake3.blake3(one.raw).digest()

        return rank(self) < rank(other)

    def in_force(self, number: int) -> tuple[Change, ...]:
        """The changes that count at round `number` of the whole model."""
        return tuple(change for change in self.changes if change.at <= number)


def signers(manifest: Manifest) -> tuple[str, ...]:
    """Whose signatures count: who founded the run, first, the other owners, and the successor."""
    return manifest.owner, *(manifest.owners.all if manifest.owners else ())


def needed(manifest: Manifest) -> int:
    """How many of them have to sign."""
    return manifest.owners.needed if manifest.owners else 1


# --- the owners' side -----------------------------------------------------------------------------------


def propose(sealed: Sealed, version: int, changes: Iterable[Change], owner: Identity) -> bytes:
    """A document, with the signature of `owner`. AmendmentError for what cannot be, or one who is no owner."""
    said = tuple(changes)
    if objection := _objection(sealed.manifest, said):
        raise AmendmentError(objection)
    tables = tuple(msgspec.to_builtins(change) for change in said)
    body = msgspec.json.encode(_Document(sealed.run_id, version, tables), order="deterministic")
    return sign(msgspec.json.encode(_Signed(body, {})), sealed, owner)


def sign(raw: bytes, sealed: Sealed, owner: Identity) -> bytes:
    """The document with the signature of `owner` too. AmendmentError if it is none of this run, or `owner` no owner."""
    if owner.peer_id not in signers(sealed.manifest):
        founder = sealed.manifest.owner
        raise AmendmentError(f"{owner.peer_id} is no owner of run {sealed.manifest.name}, which {founder} founded.")
    try:
        signed = _signed(raw)
        _read(signed, sealed)
    except (ProtocolError, SignatureError) as error:
        raise AmendmentError(error.cause) from error
    both = {**signed.signatures, str(owner.peer_id): owner.sign(_DOMAIN + signed.body)}
    if len(made := msgspec.json.encode(_Signed(signed.body, both), order="deterministic")) > MAX_DOCUMENT:
        raise AmendmentError(f"all changes of the run have {len(made)} bytes, above the limit of {MAX_DOCUMENT}.")
    return made


# --- everybody's side -----------------------------------------------------------------------------------


def read(raw: bytes, sealed: Sealed, *, complete: bool = True) -> Amendments:
    """Check a document; `complete`: it must have all signatures that it needs. ProtocolError or SignatureError."""
    found = _read(_signed(raw), sealed)
    if complete and len(found.signers) < (asked := needed(sealed.manifest)):
        raise SignatureError(f"{len(found.signers)} of {asked} owners signed the amendment.")
    return replace(found, raw=raw)


def _signed(raw: bytes) -> _Signed:
    if len(raw) > MAX_DOCUMENT:
        raise ProtocolError(f"amendments of {len(raw)} bytes are above the limit of {MAX_DOCUMENT}.")
    try:
        return msgspec.json.decode(raw, type=_Signed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("amendments cannot be parsed.") from error


def _read(signed: _Signed, sealed: Sealed) -> Amendments:
    """What `signed` says, and which owners signed it."""
    try:
        document = msgspec.json.decode(signed.body, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("amendments cannot be parsed.") from error
    if document.run_id != sealed.run_id:
        raise ProtocolError("amendments are of another run.")
    by = tuple(peer for peer in signers(sealed.manifest) if peer in signed.signatures)
    if len(by) < len(signed.signatures):
        raise ProtocolError("amendments have a signature of somebody who is no owner.")
    for peer in by:
        verify(peer, _DOMAIN + signed.body, signed.signatures[peer])
    changes = tuple(map(_change, document.changes))
    if objection := _objection(sealed.manifest, changes):
        raise ProtocolError(objection)
    return Amendments(document.version, changes, by)


def _change(table: dict[str, Any]) -> Change:
    """One change, and of a later release what this one makes of it."""
    unknown = sorted(f"{key[:32]}" for key in set(table) - _KNOWN)
    known = {key: value for key, value in table.items() if key in _KNOWN}
    try:
        return msgspec.structs.replace(msgspec.convert(known, Change), unknown=tuple(unknown))
    except msgspec.ValidationError as error:
        try:
            bare = msgspec.convert({"at": table.get("at")}, Change)
        except msgspec.ValidationError:
            raise ProtocolError("an amendment says not from which round on it counts.") from error
        return msgspec.structs.replace(bare, unknown=tuple(sorted(key[:32] for key in table if key != "at")))


def _objection(manifest: Manifest, changes: tuple[Change, ...]) -> str:
    """What is wrong with them; empty for nothing."""
    if not 0 < len(changes) <= MOST:
        return f"a run has 1 to {MOST} changes, and not {len(changes)}."
    if any(one.at > other.at for one, other in pairwise(changes)):
        return "a change counts from a round on that lies before that of the change before it."
    text = any(value is not None for one in changes for value in (one.dataset, one.subset, one.split, one.field))
    if text and manifest.data.source != "hub":
        return f'`data.source` is "{manifest.data.source}": the data of a run can be changed where it is "hub".'
    if text and manifest.data.mixture:
        return "the run has `data.mixture`, which cannot be changed."
    return ""


# --- what then counts -----------------------------------------------------------------------------------


def amended(sealed: Sealed, amendments: Amendments) -> Sealed:
    """The same run with these changes."""
    turns = sealed.manifest.outer.turns
    return replace(sealed, changes=tuple(msgspec.structs.replace(one, at=one.at * turns) for one in amendments.changes))


def unseal_amended(raw: bytes, document: bytes, number: int) -> Sealed:
    """The run that a trainer begins with in round `number`, of which it has the data. What `unseal` and `read` raise."""
    sealed = unseal(raw)
    if not document:
        return sealed
    sealed = amended(sealed, read(document, sealed))
    return replace(sealed, manifest=msgspec.structs.replace(sealed.manifest, data=at(sealed, number).data))


def at(sealed: Sealed, number: int) -> Manifest:
    """What counts in round `number`, one turn to a round as in the manifest itself."""
    manifest, change = sealed.manifest, msgspec.structs.replace
    for one in sealed.changes:
        if one.at > number:
            break
        inner = {key: value for key in ("learning_rate", "schedule") if (value := getattr(one, key)) is not None}
        text = {key: value for key in ("dataset", "subset", "split", "field") if (value := getattr(one, key)) is not None}
        if inner:
            manifest = change(manifest, inner=change(manifest.inner, **inner))
        if text:
            manifest = change(manifest, data=change(manifest.data, **text))
        if one.rounds is not None:
            manifest = change(manifest, outer=change(manifest.outer, rounds=one.rounds * manifest.outer.turns))
    return manifest


def goal(sealed: Sealed) -> int:
    """The round in which the run ends by what is known now; 0 for never."""
    edges = sorted({0, *(one.at for one in sealed.changes)})
    for begin, end in zip(edges, [*edges[1:], math.inf], strict=True):
        if (rounds := at(sealed, begin).outer.rounds) and max(rounds, begin) < end:
            return max(rounds, begin)
    return 0


def for_trainers(sealed: Sealed, number: int) -> tuple[object, ...]:
    """What a trainer has to be told of the changes, in round `number`: one that was told otherwise starts anew."""
    keys = "at", "rounds", "learning_rate", "schedule"
    said = [tuple(getattr(one, key) for key in keys) for one in sealed.changes]
    return *(one for one in said if any(value is not None for value in one[1:])), at(sealed, number).data.text


def obstacle(sealed: Sealed, number: int) -> str:
    """Why no node, or none of this release, trains in round `number`; empty if nothing speaks against it."""
    force = [one for one in sealed.changes if one.at <= number]
    for one in force:
        if one.unknown:
            return f"an amendment changes {', '.join(one.unknown)}, which nolocod {__version__} does not know: update it"
        if one.release and release_numbers(one.release) > release_numbers(__version__):
            return f"the run needs nolocod {one.release} by now, and this is {__version__}: update it"
    paused = next((one for one in reversed(force) if one.paused is not None), None)
    if paused is None or not paused.paused:
        return ""
    return f"the run's owner has it wait{': ' + paused.note if paused.note else ''}"
