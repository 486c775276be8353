"""`python -m tests.bench wan`: one stream over a long way, ours beside stock py-libp2p and a raw TCP socket.

The rule: all carriers use the very same path, in turn: two network namespaces with a forwarder of ours between them
(wan.c: rate, delay, queue and loss in both directions). Linux, root and a C compiler are needed, and said to be.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import venvs
from tests.bench.base import BenchError, spread
from tests.bench.parties import Pair, enter, private_network, started
from tests.bench.transport import connect, end_command, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SOURCE = Path(__file__).resolve().parent / "wan.c"
CARRIERS = ("raw", "ours", "stock")
HOSTS = ("10.80.0.1", "10.80.0.2")
_MTU = 1500
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_COMMAND_SECONDS = 30.0


@dataclass(frozen=True)
class Way:
    """A way between two hosts: `rtt` and `queue` in milliseconds, `rate` in Mbit/s each way, `loss` a share of packets."""

    rate: float
    loss: float = 0.0
    rtt: float = 80.0
    queue: float = 80.0
    """The most that waits before the bottleneck; what comes then is dropped."""

    def __str__(self) -> str:
        return f"{self.rate:g} Mbit/s, {self.rtt:g} ms" + (f", {self.loss:.1%} lost" if self.loss else "")


PATHS = {Way(100): 64, Way(100, 0.001): 16, Way(400): 192, Way(400, 0.001): 16}
"""Each path, and the MiB that are sent over it: some seconds' worth."""


@dataclass(frozen=True)
class WanResult:
    """MB/s of each repetition, by path and carrier."""

    rates: dict[str, dict[str, list[float]]]
    control: str
    """TCP's congestion control here: with bbr loss weighs less than with cubic."""

    def to_text(self) -> str:
        lines = [f"MB/s over one stream, one way, TCP with {self.control}; and over raw TCP on the same path, medians:"]
        for way, rates in self.rates.items():
            for carrier, found in rates.items():
                ratio = statistics.median(one / base for one, base in zip(found, rates["raw"], strict=True))
                lines.append(f"  {way:<32} {carrier:<6} {spread(found, digits=2):<24} {ratio:.2f}")
        return "\n".join(lines)

    def to_table(self) -> dict[str, Any]:
        return {"text": self.to_text(), "figures": self.rates, "control": self.control}


def measure(
    rounds: int, say: Callable[[str], None], paths: dict[Way, int] = PATHS, carriers: tuple[str, ...] = CARRIERS
) -> WanResult:
    """Measure `carriers` on all `paths` in turn. Raises BenchError where the paths cannot be had."""
    program = compiled()
    rates: dict[str, dict[str, list[float]]] = {}
    for way, megabytes in paths.items():
        found: dict[str, list[float]] = {carrier: [] for carrier in carriers}
        for number in range(1, rounds + 1):
            for carrier in carriers:
                with laid(way, program) as networks, _ends(carrier, networks) as ends:
                    connect(ends)
                    found[carrier].append(rate(ends, [0, megabytes << 20]))
            told = ", ".join(f"{carrier} {rates_[-1]:.2f}" for carrier, rates_ in found.items())
            say(f"{way}, {number}: {told} MB/s")
        rates[str(way)] = found
    return WanResult(rates, _CONTROL.read_text(encoding="ascii").strip())


@contextmanager
def _ends(carrier: str, networks: tuple[int, int]) -> Iterator[Pair]:
    commands = [[*enter(network), *end_command(carrier, rank, HOSTS[rank])] for rank, network in enumerate(networks)]
    with started(commands) as (first, second):
        yield Pair((first, second), networks[0])


@contextmanager
def laid(way: Way, program: Path) -> Iterator[tuple[int, int]]:
    """Two networks with `way` between them, as the ids of processes in them; their hosts are 10.80.0.1 and .2."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(private_network()) for _ in HOSTS)
        if first is None or second is None:
            raise BenchError("this system gives no network namespaces.")
        command = [str(program), str(first), str(second), str(way.rtt / 2), str(way.rate), str(way.loss), str(way.queue)]
        forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stack.callback(_end, forwarder)
        assert forwarder.stdout is not None  # pipes were asked for
        assert forwarder.stderr is not None
        if forwarder.stdout.readline() != b"up\n":
            raise BenchError(f"the forwarder did not start: {forwarder.stderr.read().decode().strip()}.")
        for network, host in zip((first, second), HOSTS, strict=True):
            _do([*enter(network), "ip", "addr", "add", f"{host}/24", "dev", "wan0"])
            _do([*enter(network), "ip", "link", "set", "wan0", "mtu", str(_MTU), "txqueuelen", "1000", "up"])
        yield first, second


def _end(forwarder: subprocess.Popen[bytes]) -> None:
    for stream in (forwarder.stdin, forwarder.stdout, forwarder.stderr):
        assert stream is not None  # pipes were asked for
        with suppress(BrokenPipeError):
            stream.close()
    try:
        forwarder.wait(5)
    except subprocess.TimeoutExpired:
        forwarder.kill()
        forwarder.wait()


def compiled() -> Path:
    """The forwarder; BenchError says what is missing to have it."""
    if os.geteuid() != 0:
        raise BenchError("only root may lay a path between two network namespaces.")
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("ip") is None:
        raise BenchError("a C compiler and iproute2 are needed.")
    program = venvs.cache() / "wan"
    program.parent.mkdir(parents=True, exist_ok=True)
    _do([compiler, "-O2", "-pthread", "-o", str(program), str(_SOURCE)])
    return program


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}.")
