"""The trainer's own process: takes inner steps, and between two of them does what it is told.

The rule: this process never waits for the network, and training waits for an exchange only while theta is
copied or merged: the rest is done in a thread beside it (torch lets go of the interpreter while it computes).
It ends by itself when its parent is gone, leaves Ctrl-C to the parent, and tells of its own failures in the
catalogue's codes.
Started as `python -m nolocod.trainer.worker SOCKET MEMORY` with two inherited descriptors.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nolocod.errors import LocalError, ModelTooLargeError, NolocodError, TrainerError
from nolocod.run.manifest import unseal
from nolocod.trainer import pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from torch import Tensor

    from nolocod.proto.types import Applied, Inspection
    from nolocod.trainer.replica import Replica

R = TypeVar("R")
T = TypeVar("T")

_REPORT_SECONDS = 0.5


class Link:
    """The child's end of the pipe: blocking, and polled between steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unframer: pipe.Unframer[pipe.Request] = pipe.Unframer(pipe.Request)
        self._waiting: list[pipe.Request] = []
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, timeout: float | None) -> pipe.Request | None:
        """The next request, waiting at most `timeout` seconds (None: for ever); EOFError if the parent is gone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left is None else math.ceil(left * 1000)):
                return None
            data = self._connection.recv(1 << 16)
            if not data:
                raise EOFError
            self._waiting += self._unframer.feed(data)
        return self._waiting.pop(0)

    def send(self, reply: pipe.Reply) -> None:
        """EOFError if the parent is gone."""
        try:
            self._connection.sendall(pipe.frame(reply))
        except ConnectionError as error:
            raise EOFError from error


class Aside:
    """A command's work in a thread, and what is to follow between two inner steps."""

    def __init__(self, future: Future[Any], end: Callable[[Any], pipe.Result]) -> None:
        self._future = future
        self._end = end

    @property
    def done(self) -> bool:
        return self._future.done()

    def end(self) -> pipe.Result:
        """Wait for the thread; raises what it raised."""
        return self._end(self._future.result())


class Worker:
    """Serves one parent."""

    def __init__(self, link: Link, memory: int) -> None:
        self._link = link
        self._memory = memory
        self._boxes: tuple[Tensor, Tensor] | None = None
        self._replica: Replica | None = None
        self._setup: pipe.Setup | None = None
        self._training = False
        self._first = False  # the next inner step is the first after Train: told at once
        self._held_since: float | None = None  # when a blocking run began to wait at the boundary
        self._reported = time.perf_counter()
        self._reported_steps = 0
        self._computing = 0.0
        self._evaluated_round = 0
        self._spread: float | None = None
        self._helper = ThreadPoolExecutor(1, initializer=_one_thread)
        self._aside: Aside | None = None
        self._aside_id = 0

    def run(self) -> None:
        """Serve until the parent says stop or is gone."""
        while True:
            patience = self._patience()
            if self._aside is not None and (patience != 0 or self._aside.done):
                self._answer_aside()
                continue
            request = self._link.receive(patience)
            if request is None:
                with _memory_errors():
                    self._train()
                continue
            if self._aside is not None:
                self._answer_aside()  # whoever asked for it waits no more, or would not ask for more
            if isinstance(request.command, pipe.Stop):
                return
            result = self._execute(request.command)
            if isinstance(result, Aside):
                self._aside, self._aside_id = result, request.id
            else:
                self._answer(request.id, result)

    def _answer(self, number: int, result: pipe.Result) -> None:
        self._link.send(pipe.Answer(number, result, self._progress()))
        if self._held_since is not None:
            self._held_since = time.monotonic()  # an exchange is under way: the wait begins anew
        self._evaluate_if_due()

    def _answer_aside(self) -> None:
        """Wait for the job beside training, and answer with what came of it."""
        job, self._aside = self._aside, None
        assert job is not None  # asked for only when there is one
        self._answer(self._aside_id, _told(job.end))

    def _patience(self) -> float | None:
        """How long to wait for a command before the next inner step; None for ever."""
        replica = self._replica
        if replica is None or not self._training:
            return None
        settings = replica.manifest
        waits = replica.capture_is_out or replica.steps_since_outer >= settings.inner.steps
        if not (settings.outer.blocking and waits):
            self._held_since = None
            return 0.0
        if self._held_since is None:
            self._held_since = time.monotonic()
        return max(0.0, self._held_since + settings.outer.patience - time.monotonic())

    def _train(self) -> None:
        replica = self._loaded()
        began = time.perf_counter()
        replica.step()
        now = time.perf_counter()
        self._computing += now - began
        self._reported_steps += 1
        phase = replica.manifest.inner.steps
        marks = (phase, math.ceil(phase / 2))  # rounds waits for exactly these
        if self._first or now - self._reported >= _REPORT_SECONDS or replica.steps_since_outer in marks:
            self._first = False
            self._report(now)

    def _report(self, now: float) -> None:
        replica = self._loaded()
        if not self._reported_steps:
            return
        loss = replica.report()
        tokens = self._reported_steps * replica.manifest.inner.tokens_per_step
        progress = self._progress()
        assert progress is not None  # a replica is loaded
        self._link.send(pipe.Trained(self._reported_steps, tokens, loss, replica.rate, self._computing, progress))
        self._reported, self._reported_steps, self._computing = now, 0, 0.0

    def _progress(self) -> pipe.Progress | None:
        replica = self._replica
        if replica is None:
            return None
        return pipe.Progress(replica.standing, replica.inner_steps, tuple(replica.ages), replica.dense_due())

    def _loaded(self) -> Replica:
        if self._replica is None:
            raise TrainerError("no model is loaded.")
        return self._replica

    # --- commands

    def _execute(self, command: pipe.Command) -> pipe.Result | Aside:
        return _told(lambda: self._dispatch(command))

    def _dispatch(self, command: pipe.Command) -> pipe.Result | Aside:
        if isinstance(command, pipe.Setup):
            return self._load(command)
        replica = self._loaded()
        assert self._boxes is not None  # mapped when the replica was loaded
        outbox, inbox = self._boxes
        match command:
            case pipe.Adopt(weights, standing):
                replica.adopt(weights, standing)
                self._evaluated_round = standing.round
            case pipe.Compare(samples):
                return pipe.Compared(replica.compare(samples))
            case pipe.Train():
                self._training = self._first = True
                self._reported = time.perf_counter()
            case pipe.Pause():
                self._training = False
                self._report(time.perf_counter())
            case pipe.Capture(subject):
                self._spread = None
                replica.capture(subject)
                return self._beside(replica.plan.writes_aside, lambda: replica.write(outbox), pipe.Described)
            case pipe.Inspect(probation):
                return self._beside(
                    replica.plan.steps_aside, lambda: replica.inspect(outbox, inbox, probation=probation), self._inspected
                )
            case pipe.Apply(partner_round, skipped):
                began = time.perf_counter()

                def merge(_: None) -> pipe.Result:
                    return pipe.Stepped(self._with_spread(replica.merge(outbox, partner_round, began)))

                return self._beside(replica.plan.steps_aside, lambda: replica.take_step(outbox, inbox, skipped), merge)
            case pipe.Solo():
                return pipe.Stepped(replica.solo())
            case pipe.Discard():
                replica.discard()
            case pipe.Checkpoint():
                return self._checkpoint()
            case pipe.Dump(path):
                return pipe.Dumped(replica.standing, replica.dump(path))
            case pipe.Evaluate(told):
                return pipe.Loss(self._evaluate() if told else replica.evaluate())
        return pipe.Done()

    def _beside(self, possible: bool, job: Callable[[], T], end: Callable[[T], pipe.Result]) -> pipe.Result | Aside:
        """Do `job` in a thread while training goes on, and then `end` between two inner steps; both at once if
        it is not `possible`, or training does not go on."""
        if not (possible and self._patience() == 0):
            return end(job())
        return Aside(self._helper.submit(job), end)

    def _inspected(self, inspection: Inspection) -> pipe.Result:
        self._spread = inspection.spread
        return pipe.Inspected(inspection)

    def _with_spread(self, applied: Applied) -> Applied:
        return dataclasses.replace(applied, spread=self._spread)

    def _load(self, setup: pipe.Setup) -> pipe.Loaded:
        import torch

        from nolocod.trainer import checkpoint
        from nolocod.trainer.data import make_tokenizer
        from nolocod.trainer.replica import Replica
        from nolocod.trainer.source import open_source

        # A second load in the same process must not hold two models in memory.
        self._replica, self._boxes, self._training = None, None, False
        if setup.threads:
            torch.set_num_threads(setup.threads)
        sealed = unseal(setup.manifest)
        manifest = sealed.manifest
        tokenizer = make_tokenizer(manifest.data)
        source = open_source(manifest, tokenizer, setup.peer_id, setup.data, setup.cache)
        replica = Replica(sealed, tokenizer.vocabulary, source, setup.device)
        replica.draw_as(setup.peer_id)
        found = checkpoint.find(setup.checkpoints, sealed.run_id)
        came_from: Literal["seed", "checkpoint"] = "seed"
        if found.path is not None and found.state is not None:
            replica.restore(found.path, found.state)
            came_from = "checkpoint"
        plan = replica.plan
        memory = _map(self._memory, plan.boxes_size)
        self._boxes = (memory[plan.outbox_offset :], memory[: plan.box_size])
        self._replica, self._setup = replica, setup
        self._evaluated_round = replica.standing.round
        return pipe.Loaded(
            standing=replica.standing,
            parameters=replica.layout.size,
            box_size=plan.box_size,
            source=came_from,
            outbox_offset=plan.outbox_offset,
            trouble=found.trouble,
            phase=manifest.inner.steps,
        )

    def _checkpoint(self) -> pipe.Saved:
        replica, setup = self._loaded(), self._setup
        assert setup is not None  # set together with the replica
        began = time.perf_counter()
        size = replica.save(setup.checkpoints, setup.peer_id)
        return pipe.Saved(replica.standing.round, size, time.perf_counter() - began)

    def _evaluate_if_due(self) -> None:
        replica = self._replica
        if replica and replica.standing.round >= self._evaluated_round + replica.manifest.evaluation.every:
            self._evaluate()

    def _evaluate(self) -> float:
        replica = self._loaded()
        began = time.perf_counter()
        loss = replica.evaluate()
        self._evaluated_round = replica.standing.round
        self._link.send(pipe.EvaluatedReport(replica.standing.round, loss, time.perf_counter() - began))
        return loss


def _told(work: Callable[[], R]) -> R | pipe.Failed:
    """What `work` returns, or what it failed of."""
    try:
        with _memory_errors():
            return work()
    except NolocodError as error:
        return _failed(error)


def _one_thread() -> None:
    """What is done beside training takes one core, and leaves the others to it."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def _memory_errors() -> Iterator[None]:
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        first = str(error).splitlines()[0] if str(error) else "MemoryError"
        raise ModelTooLargeError(f"memory ran out ({first}).") from error


def _map(descriptor: int, size: int) -> Tensor:
    import torch

    os.ftruncate(descriptor, size)
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _failed(error: NolocodError) -> pipe.Failed:
    return pipe.Failed(error.code, error.cause, error.remedy)


def _import_heavy() -> None:
    """Import what every run needs, while the parent still looks for a manifest."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"(torch|transformers|datasets)\b")
    logging.getLogger("torch").setLevel(logging.ERROR)
    from nolocod.trainer import replica  # noqa: F401 - the import is the point


def main() -> None:
    """The child's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control, memory = (int(text) for text in sys.argv[1:])
    link = Link(socket.socket(fileno=control))
    _import_heavy()
    status = 0
    try:
        Worker(link, memory).run()
    except EOFError:
        pass  # the parent is gone, and so is the reason to be
    except LocalError as error:
        link.send(pipe.Answer(0, _failed(error), None))
        status = 1
    sys.stderr.flush()
    os._exit(status)  # every file is synced when its command is answered; taking torch down takes a second


if __name__ == "__main__":
    main()
