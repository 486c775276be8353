"""The trainer's own process: takes inner steps, and between two of them does what it is told.

The rule: this process never waits for the network, and training waits for an exchange only while theta is copied or merged, as
an exchange waits for the end of an inner step: all else is done in threads beside it (torch lets go of the interpreter while it
computes), which answer themselves and begin as soon as they are told to. It ends by itself when its parent is gone, leaves
Ctrl-C to it, and tells of failures in the catalogue's codes. Started as `python -m nolocod.trainer.worker SOCKET MEMORY`.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING

from nolocod.errors import LocalError, NolocodError, TrainerError
from nolocod.observe.events import Evaluated, InnerSteps, MicroBatch, SamplesRead
from nolocod.outer.phase import is_part
from nolocod.run.amendments import unseal_amended
from nolocod.trainer import pipe
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.duty import Duty
from nolocod.trainer.requests import Requests
from nolocod.trainer.settled import importing, keep_to_one_thread, memory_errors, quiet, settle_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch import Tensor

    from nolocod.observe.events import TextSupply
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.checkpoint import Found
    from nolocod.trainer.files import Files
    from nolocod.trainer.replica import Replica
    from nolocod.trainer.taken import Taken

_LATER = object()
"""The result of a command that will be answered later."""
_REPORT_SECONDS = 0.5
_FADES = 0.9
"""Of the longest inner step's time, with each shorter one."""
_SHORT = 0.02
"""Of an inner step: training waits so long for an outer step's arithmetic, that its merge need not wait for one more step."""


class Worker:
    """Serves one parent."""

    def __init__(self, parent: ChildEnd, memory: int) -> None:
        self._parent = parent
        self._memory = memory
        self._boxes: tuple[Tensor, Tensor] | None = None
        self._replica: Replica | None = None
        self._files: Files | None = None
        self._training = self._memory_told = self._first = False  # first: the next inner step is, after Train: told at once
        self._reported = time.perf_counter()
        self._reported_steps = self._evaluated_round = self._at_once = 0  # at_once: windows of the micro-batch that was told
        self._computing = self._step_seconds = 0.0
        self._duty = Duty()
        self._taken: Taken | None = None
        self._thread = ThreadPoolExecutor(1, initializer=keep_to_one_thread)
        self._requests = Requests()
        self._work: Future[object] | None = None  # the last that was given to the thread ...
        self._end: Callable[[], None] | None = None  # ... and what follows it between two inner steps
        self._held: dict[str, float] = {}  # seconds for which training stood still, or a step took, by what it was for
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> None:
        """Serve and train until the parent says stop. EOFError or ConnectionError once it is gone."""
        while self.serve(wait=lambda: not self._training):
            with memory_errors():
                self._train()

    def serve(self, wait: Callable[[], bool], until: Callable[[], bool] = lambda: False) -> bool:
        """Between two inner steps: do what the parent asked for, and what it asks for as long as it is to `wait`, `until` then.

        False once it says stop. EOFError or ConnectionError if it is gone.
        """
        while not until():
            if (self._work is not None and self._work.done()) or (self._end is not None and wait()):  # a wait is not broken off
                self._settle()
            self._write_files()
            try:
                request = self._requests.next() if wait() else self._requests.next(self._duty.slice, self._steps)
            except Empty:
                if self._duty.left:
                    continue
                return True
            if request is not None and isinstance(request.command, pipe.Checkpoint | pipe.Dump):
                self._execute(request)  # it is written when its turn comes
                continue
            self._settle()  # whoever asked for it waits no more, or would not ask for more
            if request is None:
                raise EOFError
            if isinstance(request.command, pipe.Stop):
                return False
            self._do(request)
        return True

    def _do(self, request: pipe.Request) -> None:
        began = time.perf_counter()
        result = _told(self._execute, request)
        if self._training:
            self._held[type(request.command).__name__] = time.perf_counter() - began
        if result is not _LATER:
            self._answer(request.id, result)

    def close(self) -> None:
        """End what runs beside this process: nothing follows."""
        if self._replica is not None:
            self._replica.close()

    def _listen(self) -> None:
        """Take in what the parent says, in a thread: a partner's message is looked at while an inner step is under way."""
        with suppress(EOFError, ConnectionError):
            while True:
                request = self._parent.receive()
                if isinstance(request.command, pipe.Inspect) and self._training and self._end is None:
                    self._beside(request, partial(self._execute, request))
                    continue
                if isinstance(request.command, pipe.Capture) and self._training:
                    self._loaded().weights.look_ahead(self._loaded().plan, request.command.subject)
                if isinstance(request.command, pipe.Checkpoint | pipe.Dump):
                    self._tell(request.id, None)  # now: a capture that is asked for next would miss the end of this inner step
                self._requests.put(request)
        self._requests.put(None)

    def _tell(self, number: int, result: object) -> None:
        self._parent.send(lambda: pipe.answer(number, result, self._progress() if self._replica else None))

    def _answer(self, number: int, result: object) -> None:
        self._tell(number, result)
        replica = self._replica
        if replica and replica.standing.round >= self._evaluated_round + replica.manifest.evaluation.every:
            self._evaluate()

    def _beside(self, request: pipe.Request, job: Callable[[], object]) -> object:
        """Have the thread do `job`, which leaves phi, delta and theta as they are, and answer."""
        self._work = self._thread.submit(lambda: self._tell(request.id, _told(job)))
        return _LATER

    def _settle(self) -> None:
        """Wait for the work beside training, and do what follows it. Raises what nobody expected: this process ends of it."""
        if self._work is not None:
            self._work.result()
        end, self._end = self._end, None
        if end is not None:
            end()

    def _write_files(self) -> None:
        """Write what is asked for: beside training if there is any, and when no outer step is under way."""
        if self._files is None or not self._files.is_asked:
            return
        if not self._training:
            self._settle()
            self._files.write_all()
        elif self._end is None and (self._work is None or self._work.done()):
            began = time.perf_counter()
            self._files.begin()
            self._held["file"] = time.perf_counter() - began

    def _train(self) -> None:
        self._stepped(self._duty.step(self._loaded()))

    def _stepped(self, seconds: float) -> None:
        """An inner step was taken, in so many seconds: tell of it, if it is due."""
        replica, now = self._loaded(), time.perf_counter()
        self._step_seconds = seconds
        self._held["step"] = max(self._step_seconds, _FADES * self._held.get("step", 0.0))
        self._computing += seconds + self._duty.rest  # by these the others learn how fast this node is
        self._reported_steps += 1
        if self._first or now - self._reported >= _REPORT_SECONDS:
            self._first = False
            self._report(now)
        elif is_part(replica.steps_since_outer + 1, replica.manifest.inner.steps):  # in the next one a phase may end
            self._parent.send(lambda: pipe.Trained(None, self._progress()))  # the outer loop waits for exactly these

    def _report(self, now: float) -> None:
        replica = self._loaded()
        if not self._reported_steps:
            return
        if replica.inner.at_once < self._at_once:
            self._tell_micro_batch()
        loss = replica.report()
        assert self._taken is not None
        taken = self._taken.waited(), self._taken.mfu(self._reported_steps * replica.times, self._computing)
        told = self._reported_steps, self._reported_steps * replica.tokens_per_step, loss, replica.rate, self._computing
        self._parent.send(lambda: pipe.Trained(InnerSteps(*told, *taken), self._progress()))
        if not self._memory_told:
            self._tell_memory()
        self._reported, self._reported_steps, self._computing = now, 0, 0.0

    def _tell_memory(self) -> None:
        assert self._taken is not None
        event, self._memory_told = self._taken.memory(), True
        if event is not None:
            self._parent.send(lambda: pipe.Taken(event))

    def _tell_micro_batch(self) -> None:
        inner = self._loaded().manifest.inner
        at_once = self._at_once = self._loaded().inner.at_once
        self._parent.send(lambda: pipe.Fitted(MicroBatch(at_once, inner.batch * inner.accumulation)))

    def _progress(self) -> pipe.Progress:
        replica, held = self._loaded(), max(self._held.values(), default=0.0)
        return pipe.Progress(replace(replica.standing, step_seconds=held), replica.inner_steps, tuple(replica.ages))

    @property
    def _steps(self) -> int | None:
        return self._replica.steps_since_outer if self._replica is not None else None

    def _loaded(self) -> Replica:
        if self._replica is None:
            raise TrainerError("no model is loaded.")
        return self._replica

    # --- commands

    def _execute(self, request: pipe.Request) -> object:
        """The command's result, or _LATER. Raises what went wrong."""
        if isinstance(request.command, pipe.Setup):
            return self._load(request.command)
        if isinstance(request.command, pipe.Download):
            from nolocod.trainer import model_hub

            wanted = request.command
            return str(model_hub.download(wanted.source, wanted.commit, wanted.name, wanted.size))
        replica = self._loaded()
        assert self._boxes is not None and self._files is not None  # noqa: PT018 - both are set with the replica
        outbox, inbox = self._boxes
        match request.command:
            case pipe.Adopt(weights, standing):
                replica.adopt(weights, standing)
                self._evaluated_round = standing.round
            case pipe.Place(standing):
                replica.standing, self._evaluated_round = standing, standing.round
            case pipe.Compare(samples):
                return replica.compare(samples)
            case pipe.Train():
                self._training = self._first = True
                self._reported = time.perf_counter()
            case pipe.Ease(share):
                self._duty.share = share
            case pipe.Enlarge(times):
                self._report(time.perf_counter())
                replica.times = times
            case pipe.Pause():
                self._training = False
                self._report(time.perf_counter())
            case pipe.Capture(subject, _):
                replica.capture(subject)
                if not self._training:
                    return replica.write(outbox)
                replica.train_on()  # first: it takes longer than the first blocks
                return self._beside(request, lambda: replica.write(outbox))
            case pipe.Inspect(probation):
                return replica.inspect(inbox, probation=probation)
            case pipe.Apply(run_round, skipped):
                return self._apply(request, lambda: replica.take_step(inbox, skipped), run_round)
            case pipe.Solo(run_round, subject, _):
                return replica.solo(run_round, subject)
            case pipe.Discard():
                replica.discard()
            case pipe.Checkpoint() | pipe.Dump():
                self._files.ask(request.command)
            case pipe.Evaluate(told):
                return self._evaluate() if told else replica.evaluate()
        return None

    def _apply(self, request: pipe.Request, take_step: Callable[[], None], run_round: int) -> object:
        """Take the outer step beside training, and merge it between two inner steps: now, if it takes no time to speak of."""
        replica, began = self._loaded(), time.perf_counter()
        if not self._training:
            take_step()
            return replica.merge(run_round, began)
        replica.train_on()  # here: it reads what the outer step changes
        work = self._work = self._thread.submit(_told, take_step)

        def end() -> None:
            failed = work.result()
            result = failed if isinstance(failed, pipe.Failed) else _told(replica.merge, run_round, began)
            self._answer(request.id, result)

        self._end = end
        wait((work,), _SHORT * self._step_seconds)
        return _LATER

    def _load(self, setup: pipe.Setup) -> pipe.Loaded:
        import torch

        from nolocod.trainer import files
        from nolocod.trainer.prefetch import Prefetched
        from nolocod.trainer.taken import Taken

        # A second load in the same process must not hold two models in memory.
        if self._files is not None and self._replica is not None:
            self._files.close()
            self._replica.close()
        self._replica, self._boxes, self._files, self._training, self._held = None, None, None, False, {}
        sealed = unseal_amended(setup.manifest, setup.amendments, setup.number)
        replica, found = self._open(setup, sealed)
        replica.clip_change = setup.clip_change
        if isinstance(replica.source, Prefetched):
            replica.source.begin()
        plan = replica.plan
        os.ftruncate(self._memory, plan.boxes_size)
        memory = torch.frombuffer(mmap.mmap(self._memory, plan.boxes_size), dtype=torch.uint8)
        self._boxes = (memory[plan.outbox_offset :], memory[: plan.box_size])
        self._taken, self._memory_told = Taken(replica), False
        self._replica, self._files = replica, files.Files(replica, setup, lambda told: self._parent.send(lambda: told))
        self._evaluated_round, self._at_once = replica.standing.round, sealed.manifest.inner.batch
        if replica.inner.at_once < self._at_once:
            self._tell_micro_batch()
        return pipe.Loaded(
            standing=replica.standing,
            parameters=replica.layout.size,
            snapshot_size=replica.snapshot_size,
            box_size=plan.box_size,
            source="checkpoint" if found.path else "seed",
            outbox_offset=plan.outbox_offset,
            trouble=found.trouble,
            phase=sealed.manifest.inner.steps,
            built=replica.built,
            devices=replica.devices,
            made_on=str(replica.weights.made_on),
        )

    def _open(self, setup: pipe.Setup, sealed: Sealed) -> tuple[Replica, Found]:
        """The run's replica as it goes on, on all its devices, and the checkpoint that it goes on from."""
        from nolocod.trainer.opening import open_shared

        settle_in(setup)

        def tell(event: TextSupply | SamplesRead) -> None:
            self._parent.send(lambda: pipe.Read(event) if isinstance(event, SamplesRead) else pipe.Supplied(event))

        return open_shared(setup, sealed, tell, self._fall)

    def _fall(self, failed: pipe.Failed) -> None:
        """The process of another device is gone: end, in whatever is done here, as no step can be taken any more."""
        with suppress(OSError):
            self._parent.send(lambda: pipe.answer(0, failed, None))
        os._exit(1)

    def _evaluate(self) -> float:
        replica = self._loaded()
        began = time.perf_counter()
        loss = replica.evaluate()
        if self._training:
            self._held["evaluation"] = time.perf_counter() - began
        self._evaluated_round = replica.standing.round
        self._memory_told = False  # the most that ever was may be more now
        self._parent.send(lambda: pipe.EvaluatedReport(Evaluated(replica.standing.round, loss, time.perf_counter() - began)))
        return loss


def _told(work: Callable[..., object], *given: object) -> object:
    """What `work` returns, or what it failed of."""
    try:
        with memory_errors():
            return work(*given)
    except NolocodError as error:
        return pipe.failed(error)


def main() -> None:
    """The child's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control, memory = (int(text) for text in sys.argv[1:])
    parent = ChildEnd(control)
    quiet()
    with importing():
        from nolocod.trainer import opening  # noqa: F401 - what every run needs, while the parent still looks for a manifest

    worker, status = Worker(parent, memory), 0
    try:
        with suppress(EOFError, ConnectionError):  # the parent is gone, and so is the reason to be
            worker.run()
    except LocalError as error:
        failed = pipe.failed(error)
        parent.send(lambda: pipe.answer(0, failed, None))
        status = 1
    worker.close()
    sys.stderr.flush()
    os._exit(status)  # every file is synced when its command is answered; taking torch down takes a second


if __name__ == "__main__":
    main()
