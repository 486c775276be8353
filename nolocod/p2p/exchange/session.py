"""Drives one exchange over as many streams as it takes.

The rule: the machine (proto.exchange) knows what is allowed, this module only moves its bytes and
waits. The node's own work (snapshot, inspection, vote and decision, each on the disk) outlives a
broken stream; what belongs to a stream ends with it. Nothing that was decided is undone by a
cancellation or a fault that comes later.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

import trio

from nolocod import errors
from nolocod.p2p.exchange.context import redial_pauses
from nolocod.p2p.exchange.progress import Pace, StalledError
from nolocod.p2p.transport.channel import Channel, send_working
from nolocod.p2p.transport.deadlines import deadline, together
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto.exchange_states import State
from nolocod.proto.types import Ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.exchange.receipts import ReceiptStore
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto import nolocod_pb2 as pb
    from nolocod.proto.exchange import Exchange
    from nolocod.proto.types import Description, LocalSide

_DECIDED = (State.DECIDED, State.COMMITTED)
_DECIDING = (State.CONFIRMED, State.STORING)
_STOPPED = errors.RemoteError.entry.code


class Session:
    """One side of one exchange from Accept on. `run` once; then `ended` says how it went."""

    def __init__(self, context: Context, machine: Exchange, local_side: LocalSide, receipts: ReceiptStore, dial: Dial) -> None:
        self.machine = machine
        self.decision = trio.Event()
        """Set when the offerer committed or aborted, whichever it did."""
        self._limits = context.limits
        self._size = context.size
        self._local_side = local_side
        self._receipts = receipts
        self._dial = dial
        self._aside = context.aside
        self._description: Description | None = None
        self._skipped = b""
        self.blameless = local_side.wary
        """A partner that is too slow may be an honest one that needs more time than it had."""
        self._up = True
        """The present stream is not known to be broken."""
        self._came = trio.Event()
        self._prepared, self._received, self._inspected, self._confirmed = (trio.Event() for _ in range(4))
        self._settled = trio.Event()  # the answerer has the decision, or the offerer its acknowledgement
        self._scope = trio.CancelScope()
        self._talk_scope = trio.CancelScope()
        self._redialled: tuple[Channel, pb.Body] | None = None
        self._redial = trio.Event()
        self._over = trio.Event()
        self.failure: errors.NolocodError | None = None
        """What went wrong by our own finding, whatever the partner said of it."""

    # --- the whole ----------------------------------------------------------------------------------

    async def run(self, channel: Channel) -> None:
        """Go on from Accept to the end. Remote faults end up in `ended`; raises LocalError and Cancelled."""
        self._channel = channel
        size, side, (ours, told) = self._size, self._local_side, self.machine.steps
        # what the partner's trainer may take
        self._paced = self._limits.paced(side.phase, size, (ours, told), side.credit, wary=side.wary)
        self.blameless |= told > ours and side.credit < 1
        self._pace = Pace(self._paced, size, self._chunks_due, lambda: self._up)
        try:
            with self._scope:
                own = partial(self._or_abort, self._prepare), partial(self._or_abort, self._examine)
                await together(self._converse, *own, partial(self._pace.watch, self._prepared))
        except errors.NolocodError as error:
            self._note(error)
        finally:
            # a decision stands: the partner is told of it, and our caller gets to apply it
            with trio.CancelScope(shield=self.machine.state in _DECIDED):
                await self._farewell()
        try:
            if self.machine.state is State.IN_DOUBT:
                await self._ask_until_told()
        finally:
            self._over.set()
        if isinstance(self.failure, errors.LocalError):
            raise self.failure

    def _chunks_due(self) -> bool:
        return self._up and (self.machine.next_chunk is not None or not self._received.is_set())

    def ended(self) -> Ended:
        """How the exchange stands; final once `run` is over, however it ended."""
        machine = self.machine
        outcome: Literal["committed", "in_doubt", "aborted"] = "committed"
        match machine.state:
            case State.COMMITTED:
                code = reason = ""
            case State.DECIDED:
                code, reason = errors.UnacknowledgedError.entry.code, "the partner's acknowledgement never came"
            case State.IN_DOUBT:
                outcome, code = "in_doubt", errors.PeerUnavailableError.entry.code
                reason = "the partner's decision could not be learnt"
            case _:
                outcome = "aborted"
                code, reason = machine.verdict
        counted = machine.sent, machine.received, machine.partner_standing
        return Ended(outcome, machine.partner, machine.session, *counted, code, reason, skipped=machine.partner_skipped)

    async def _farewell(self) -> None:
        """Abort if that is still ours to do, tell it within a moment, and let the stream go."""
        machine, failure = self.machine, self.failure
        if machine.may_abort:
            code, reason = (failure.code, failure.cause) if failure else (_STOPPED, "the node stops")
            await self._channel.last_words(machine.abort(code, reason))
        else:
            await self._channel.close()
        self.decision.set()
        if self._redialled is not None:
            await self._redialled[0].reset()
        if machine.state is not State.IN_DOUBT:
            self._over.set()

    async def _or_abort(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run `part`; if it fails for good, tell the partner before all else is stopped in mid-frame."""
        try:
            await part()
        except (errors.PeerUnavailableError, errors.PeerTooSlowError):
            raise
        except errors.NolocodError as error:
            self._note(error)
            if self.machine.may_abort:
                envelope = self.machine.abort(error.code, error.cause)
                with trio.move_on_after(self._limits.accept_seconds), suppress(errors.RemoteError):
                    await self._channel.send_envelope(envelope)
            raise

    def _note(self, error: errors.NolocodError) -> None:
        """Keep the first failure, for what it stops may fail too; but one of our own before a peer's."""
        if self.failure is None or (isinstance(error, errors.LocalError) and not isinstance(self.failure, errors.LocalError)):
            self.failure = error

    # --- the node's own work ------------------------------------------------------------------------

    async def _prepare(self) -> None:
        self._description = await self._local_side.capture(self.machine.subject)
        self._prepared.set()

    async def _examine(self) -> None:
        """Inspect what was received; the offerer then decides, whatever becomes of the stream."""
        await self._received.wait()
        self._skipped = await self._local_side.inspect()
        self._inspected.set()
        if self.machine.offerer:
            await self._confirmed.wait()
            await self._decide()

    async def _decide(self) -> None:
        # shielded, so that a receipt on disk and a decision are one: a store cannot be half cancelled
        with trio.CancelScope(shield=True):
            receipt = self.machine.store(self._skipped)
            try:
                await self._aside(self._receipts.add, receipt)
            except errors.LocalError:
                self.machine.fail()
                raise
            self.machine.decide()
            self._scope.shield = True  # from here on only our own deadlines end this exchange
            self.decision.set()

    async def _vote(self) -> None:
        """What the answerer signs is on the disk before it is told."""
        if self.machine.receipt is None:  # else it is told again
            with trio.CancelScope(shield=True):
                await self._aside(self._receipts.vote, self.machine.vote(self._skipped))

    # --- one stream after another -------------------------------------------------------------------

    async def _converse(self) -> None:
        tries, progress = 0, 0
        while True:
            if self.machine.progress > progress:
                tries, progress = 0, self.machine.progress
            try:
                await self._talk()
                return
            except StalledError as error:
                if self.machine.state is State.IN_DOUBT:
                    return self._note(error)
                raise
            except (errors.PeerUnavailableError, errors.PeerTooSlowError) as error:
                tries += 1
                if tries > self._limits.resumes or not await self._reconnect(error):
                    if self.machine.may_abort:
                        raise
                    return
            except errors.RemoteError:
                if self.machine.state in (*_DECIDED, State.IN_DOUBT):
                    return  # whatever the partner sends now changes nothing
                raise

    async def _talk(self) -> None:
        """All that belongs to the present stream."""
        channel = self._channel
        alive = partial(send_working, channel, self.machine.working, self._limits.working_seconds)
        with trio.CancelScope() as self._talk_scope:
            if self._redialled is not None:  # the partner gave it up before we began
                self._talk_scope.cancel()
            await together(self._send, partial(self._or_abort, self._receive), alive)
        if self._redialled is not None and not self.machine.over:
            raise errors.PeerUnavailableError("the partner left this stream for a new one.")

    async def _send(self) -> None:
        machine, channel = self.machine, self._channel
        await self._prepared.wait()
        await self._send_tensor()
        if machine.offerer:
            await self._received.wait()
            with deadline(self._paced.settle(self._size), "the partner's confirmation", StalledError):
                await self._confirmed.wait()
            await self.decision.wait()
            await channel.send_envelope(machine.commit())
            with deadline(self._limits.acknowledge_seconds, "the partner's acknowledgement"):
                await self._settled.wait()
        else:
            await self._inspected.wait()
            if not machine.over:  # or our Abort is on its way
                await self._or_abort(self._vote)
                await channel.send_envelope(machine.confirm())
            with deadline(self._paced.settle(self._size), "the partner's commitment", StalledError):
                await self._settled.wait()
            await channel.send_envelope(machine.acknowledge())

    async def _send_tensor(self) -> None:
        machine, description, outbox = self.machine, self._description, self._local_side.outbox
        if description is None:
            raise AssertionError("sending before the snapshot")
        if (envelope := machine.describe(description)) is not None:
            await self._channel.send_envelope(envelope)
        while (index := machine.next_chunk) is not None:
            if not machine.may_send:
                self._came = trio.Event()
                await self._came.wait()
                continue
            start, length = description.span(index)
            machine.sending(length)
            with outbox.view(start, length) as content:
                await self._channel.send_chunk(index, content, self._pace.move)
            outbox.release(start, length)

    async def _receive(self) -> None:
        machine, channel = self.machine, self._channel
        while True:
            frame = await channel.receive(machine.most)
            if isinstance(frame, bytes):
                await self._taken(machine.receive(frame))
            else:
                start, length = machine.expect(frame)
                with self._local_side.inbox.place(start, length) as place:
                    await channel.read_into(place, self._pace.move)
                    machine.chunk(place)
                self._local_side.inbox.release(start, length)
                self._came.set()
            if machine.state is State.RECEIVED:
                self._received.set()

    async def _taken(self, name: str) -> None:
        """Follow a message that the machine took."""
        match name:
            case "describe":
                self._pace.described.set()
            case "abort":
                raise errors.RefusedError(f"the partner aborted ({self.machine.verdict[0]}): {self.machine.verdict[1]}")
            case "resume":
                raise errors.ProtocolError("a Resume came on a stream that is not broken.")
            case "confirm":
                self._confirmed.set()
            case "commit":
                await self._keep_receipt()
                self._settled.set()
            case "acknowledge":
                self._settled.set()

    async def _keep_receipt(self) -> None:
        """The answerer's copy. The decision stands already: a full disk is told, and changes nothing."""
        with trio.CancelScope(shield=True):
            try:
                await self._aside(self._receipts.add, self.machine.signed())
            except errors.LocalError as error:
                self._note(error)

    # --- after a broken stream ----------------------------------------------------------------------

    async def hand_over(self, channel: Channel, body: pb.Body) -> None:
        """The offerer came again on `channel` with the Resume in `body`: the answerer goes on there.

        Returns when this session needs the channel no more.
        """
        if self._redialled is not None:
            await self._redialled[0].reset()
        self._redialled = channel, body
        self._redial.set()
        self._talk_scope.cancel()  # the old stream may look alive from here
        await self._over.wait()

    def partner_is_free(self) -> None:
        """It wants another exchange: an offerer that we wait for here comes to this one no more."""
        if not (self._up or self.machine.offerer):
            self._redial.set()

    async def answer_doubt(self) -> bytes | None:
        """The answerer asks what the offerer decided: Commit, or Abort, and then it never commits.

        None if this exchange is aborted already. Raises PeerTooSlowError while the decision is being
        written: the answerer asks again.
        """
        machine = self.machine
        if machine.state in _DECIDING:
            with trio.move_on_after(self._limits.doubt_seconds / 2):
                await self.decision.wait()
        if machine.state in _DECIDED:
            return machine.commit()
        if machine.state is State.STORING:
            raise errors.PeerTooSlowError("the receipt is still being written.")
        if not machine.may_abort:
            return None
        envelope = machine.abort(errors.PeerUnavailableError.entry.code, "the stream broke before the decision")
        self._scope.cancel()
        return envelope

    async def _reconnect(self, error: errors.RemoteError) -> bool:
        """Have a new stream in place of the broken one; False if there is none, or none is needed."""
        self._up = False
        state = self.machine.state
        await self._channel.reset()
        if self.machine.over or state is State.DECIDED:
            return False  # an answerer that lost the Commit asks for it
        if state in _DECIDING:
            await self.decision.wait()
            return False
        if self.machine.offerer:
            self._up = await self._redial_partner()
            return self._up
        patience = self._limits.redial_seconds if state is State.IN_DOUBT else self._limits.resume(self._size)
        with trio.move_on_after(patience):
            await self._redial.wait()
        if self._redialled is None:
            return False
        self._channel, body = self._redialled
        self._redialled, self._redial, self._up = None, trio.Event(), True
        self.machine.take_first(body)
        with suppress(errors.PeerUnavailableError, errors.PeerTooSlowError):  # broken again: the next talk finds out
            await self._channel.send_envelope(self.machine.resume())
        return True

    async def _redial_partner(self) -> bool:
        with trio.move_on_after(self._limits.resume(self._size)):
            for pause in redial_pauses():
                try:
                    return await self._exchange_resumes() == "resume"
                except (errors.PeerUnavailableError, errors.PeerTooSlowError):
                    await self._channel.reset()
                    await trio.sleep(pause)
        return False

    async def _exchange_resumes(self) -> str:
        """Dial, say what we have, and return the name of the answer."""
        with deadline(self._limits.dial_seconds, "the dial"):
            self._channel = Channel(await self._dial(self.machine.partner, EXCHANGE), self._limits)
        await self._channel.send_envelope(self.machine.resume())
        with deadline(self._limits.accept_seconds, "the answer to Resume"):
            while (name := self.machine.receive(await self._channel.receive_envelope(self.machine.most))) == "working":
                pass
        return name

    async def _ask_until_told(self) -> None:
        """The answerer in doubt asks the offerer, for a bounded time."""
        with trio.move_on_after(self._limits.doubt_seconds):
            for pause in redial_pauses():
                try:
                    if await self._exchange_resumes() == "commit":
                        await self._keep_receipt()
                        await self._channel.send_envelope(self.machine.acknowledge())
                except errors.RemoteError:
                    await self._channel.reset()
                else:
                    await self._channel.close()
                if self.machine.state is not State.IN_DOUBT:
                    return
                await trio.sleep(pause)
