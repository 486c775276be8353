"""One trainer process's session: rounds driven, checkpoints written, rest taken.

Training ends in one of four ways: told to stop, the run's goal reached, paused for the node's owner (schedule.py), or so far
behind the others that it must fetch weights afresh instead of dragging them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import trio

from nolocod.disk import rest_after
from nolocod.errors import DiskFullError
from nolocod.identity import PeerId
from nolocod.node.schedule import cancel_after
from nolocod.node.weights import Weights
from nolocod.observe.events import Emit, Event, InnerSteps, OuterStep, StateChanged, Troubled
from nolocod.outer.loop import LoopSettings, OuterLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nolocod.node.peers import Peers
    from nolocod.node.schedule import PausePolicy
    from nolocod.node.weights import SessionSettings
    from nolocod.trainer.process import TrainerProcess

_BEHIND_SECONDS = 5.0
"""Between two looks at how far the others are."""
_GIVE_UP_SECONDS = 1.0
"""For an exchange that is given up to let go of the trainer."""
NO_TIME = "nothing more: there was no time for a checkpoint, the last one counts"
"""What a stopping node tells."""

Reason = Literal["stopped", "finished", "behind", "paused"]


class TrainingSession:
    """`weights.standing` and `state` are what heartbeats say about this node."""

    def __init__(
        self, settings: SessionSettings, trainer: TrainerProcess, peers: Peers, pause_policy: PausePolicy, emit: Emit
    ) -> None:
        manifest, own = settings.manifest, PeerId(settings.setup.peer_id)
        inner, outer = manifest.inner, manifest.outer
        pace = LoopSettings(inner.steps, outer.staleness, outer.patience, settings.goal, inner.tokens_per_step, outer.turns)
        self.state: Literal["joining", "training", "finished"] = "joining"
        self.weights = Weights(settings, trainer, peers, emit)
        self.loop = OuterLoop(own, trainer, peers, pace, emit, peers.probation)
        self._settings = settings
        self._trainer = trainer
        self._peers = peers
        self._pause_policy = pause_policy
        self._emit = emit
        self.trainer_may_end = False
        """This pause has left all in a checkpoint, from which another trainer goes on."""
        self._saved_at, self._rest = trio.current_time(), rest_after(0, 0.0)
        self._stepped = trio.Event()
        self._began = trio.Event()

    def follow(self, event: Event) -> None:
        self.loop.follow(event)
        self.weights.follow(event)
        if isinstance(event, OuterStep):
            self._stepped.set()
        elif isinstance(event, InnerSteps):
            self._began.set()

    async def refresh(self) -> None:
        """Take a donor's weights in place of our own, which are too old to be anybody's partner's."""
        self.state = "joining"
        await self._checkpoint()  # what donors give may be refused, and ours are then loaded again
        await self.weights.refresh()

    async def train(self, stop: trio.Event) -> Reason:
        """Train until told to stop, finished, paused or behind; a last checkpoint is written, if behind then by `refresh`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._trainer.wait_dead)
            nursery.start_soon(self._keep_checkpoints)
            nursery.start_soon(self._evaluate_first)
            await self._trainer.train()
            self.state = "training"
            self._emit(StateChanged("training"))
            reason = await self._until_one_ends(stop)
            nursery.cancel_scope.cancel()
        await self._trainer.pause()
        if reason in ("behind", "paused") and stop.is_set():
            reason = "stopped"  # told to while the exchange under way came to its end
            self._emit(StateChanged("stopping", "the checkpoint"))
        if reason == "finished":
            self.state = "finished"
            self._emit(StateChanged("finished", "peers that still fetch our weights"))
            await self._trainer.evaluate()
        if reason == "paused":
            saved = await self._checkpoint(last=self._trainer.can_end)
            self.trainer_may_end = saved and self._trainer.can_end
        elif reason != "behind":
            try:
                await self._trainer.checkpoint()
            except trio.Cancelled:
                self._emit(StateChanged("stopping", NO_TIME))
                raise
        return reason

    async def rest(self, stop: trio.Event) -> bool:
        """Wait until nothing speaks against training; False if told to stop before. TrainerError if the trainer dies."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._trainer.wait_dead)
            rested = await self._pause_policy.rest(stop)
            nursery.cancel_scope.cancel()
        return rested

    async def unless_paused(self, work: Callable[[], Awaitable[object]]) -> bool:
        """Do what takes long while memory is held; False if a pause came, where the trainer may be ended in the midst of it."""
        async with trio.open_nursery() as nursery:
            if self._trainer.can_end:
                nursery.start_soon(cancel_after, self._pause_policy.wait_paused, nursery.cancel_scope)
            await work()
            nursery.cancel_scope.cancel()
            return True
        return False

    async def _evaluate_first(self) -> None:
        """Measure where this node starts from, right after its first inner step: nobody waits for a figure."""
        if not self._began.is_set():
            await self._began.wait()
            await self._trainer.evaluate()

    async def _until_one_ends(self, stop: trio.Event) -> Reason:
        """Drive rounds; return what ended them first, after the exchange under way."""
        ended: list[Reason] = []
        one_ended = trio.Event()

        async def watch(wait: Callable[[], Awaitable[None]], reason: Reason) -> None:
            await wait()
            ended.append(reason)
            one_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, self.loop.run, "finished")
            nursery.start_soon(watch, stop.wait, "stopped")
            nursery.start_soon(watch, self._fall_behind, "behind")
            nursery.start_soon(watch, self._pause_policy.wait_paused, "paused")
            await one_ended.wait()
            if ended[0] == "stopped":  # of the others none stops: a supervisor that hears it soon ends the process
                self._emit(StateChanged("stopping", "the exchange and the inner step under way"))
            if ended[0] == "paused":
                with trio.CancelScope() as patience:
                    nursery.start_soon(cancel_after, stop.wait, patience)
                    nursery.start_soon(cancel_after, self._pause_policy.wait_urgent, patience)
                    await self.loop.close(self._peers.patience)  # it is work done, and nobody is in a hurry
            await self.loop.close(self._settings.grace)
            nursery.cancel_scope.cancel()
        if ended[0] == "paused":
            self._peers.stop_answering()
            await self.loop.close(_GIVE_UP_SECONDS)
        return ended[0]

    async def _fall_behind(self) -> None:
        """Return when we are behind, at most once in a while."""
        while not (self.weights.is_behind() and trio.current_time() > self.weights.fetch_again_at):  # noqa: ASYNC110 - nobody tells
            await trio.sleep(_BEHIND_SECONDS)
        self._emit(StateChanged("fetching", "newer weights: this node is too far behind"))

    async def _keep_checkpoints(self) -> None:
        """Checkpoint after an outer step, once enough time has passed since the last one."""
        while True:
            await self._stepped.wait()
            self._stepped = trio.Event()
            every = self._settings.checkpoint_every
            if trio.current_time() - self._saved_at >= (self._rest if every is None else every):
                await self._checkpoint()

    async def _checkpoint(self, *, last: bool = False) -> bool:
        """One without which this node can go on; whether it was written."""
        try:
            saved = await self._trainer.checkpoint(last=last)
        except DiskFullError as error:
            self._emit(Troubled(error.code, f"{error.cause} The next outer step tries again."))
            return False
        self._saved_at, self._rest = trio.current_time(), rest_after(saved.size, saved.seconds)
        return True
