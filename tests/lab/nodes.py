"""Real daemons in the lab's networks: started as users start them, read by their status pages, killed with real signals.

The rule: what a scenario says about a node is what the node's own report says, or its receipts, or the system about its
process; nothing reaches into it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nolocod.errors import NotRunningError
from nolocod.identity import load_or_create
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.paths import DataDir
from tests.lab.topology import LabError
from tests.support.swarm import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.observe.status.report import PeerRow, StatusReport
    from nolocod.proto.receipt import Receipt
    from tests.lab.topology import Place

PORT = 4001
"""Of the nodes that others are given as --bootstrap."""
_POLL = 0.1
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>
_RUN_FILE = """
name = "{name}"
codec = "float32"
[model]
model_type = "llama"
hidden_size = {hidden}
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = {feed_forward}
max_position_embeddings = 64
tie_word_embeddings = true
[data]
source = "{source}"
[inner]
optimizer = "adamw"  # as small a model is trained faster by it
steps = {steps}
batch = 1
sequence = 16
[outer]
rounds = {rounds}
patience = 5.0
turns = 1
staleness = 8
[evaluation]
batches = 1
"""


class NotInTimeError(LabError):
    """What a scenario waited for did not come."""


@dataclass(frozen=True)
class Load:
    """What the nodes train: the model's width, inner steps between two exchanges, and how many of these (0: without end)."""

    hidden: int = 32
    steps: int = 100
    rounds: int = 0
    name: str = "lab"
    source: str = "text"

    def to_run_file(self) -> str:
        return _RUN_FILE.format(**asdict(self), feed_forward=2 * self.hidden)


@dataclass(frozen=True)
class Resources:
    """What a node's network process holds: memory in MiB, and counts."""

    memory: float
    threads: int
    files: int
    tasks: int


class Node:
    """One daemon, or its remains."""

    def __init__(self, place: Place, root: Path, data: Path, flags: tuple[str, ...]) -> None:
        self.place = place
        self.paths = DataDir(root)
        self.log = root.with_suffix(".log")
        data_directory.make(self.paths)
        self.peer_id = load_or_create(self.paths.identity).peer_id
        self.process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.data = data
        self._flags = flags
        self._inside = within(place)

    @property
    def name(self) -> str:
        return self.paths.root.name

    def run(self, *arguments: str) -> Node:
        """`nolocod ARGUMENTS` in the background, with this node's directory."""
        line = [sys.executable, "-m", "nolocod", *arguments, "--data-dir", str(self.paths.root), "--data", str(self.data)]
        line += (*BACKGROUND, *self._flags)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.place.command(*line),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                env=environment,
            )
        return self

    @property
    def fell(self) -> bool:
        """Whether it has ended by itself."""
        return self.process is not None and self.process.poll() is not None and not self._killed

    @property
    def report(self) -> StatusReport | None:
        """Its status page, asked for within its own network; None if it does not answer."""
        try:
            return self._inside.submit(client.read, data_directory.find_running(self.paths)).result()
        except NotRunningError:
            return None

    @property
    def bootstrap(self) -> list[str]:
        """The flags that others are given to find it."""
        ways = [f"/ip{'6' if ':' in one else '4'}/{one}/tcp/{PORT}/p2p/{self.peer_id}" for one in self.place.addresses]
        return [part for way in ways for part in ("--bootstrap", way)]

    def over6(self, other: Node) -> bool:
        """Whether the system has an IPv6 connection from this node's host to the other's."""
        lines = self.place.sh("ss -6Htn state established\n").splitlines()
        return any(f"[{address}]:" in line for line in lines for address in other.place.addresses if ":" in address)

    def row(self, other: Node) -> PeerRow | None:
        """What it says about another node."""
        report = self.report
        return next((row for row in report.peers if row.peer_id == other.peer_id), None) if report else None

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`nolocod ARGUMENTS` beside the daemon, to its end."""
        line = [sys.executable, "-m", "nolocod", *arguments, "--data-dir", str(self.paths.root)]
        return subprocess.run(self.place.command(*line), capture_output=True, text=True, timeout=120, check=False)

    def receipts(self, other: Node | None = None) -> set[bytes]:
        """The sessions that this node and its partner both signed, by this node's store; those with `other`, if named."""
        return {one.session for one in self.signed() if other is None or other.peer_id in (one.offerer, one.answerer)}

    def signed(self) -> list[Receipt]:
        """What this node and its partners both signed, oldest first."""
        copy = self.paths.root.with_suffix(".receipts")  # a store that is opened tidies its file, which is the daemon's
        copy.write_bytes(self.paths.receipts.read_bytes() if self.paths.receipts.exists() else b"")
        return [*ReceiptStore(copy).all()]

    def resources(self) -> Resources | None:
        """None if it has ended."""
        report = self.report
        if self.process is None or report is None:
            return None
        try:
            process = psutil.Process(self.process.pid)
            with process.oneshot():
                memory = process.memory_info().rss / 2**20
                return Resources(memory, process.num_threads(), process.num_fds(), report.tasks)
        except psutil.Error:
            return None

    def kill(self) -> None:
        """kill -9, the trainer too."""
        if self.process is None:
            return
        self._killed = True
        family = [self.process.pid]
        with suppress(psutil.Error):
            family += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        for pid in family:
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
                left.unlink(missing_ok=True)

    def end(self) -> None:
        self.kill()
        self._inside.shutdown()

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else ["(no log)"]
        return f"--- {self.name} at {self.place.name}\n" + "\n".join(text[-lines:])


def within(place: Place) -> ThreadPoolExecutor:
    """A thread whose sockets are in the network of `place`."""
    return ThreadPoolExecutor(1, initializer=_move_into, initargs=(place.pid,))


def _move_into(pid: int) -> None:
    """Let this thread's new sockets be in the network of the process `pid`."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(space, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(space)


class Swarm:
    """All daemons of one scenario. Made by `swarm`."""

    def __init__(self, root: Path, load: Load, flags: tuple[str, ...]) -> None:
        self.nodes: list[Node] = []
        self._flags = flags
        self._root = root
        self._made = 0
        self._data = root / "text"
        self._data.mkdir(parents=True)
        words = [f"line {i}: {i * i % 97} {'abcdefgh'[i % 8] * 5}" for i in range(8000)]
        (self._data / "0.txt").write_text("\n".join(words))
        self._run_file = root / "run.toml"
        self._run_file.write_text(load.to_run_file())

    def node(self, place: Place) -> Node:
        node = Node(place, self._root / f"node-{self._made}", self._data, self._flags)
        self._made += 1
        self.nodes.append(node)
        return node

    def found(self, place: Place, *flags: str) -> Node:
        """Found the run, bring up its first node, and wait until others can be given its address."""
        first = self.node(place)
        data_directory.found(first.paths, self._run_file)
        first.run("start", *_listening(place), *flags)
        self.wait("the first node runs", lambda: first.report is not None, 300)
        return first

    def join(self, place: Place, bootstraps: list[Node], *flags: str) -> Node:
        given = [part for node in bootstraps for part in node.bootstrap]
        return self.node(place).run("join", *given, *flags)

    def public(self, place: Place, bootstraps: list[Node], *flags: str) -> Node:
        """A node that others can be given as a bootstrap, once it runs."""
        return self.join(place, bootstraps, *_listening(place), *flags)

    def drop(self, node: Node) -> None:
        """Kill a node that is not needed any more."""
        self.nodes.remove(node)
        node.end()

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> float:
        """Poll until `condition` holds and return after how many seconds.

        LabError with all last lines if it does not, or if a node ends by itself.
        """
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            if condition():
                return spent
            if fallen := [node for node in self.nodes if node.fell]:
                raise LabError("these nodes ended by themselves:\n" + "\n".join(node.tail(40) for node in fallen))
            time.sleep(_POLL)
        raise NotInTimeError(f"not within {seconds:.0f} s: {what}.\n" + "\n".join(node.tail() for node in self.nodes))

    def within(self, condition: Callable[[], bool], seconds: float) -> float | None:
        """As `wait`, but None when it does not come."""
        try:
            return self.wait("", condition, seconds)
        except NotInTimeError:
            return None

    def end(self) -> None:
        for node in self.nodes:
            node.end()


def _listening(place: Place) -> list[str]:
    """The flags of a node that others are given as a bootstrap."""
    return [part for one in place.addresses for part in ("--listen", f"[::]:{PORT}" if ":" in one else f"0.0.0.0:{PORT}")]


@contextmanager
def swarm(root: Path, load: Load | None = None, *flags: str) -> Iterator[Swarm]:
    """Daemons whose directories are in `root`, started with `flags` all; they are killed at the end."""
    found = Swarm(root, load or Load(), flags)
    try:
        yield found
    finally:
        found.end()
