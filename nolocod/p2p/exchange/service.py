"""Both ends of exchanges: offers to partners, and answers to theirs.

The rule: a remote fault is an outcome, never an exception of `offer`; an accepted offer is always
reported as ended, once. When two nodes offer to each other at once, the offer of the lower peer id
stands. Who asks about an exchange that is over is told what was decided, or that it never will be; and this node asks
so about its own that ended in doubt (`doubts`, which is to be run).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import trio

from nolocod import errors
from nolocod.p2p.exchange.doubts import AFTERWARDS, Doubts
from nolocod.p2p.exchange.progress import StalledError
from nolocod.p2p.exchange.session import Session
from nolocod.p2p.membership.peer_scoring import Conduct, conduct_in, conduct_of
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue, open_envelope
from nolocod.proto.exchange import Exchange
from nolocod.proto.exchange_states import State
from nolocod.proto.receipt import commit_message
from nolocod.proto.types import Accept, Answer, Busy, Ended, Offer, Refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.exchange.receipts import ReceiptStore
    from nolocod.p2p.transport.stream import Dial, Stream
    from nolocod.proto.types import Answerer, Built, LocalSide, Standing

_Name = tuple["PeerId", bytes]
"""Of an exchange: the partner, and the session."""

GLARE = "glare"
"""The reason of a Busy between two nodes that offered to each other at once."""

_GLARE_SECONDS = 1.0
_STARTING_SECONDS = 5.0
_REMEMBERED = 1024


class ExchangeService:
    """One per node. `box_size` (bytes of the run's tensor) may be set once it is known: until then, Busy.

    `judge` is told what partners did, by what we found ourselves: praise, or blame.
    """

    def __init__(
        self,
        context: Context,
        dial: Dial,
        answerer: Answerer,
        receipts: ReceiptStore,
        judge: Callable[[PeerId, Conduct], None] = lambda _, __: None,
        emit: Emit = lambda _: None,
    ) -> None:
        self._context = context
        self._dial = dial
        self._answerer = answerer
        self._receipts = receipts
        self._judge = judge
        self._outstanding: dict[PeerId, trio.CancelScope] = {}  # our offers that are not answered
        self._running: dict[_Name, Session] = {}
        self._seen: OrderedDict[_Name, None] = OrderedDict()
        self.doubts = Doubts(context, dial, receipts, emit, lambda *name: name in self._running)
        self._lookup = trio.CapacityLimiter(1)  # a question about an old session reads a file

    @property
    def box_size(self) -> int:
        return self._context.size

    @box_size.setter
    def box_size(self, size: int) -> None:
        self._context = replace(self._context, size=size)

    def tell_built(self, built: Built) -> None:
        """What our libraries made of the run's model, as our offers tell it; offers of other tensors are refused."""
        self._context = replace(self._context, built=built)

    @property
    def patience(self) -> float:
        """Seconds that an exchange may take."""
        return self._context.limits.whole(self._context.size)

    # --- offering -----------------------------------------------------------------------------------

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: LocalSide) -> Ended:
        """Run one exchange about `subject` with `partner`, as the one who offers.

        Remote faults are outcomes; raises what `local_side` or the receipt store raises of our own.
        """
        if partner in self._outstanding:
            raise AssertionError("two offers at once to one partner")
        machine = Exchange(self._context, partner, self._context.rng.randbytes(16), offerer=True)
        outstanding = self._outstanding[partner] = trio.CancelScope()
        try:
            with outstanding:
                channel = await self._ask(machine, standing, subject)
        except errors.RemoteError as error:
            self._judged(partner, conduct_of(error))
            return _unanswered(machine, error)
        finally:
            del self._outstanding[partner]
        if outstanding.cancelled_caught:
            return Ended("busy", partner, machine.session, reason=GLARE, retry_after=_GLARE_SECONDS)
        if machine.state is State.CLOSED:
            return _declined(machine)
        return await self._run(Session(self._context, machine, local_side, self._receipts, self._dial), channel)

    async def _ask(self, machine: Exchange, standing: Standing, subject: int) -> Channel:
        """Offer, and wait for an answer."""
        limits = self._context.limits
        with deadline(limits.dial_seconds, "the dial"):
            channel = Channel(await self._dial(machine.partner, EXCHANGE), limits)
        try:
            with deadline(limits.accept_seconds, "the answer to an offer"):
                await channel.send_envelope(machine.offer(standing, subject))
                machine.receive(await channel.receive_envelope(machine.most))
            await trio.lowlevel.checkpoint_if_cancelled()  # dropped just as the answer came: drop it still
        except BaseException:
            if machine.may_abort:  # an Accept may be on its way: its sender must not wait for us
                await channel.last_words(machine.abort(errors.PeerUnavailableError.entry.code, "the offer was given up"))
            await channel.reset()
            raise
        if machine.state is State.CLOSED:
            await channel.close()
        return channel

    # --- answering ----------------------------------------------------------------------------------

    async def handle(self, stream: Stream) -> None:
        """Serve an inbound EXCHANGE stream: an Offer, or a Resume of an exchange that its stream outlived.

        Raises RemoteError if the first message is not acceptable, and what our own parts raise.
        """
        limits = self._context.limits
        channel = Channel(stream, limits)
        async with reset_unless_done(channel.reset):
            with deadline(limits.accept_seconds, "the first message"):
                raw = await channel.receive_envelope()
            if (body := await self._opened(channel, raw)) is None:
                return
            match body.WhichOneof("content"):
                case "offer":
                    self.doubts.heard(channel.remote)
                    await self._answer(channel, body)
                case "resume":
                    await self._resume(channel, body)
                case name:
                    raise errors.ProtocolError(f"a stream began with {name or 'an unknown message'}.")

    async def _opened(self, channel: Channel, raw: bytes) -> pb.Body | None:
        """None for a peer of another run or version: it is told, so that its user learns what ours would."""
        context = self._context
        try:
            own = context.identity.peer_id
            return open_envelope(raw, run_id=context.run_id, receiver=own, remote=channel.remote)
        except (errors.PeerVersionError, errors.OtherRunError) as error:
            dialogue = Dialogue(context.identity, context.run_id, channel.remote, b"")
            await channel.last_words(dialogue.seal(pb.Body(refuse=pb.Refuse(code=error.code, reason=error.cause))))
            return None

    async def _answer(self, channel: Channel, body: pb.Body) -> None:
        machine = Exchange(self._context, channel.remote, body.session, offerer=False)
        machine.take_first(body)
        if not self._context.size:
            await channel.last_words(machine.busy(_STARTING_SECONDS, "starting"))
            return
        try:
            machine.check_terms(body.offer)
        except (errors.ProtocolError, errors.OtherTensorsError) as error:
            await channel.last_words(machine.refuse(error.code, error.cause))
            return
        if (channel.remote, body.session) in self._seen:
            await channel.last_words(machine.refuse(errors.ProtocolError.entry.code, "this session was offered before"))
            return
        answer = self._decide(machine)
        match answer:
            case Busy(retry_after, reason):
                await channel.last_words(machine.busy(retry_after, reason))
            case Refuse(code, reason):
                await channel.last_words(machine.refuse(code, reason))
            case Accept():
                await self._accepted(channel, machine, answer)

    def _decide(self, machine: Exchange) -> Answer:
        """Ask `answerer`, unless our own offer to the same partner stands."""
        partner, standing = machine.partner, machine.partner_standing
        if standing is None:
            raise AssertionError("an offer without a standing")
        ours = self._outstanding.get(partner)
        if ours is not None and self._context.identity.peer_id < partner:
            return Busy(0.0, GLARE)
        if (session := next((one for (peer, _), one in self._running.items() if peer == partner), None)) is not None:
            session.partner_is_free()
            return Busy(_GLARE_SECONDS, "in an exchange with you")
        answer = self._answerer.decide(Offer(partner, machine.session, standing, machine.subject))
        if ours is not None and isinstance(answer, Accept):
            ours.cancel()
        self._seen[partner, machine.session] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return answer

    async def _accepted(self, channel: Channel, machine: Exchange, accept: Accept) -> None:
        """The answerer is engaged: from here on it must be told the end, come what may."""
        session = Session(self._context, machine, self._answerer.local_side, self._receipts, self._dial)
        try:
            try:
                await channel.send_envelope(machine.accept(accept.standing))
            except errors.RemoteError as error:
                machine.abort(error.code, error.cause)
                await channel.reset()
                return
            await self._run(session, channel)
        finally:
            with trio.CancelScope(shield=True):
                await self._answerer.ended(session.ended())

    async def _resume(self, channel: Channel, body: pb.Body) -> None:
        name = (channel.remote, body.session)
        session = self._running.get(name)
        if session is not None and not session.machine.offerer:
            await session.hand_over(channel, body)
            return
        told = await session.answer_doubt() if session is not None and body.resume.confirmed else None
        await channel.last_words(told or await self._look_up(*name))

    async def _look_up(self, partner: PeerId, session: bytes) -> bytes:
        """Commit if we decided so, or Abort: what is not kept here was not decided, and never will be."""
        dialogue = Dialogue(self._context.identity, self._context.run_id, partner, session, AFTERWARDS)
        async with self._lookup:
            receipt = await self._context.aside(self._receipts.find, session)
        if receipt is not None and (receipt.offerer, receipt.answerer) == (self._context.identity.peer_id, partner):
            return dialogue.seal(pb.Body(commit=commit_message(receipt)))
        abort = pb.Abort(code=errors.RefusedError.entry.code, reason="no such exchange is under way here")
        return dialogue.seal(pb.Body(abort=abort))

    # --- both ---------------------------------------------------------------------------------------

    async def _run(self, session: Session, channel: Channel) -> Ended:
        name = (session.machine.partner, session.machine.session)
        self._running[name] = session
        try:
            await session.run(channel)
        finally:
            del self._running[name]
            self.doubts.heard(name[0])
        ended, failure = session.ended(), session.failure
        if session.machine.state is State.ABORTED:
            await self._context.aside(self._receipts.settle, name[1])  # this node may have voted for it
        found = failure if isinstance(failure, errors.RemoteError) else None
        if session.blameless and isinstance(failure, errors.PeerTooSlowError):
            return ended
        stalled = isinstance(failure, StalledError) and ended.outcome != "committed"
        conduct = Conduct.WITHHELD if stalled else conduct_in(ended, found, self._context.size)
        self._judged(session.machine.partner, conduct)
        return ended

    def _judged(self, partner: PeerId, conduct: Conduct | None) -> None:
        if conduct is not None:
            self._judge(partner, conduct)


def _unanswered(machine: Exchange, error: errors.RemoteError) -> Ended:
    outcome: Literal["unreachable", "refused", "aborted"] = "aborted"
    if isinstance(error, errors.PeerUnavailableError | errors.PeerTooSlowError):
        outcome = "unreachable"
    elif isinstance(error, errors.RefusedError | errors.PeerVersionError):
        outcome = "refused"
    return Ended(outcome, machine.partner, machine.session, error=error.code, reason=error.cause)


def _declined(machine: Exchange) -> Ended:
    code, reason = machine.verdict
    outcome: Literal["busy", "refused"] = "busy" if code == errors.PeerBusyError.entry.code else "refused"
    return Ended(outcome, machine.partner, machine.session, error=code, reason=reason, retry_after=machine.retry_after)
