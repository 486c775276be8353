"""One exchange between two partners, as a state machine that never waits.

The rule: `exchange_states.TABLE` says what may come and what we may decide; anything else that comes is the peer's
ProtocolError, and changes nothing. Describe, chunks and Working flow both ways at once and change no state
of their sender. Neither side runs more than `limits.ahead_chunks` ahead of the other, so that each chunk that
comes tells which of ours need never be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nolocod.errors import LocalError, PeerBusyError, ProtocolError, RefusedError
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.built import built_from_wire, built_to_wire, check_built
from nolocod.proto.content import HASH_SIZE, check_chunk, describe_from_wire, describe_to_wire
from nolocod.proto.envelope import Dialogue, readable, standing_from_wire, standing_to_wire
from nolocod.proto.exchange_states import ANSWERER, OFFERER, State, expected, following
from nolocod.proto.limits import FIRST, Limits, most_bytes
from nolocod.proto.receipt import Receipt, Skipped, check_signature, commit_message, content_of, sign, skipped_of
from nolocod.proto.types import CHUNK_SIZE, Built, parts_in

if TYPE_CHECKING:
    from nolocod.identity import Identity, PeerId
    from nolocod.proto.framing import ChunkHead
    from nolocod.proto.types import Clock, Description, Standing

SESSION_SIZE = 16


@dataclass(frozen=True)
class Setting:
    """What every exchange of a node has in common: `size` is that of the run's largest message, `clock` the time of day."""

    identity: Identity
    run_id: str
    codec: str
    size: int
    limits: Limits = field(default_factory=Limits)
    fragments: int = 1
    staleness: int | None = None
    """An Accept from a round further away is a lie: we would take over that round with the step."""
    clock: Clock = lambda: 0.0
    built: Built = field(default_factory=Built)


@dataclass
class _Side:
    """What is known of one side; `done` chunks of it have passed."""

    standing: pb.Standing | None = None  # as told, fields that we do not know included: receipts hold it
    description: Description | None = None
    done: int = 0

    @property
    def whole(self) -> bool:
        return self.description is not None and self.done == len(self.description.hashes)


class Exchange:
    """One side of one exchange: `partner` and `session` name it.

    Methods that return bytes return a sealed envelope to be sent.
    """

    def __init__(self, setting: Setting, partner: PeerId, session: bytes, *, offerer: bool) -> None:
        self.partner = partner
        self.session = session
        self.offerer = offerer
        self.state = State.NEW
        self.sent = 0
        """Payload bytes, repeated ones included; `received` likewise."""
        self.received = 0
        self.retry_after = 0.0
        self.verdict = ("", "")
        """The code and reason of a Busy, Refuse or Abort, whoever gave it."""
        self.receipt: Receipt | None = None
        """With both signatures; on the answerer's side without the partner's while it is in doubt."""
        self.subject = 0
        """What the exchange is about; final once it is accepted."""
        self.partner_skipped = b""
        """Blocks of our message that the partner could not decode; known with its Confirm or Commit."""
        self._setting = setting
        self._table = OFFERER if offerer else ANSWERER
        self._dialogue = Dialogue(setting.identity, setting.run_id, partner, session)
        self._own = _Side()
        self._other = _Side()
        self._describe_due = True
        self._arrived = 0  # of our chunks, as the partner last told
        self._told = 0  # of them those that it will never ask for again

    # --- what the driver asks -----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Nothing may come any more."""
        return self.state in (State.COMMITTED, State.ABORTED, State.CLOSED)

    @property
    def may_abort(self) -> bool:
        return ">abort" in self._table[self.state]

    @property
    def progress(self) -> int:
        """Chunks that are known to have arrived, of both sides; grows only."""
        return self._other.done + self._arrived

    @property
    def may_send(self) -> bool:
        """Whether our next chunk may go out before more of the partner's have come."""
        return self._other.whole or self._own.done - self._other.done < self._setting.limits.ahead_chunks

    @property
    def partner_standing(self) -> Standing | None:
        return None if self._other.standing is None else standing_from_wire(self._other.standing)

    @property
    def steps(self) -> tuple[float, float]:
        """The `Standing.step_seconds` of both sides, ours first; once both told them."""
        own, other = (standing_from_wire(side.standing) for side in (self._own, self._other) if side.standing is not None)
        return own.step_seconds, other.step_seconds

    @property
    def next_chunk(self) -> int | None:
        """The chunk of ours that the partner is to get next; None when it has them all, or all is over."""
        return None if self._own.description is None or self._own.whole or self.over else self._own.done

    # --- what we send -------------------------------------------------------------------------------

    def offer(self, standing: Standing, subject: int) -> bytes:
        self._step(">offer")
        self.subject = subject
        self._tell_standing(standing)
        offer = pb.Offer(standing=self._own.standing, codec=self._setting.codec, size=self._setting.size, fragment=subject)
        offer.built.CopyFrom(built_to_wire(self._setting.built))
        return self._seal(offer=offer)

    def accept(self, standing: Standing) -> bytes:
        self._step(">accept")
        self._tell_standing(standing)
        return self._seal(accept=pb.Accept(standing=self._own.standing))

    def busy(self, retry_after: float, reason: str) -> bytes:
        self._step(">busy")
        milliseconds = min(max(int(retry_after * 1000), 0), 2**32 - 1)
        return self._seal(busy=pb.Busy(retry_after_ms=milliseconds, reason=reason))

    def refuse(self, code: str, reason: str) -> bytes:
        self._step(">refuse")
        return self._seal(refuse=pb.Refuse(code=code, reason=reason))

    def describe(self, description: Description) -> bytes | None:
        """Say what our tensor is; None if the partner knows already. LocalError if it is not the run's."""
        if not 0 < description.size <= self._setting.size:
            raise LocalError(f"the snapshot has {description.size} bytes, the run's largest message {self._setting.size}.")
        self._own.description = description
        if not self._describe_due:
            return None
        self._describe_due = False
        return self._seal(describe=describe_to_wire(description))

    def sending(self, length: int) -> None:
        """Our `next_chunk` goes out. Told before the write: a write that fails may have arrived."""
        self._own.done += 1
        self.sent += length

    def working(self) -> bytes:
        return self._seal(working=pb.Working())

    def vote(self, skipped: bytes) -> Receipt:
        """The answerer holds all bytes, inspected: what it signs, to be stored before `confirm`."""
        content, identity = self._content(), self._setting.identity
        own = Skipped.signed(identity, content, skipped)
        self.receipt = Receipt(content, b"", sign(identity, content), answerer_skipped=own)
        return self.receipt

    def confirm(self) -> bytes:
        """Tell the vote: from here on the answerer is in doubt."""
        self._step(">confirm")
        vote = self.signed()
        own, content = vote.answerer_skipped, {"receipt": vote.content, "signature": vote.answerer_signature}
        return self._seal(confirm=pb.Confirm(**content, skipped=own.blocks, skipped_signature=own.signature))

    def signed(self) -> Receipt:
        """The receipt, as far as it is signed."""
        if self.receipt is None:
            raise AssertionError("no receipt before the confirmation")
        return self.receipt

    def store(self, skipped: bytes) -> Receipt:
        """The offerer goes to store this receipt; `decide` or `fail` follows."""
        self._step(">store")
        vote, identity = self.signed(), self._setting.identity
        own = Skipped.signed(identity, vote.content, skipped)
        self.receipt = replace(vote, offerer_signature=sign(identity, vote.content), skipped=own)
        return self.receipt

    def fail(self) -> None:
        """The receipt could not be stored, and is not: the offerer may abort again."""
        self._step(">fail")

    def decide(self) -> None:
        """The receipt is stored: the offerer commits."""
        self._step(">decide")

    def commit(self) -> bytes:
        self._step(">commit")
        return self._seal(commit=commit_message(self.signed()))

    def acknowledge(self) -> bytes:
        self._step(">acknowledge")
        return self._seal(acknowledge=pb.Acknowledge())

    def abort(self, code: str, reason: str) -> bytes:
        self._step(">abort")
        self.verdict = (code, reason)
        return self._seal(abort=pb.Abort(code=code, reason=reason))

    def resume(self) -> bytes:
        """After a broken stream: what we have, on either side."""
        self._step(">resume")
        described, confirmed = self._other.description is not None, self.state is State.IN_DOUBT
        return self._seal(resume=pb.Resume(next_chunk=self._other.done, described=described, confirmed=confirmed))

    # --- what comes ---------------------------------------------------------------------------------

    def most(self) -> int:
        """Bytes of the largest envelope that may come now; a Describe has a hash for each chunk of the run's message."""
        names = expected(self._table, self.state)
        chunk = min(CHUNK_SIZE, self._setting.limits.chunk_bytes)
        hashes = -(-self._setting.size // chunk) if "describe" in names else 0
        return max(most_bytes(names), FIRST + hashes * (HASH_SIZE + 2))

    def receive(self, raw: bytes) -> str:
        """Take an envelope; return the message's name, with `state` changed as `TABLE` says.

        Raises a RemoteError, and changes nothing, if it may not come now or is not what it should be.
        """
        return self.take(self._dialogue.open(raw))

    def take_first(self, body: pb.Body) -> str:
        """Take a body that was opened before the session was known."""
        self._dialogue.admit(body)
        return self.take(body)

    def take(self, body: pb.Body) -> str:
        name = body.WhichOneof("content") or "unknown message"
        step = self._following(f"<{name}")
        match name:
            case "offer":
                self._take_offer(body.offer)
            case "accept":
                self._take_accept(body.accept)
            case "busy":
                self.retry_after = body.busy.retry_after_ms / 1000
                self.verdict = (PeerBusyError.entry.code, readable(body.busy.reason))
            case "refuse" | "abort":
                said = body.refuse if name == "refuse" else body.abort
                self.verdict = (readable(said.code, 16), readable(said.reason))
            case "describe":
                self._take_describe(body.describe)
            case "resume":
                self._take_resume(body.resume)
            case "confirm":
                self._take_confirm(body.confirm)
            case "commit":
                receipt = self.signed().committed(body.commit)
                self._take_skipped(receipt.skipped)
                self.receipt = receipt
        self.state = step
        return name

    def check_terms(self, offer: pb.Offer) -> None:
        """ProtocolError if the offer is not about a tensor of this run, OtherTensorsError if its bytes mean something else."""
        if (offer.codec, offer.size) != (self._setting.codec, self._setting.size):
            raise ProtocolError(
                f"an offer of {offer.size} bytes in {readable(offer.codec, 16)!r} is not of this run, "
                f"which has {self._setting.size} in {self._setting.codec!r}."
            )
        if parts_in(offer.fragment, self._setting.fragments).stop > self._setting.fragments:
            raise ProtocolError(f"fragment {offer.fragment} is not of this run, which has {self._setting.fragments}.")
        check_built(self._setting.built, built_from_wire(offer.built))

    def expect(self, head: ChunkHead) -> tuple[int, int]:
        """Where in the inbox the chunk belongs, (start, length); ProtocolError unless it is the next one."""
        self._following("<chunk")
        description = self._other.description
        if description is None or head.index != self._other.done:
            raise ProtocolError(f"chunk {head.index} came where {self._other.done} was due.")
        self._check_pace(head.index)
        start, length = description.span(head.index)
        if head.length != length:
            raise ProtocolError(f"chunk {head.index} has {head.length} bytes instead of {length}.")
        return start, length

    def _check_pace(self, index: int) -> None:
        """The partner sends chunk `index` only once it holds all but the last few of ours before it."""
        held = index - self._setting.limits.ahead_chunks + 1
        if not self._own.whole and held > self._own.done:
            raise ProtocolError(f"chunk {index} came when the partner could hold {self._own.done} of ours.")
        self._told = max(self._told, min(held, self._own.done))
        self._arrived = max(self._arrived, self._told)

    def chunk(self, content: memoryview) -> None:
        """Check the chunk that `expect` placed; AlteredBytesError if its bytes are not those signed for."""
        step = self._following("<chunk")
        if self._other.description is None:
            raise AssertionError("a chunk without a description")
        check_chunk(self._other.description, self._other.done, content)
        self._other.done += 1
        self.received += len(content)
        self.state = self._following("<last chunk") if self._other.whole else step

    # --- inside -------------------------------------------------------------------------------------

    def _following(self, step: str) -> State:
        return following(self._table, self.state, step, self.partner)

    def _step(self, step: str) -> None:
        if self.state is State.ABORTED:
            raise RefusedError("the exchange was aborted meanwhile.")  # by another task of the same driver
        self.state = self._following(step)

    def _take_offer(self, offer: pb.Offer) -> None:
        if len(self.session) != SESSION_SIZE:
            raise ProtocolError(f"a session is named by {SESSION_SIZE} bytes, not {len(self.session)}.")
        standing_from_wire(offer.standing)  # raises for numbers beyond all measure
        self.subject = offer.fragment
        self._take_terms(offer.standing, pb.Terms(codec=offer.codec, size=offer.size, fragment=offer.fragment))

    def _take_accept(self, accept: pb.Accept) -> None:
        own, other = self._own.standing, standing_from_wire(accept.standing)
        staleness = self._setting.staleness
        if own is not None and staleness is not None and abs(own.round - other.round) > staleness:
            raise ProtocolError(f"the partner accepted from round {other.round} an offer from round {own.round}.")
        self._take_terms(accept.standing, self._terms())

    def _take_terms(self, standing: pb.Standing, due: pb.Terms) -> None:
        if standing.HasField("terms") and standing.terms != due:
            raise ProtocolError("the partner signs other terms than it offers or accepts.")
        self._other.standing = standing

    def _take_describe(self, wire: pb.Describe) -> None:
        description = describe_from_wire(wire, self._setting.limits)
        if not 0 < description.size <= self._setting.size:
            raise ProtocolError(f"a message of {description.size} bytes is not of this run, with {self._setting.size} at most.")
        if description.chunk_size != (due := min(CHUNK_SIZE, self._setting.limits.chunk_bytes)):
            raise ProtocolError(f"a message has chunks of {description.chunk_size} bytes instead of {due}.")
        self._other.description = description

    def _take_resume(self, resume: pb.Resume) -> None:
        """Go back to the first chunk that the partner lacks."""
        if resume.next_chunk > self._own.done or (resume.next_chunk and not resume.described):
            raise ProtocolError(f"the partner claims {resume.next_chunk} chunks where {self._own.done} were sent.")
        if resume.described and self._describe_due:
            raise ProtocolError("the partner claims a description that was not sent.")
        if resume.next_chunk < self._told:
            raise ProtocolError(f"the partner lacks chunk {resume.next_chunk}, without which it could not have gone on.")
        self._own.done = resume.next_chunk
        self._arrived = max(self._arrived, resume.next_chunk)
        self._describe_due = not resume.described

    def _take_confirm(self, vote: pb.Confirm) -> None:
        """Keep the answerer's vote if it signed the very bytes that we come to ourselves."""
        if not self._own.whole:
            raise ProtocolError("the partner confirms bytes that were not sent.")
        content = self._content()
        if vote.receipt != content:
            raise ProtocolError("the partner's receipt is not about the same bytes as ours.")
        check_signature(self.partner, content, vote.signature)
        skipped = skipped_of(vote, self._signed_side(self.partner, self._other))
        self._take_skipped(skipped)
        self.receipt = Receipt(content, b"", vote.signature, answerer_skipped=skipped)

    def _take_skipped(self, skipped: Skipped) -> None:
        if len(skipped.blocks) > self._setting.limits.skipped_bytes:
            raise ProtocolError(f"a bit map of {len(skipped.blocks)} bytes is longer than any message's.")
        self.partner_skipped = skipped.blocks

    def _terms(self) -> pb.Terms:
        return pb.Terms(codec=self._setting.codec, size=self._setting.size, fragment=self.subject)

    def _tell_standing(self, standing: Standing) -> None:
        self._own.standing = standing_to_wire(standing, self._setting.clock())
        self._own.standing.terms.CopyFrom(self._terms())  # so that receipts hold them, those of older partners too

    def _content(self) -> bytes:
        own = self._signed_side(self._setting.identity.peer_id, self._own)
        other = self._signed_side(self.partner, self._other)
        first, second = (own, other) if self.offerer else (other, own)
        return content_of(self._setting.run_id, self.session, first, second)

    def _signed_side(self, peer_id: PeerId, side: _Side) -> pb.Side:
        if side.description is None:
            raise AssertionError("a receipt before both descriptions")
        return pb.Side(peer_id=peer_id, standing=side.standing, root=side.description.root)

    def _seal(self, **content: object) -> bytes:
        return self._dialogue.seal(pb.Body(**content))  # type: ignore[arg-type]  # one field by its own name
