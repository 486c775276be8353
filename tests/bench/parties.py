"""Processes that take part in a measurement, and the lines of JSON by which they are told what to do.

The rule: every answer has a deadline, and no process outlives the block that started it. Where the system allows
it, the parties of one measurement share a loopback device of their own, so that what it carried is theirs alone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.bench import probe
from tests.bench.base import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NETWORK_SECONDS = 5.0


class Party:
    """One process. `tell` sends it a request, `hear` waits for its answer."""

    def __init__(self, command: Sequence[str], stderr: IO[bytes]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._stderr = stderr
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None  # a pipe was asked for
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def tell(self, do: str, **facts: object) -> None:
        assert self.process.stdin is not None  # a pipe was asked for
        try:
            self.process.stdin.write(json.dumps({"do": do, **facts}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next answer; BenchError with the last of what it wrote if there is none."""
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise self._failed(f"said nothing for {seconds:g} s") from None
        if not line:
            raise self._failed("ended")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise self._failed("made no sense")
        if "error" in answer:
            raise BenchError(f"one of the processes failed: {answer['error']}.")
        return answer

    def _failed(self, how: str) -> BenchError:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 1500))
        tail = self._stderr.read().decode(errors="replace").strip()
        return BenchError(f"one of the processes {how}: {tail or 'it wrote nothing about it'}.")

    def end(self) -> None:
        """Kill it and all that it started, and remove the shared memory that torch's processes then leave behind."""
        children = probe.processes(self.pid)[1:]
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for child in children:  # also those with a session of their own
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        self.process.wait()
        for pid in (self.pid, *(child.pid for child in children)):
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
                left.unlink(missing_ok=True)


class Pair:
    """Two parties that talk to each other."""

    def __init__(self, parties: tuple[Party, Party], network: int | None) -> None:
        self.parties = parties
        self.network = network
        """A process in their private network; None if they share the machine's loopback device."""

    def ask(self, do: str, seconds: float, **facts: object) -> list[dict[str, Any]]:
        """Tell both at once, and return both answers."""
        for party in self.parties:
            party.tell(do, **facts)
        deadline = time.monotonic() + seconds
        return [party.hear(max(0.1, deadline - time.monotonic())) for party in self.parties]

    def carried(self) -> int:
        return probe.carried(self.network)


@contextmanager
def pair(commands: Sequence[Sequence[str]]) -> Iterator[Pair]:
    """Start two processes, in a network of their own if the system allows it."""
    with private_network() as network:
        inside = [] if network is None else enter(network)
        with started([[*inside, *command] for command in commands]) as (first, second):
            yield Pair((first, second), network)


@contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[Party]]:
    """Start a process per command; at the end all are killed."""
    with ExitStack() as stack:
        parties = []
        for command in commands:
            stderr = stack.enter_context(tempfile.TemporaryFile())
            parties.append(Party(command, stderr))
            stack.callback(parties[-1].end)
        yield parties


@contextmanager
def private_network() -> Iterator[int | None]:
    """The id of a process in a network with nothing but a loopback device; None where that is not to be had."""
    command = ["unshare", *_own_user(), "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
    try:
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        yield None
        return
    assert holder.stdin is not None  # pipes were asked for
    assert holder.stdout is not None
    try:
        yield holder.pid if holder.stdout.readline() == b"up\n" else None
    finally:
        holder.stdin.close()
        holder.stdout.close()
        try:
            holder.wait(_NETWORK_SECONDS)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()


def enter(network: int) -> list[str]:
    """What to put before a command that is to run in the network of the process `network`."""
    own_user = ["--user", "--preserve-credentials"] if _own_user() else []
    return ["nsenter", *own_user, "--net", "--target", str(network), "--"]


def _own_user() -> list[str]:
    """Only root may make a network without a user namespace of its own."""
    return [] if os.geteuid() == 0 else ["--map-root-user"]


def python(module: str, *arguments: str) -> list[str]:
    """The command line of one of our own modules."""
    return [sys.executable, "-m", module, *arguments]
