"""Doubts: votes of this node, as an answerer, of which it does not know what the offerer decided.

The rule: a doubt is asked about beside all else, by a task of its own: as soon as the partner is heard of again, and
now and then besides; those that an earlier process left on the disk too. What the partner applied is not applied here
any more, the snapshot has gone; but both hold the receipt then, and the doubt is over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import trio

from nolocod.errors import LocalError, RemoteError
from nolocod.observe.events import DoubtSettled, Troubled
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue
from nolocod.proto.limits import most_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.exchange.receipts import ReceiptStore
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.receipt import Receipt

AFTERWARDS = 1 << 32
"""Numbers what is said about a session whose own count is gone; above any count."""
_AGAIN = 60.0
"""Seconds between two looks at doubts whose partners are not heard of."""


class Doubts:
    """One per node. `run` once. `under_way` says whether an exchange still is, and will settle its vote itself."""

    def __init__(
        self, context: Context, dial: Dial, receipts: ReceiptStore, emit: Emit, under_way: Callable[[PeerId, bytes], bool]
    ) -> None:
        self._context = context
        self._dial = dial
        self._receipts = receipts
        self._emit = emit
        self._under_way = under_way
        self._news = trio.Event()

    def open(self) -> list[Receipt]:
        """The votes whose outcome is to be asked for."""
        return [vote for vote in self._receipts.doubts() if not self._under_way(vote.offerer, vote.session)]

    def heard(self, partner: PeerId) -> None:
        """`partner` is there: what it is to be asked is asked now."""
        if any(vote.offerer == partner for vote in self.open()):
            self._news.set()

    async def run(self) -> NoReturn:
        """Settle doubts, all at once."""
        while True:
            self._news = trio.Event()
            async with trio.open_nursery() as nursery:
                for vote in self.open():
                    nursery.start_soon(self._settle, vote)
            with trio.move_on_after(_AGAIN if self.open() else math.inf):
                await self._news.wait()

    async def _settle(self, vote: Receipt) -> None:
        try:
            with deadline(self._context.limits.doubt_seconds, "the answer about an exchange in doubt"):
                answer = await self._ask(vote)
            committed = answer.WhichOneof("content") == "commit"
            if committed:
                await self._context.aside(self._receipts.add, vote.committed(answer.commit))
            else:
                await self._context.aside(self._receipts.settle, vote.session)
        except RemoteError:
            return  # none the wiser; it is asked again
        except LocalError as error:
            self._emit(Troubled(error.code, error.cause))
        else:
            self._emit(DoubtSettled(vote.offerer, vote.session.hex(), committed))

    async def _ask(self, vote: Receipt) -> pb.Body:
        """Commit or Abort, as the offerer says."""
        context = self._context
        dialogue = Dialogue(context.identity, context.run_id, vote.offerer, vote.session, AFTERWARDS)
        channel = Channel(await self._dial(vote.offerer, EXCHANGE), context.limits)
        try:
            await channel.send_envelope(dialogue.seal(pb.Body(resume=pb.Resume(confirmed=True, described=True))))
            while True:
                body = dialogue.open(await channel.receive_envelope(lambda: most_bytes(["commit", "abort"])))
                if body.WhichOneof("content") in ("commit", "abort"):
                    return body
        finally:
            await channel.reset()
