"""Real daemons that are stopped or killed right when their exchange, or their serving of weights, enters a state."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nolocod.errors import LostStepsError, UnacknowledgedError
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.proto.exchange_states import TABLE, State
from nolocod.proto.snapshot_states import Serving
from tests.support.swarm import ENOUGH, Daemon, Swarm, trainer_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator

FAULTY = Path(__file__).parents[1] / "support" / "faulty.py"
STOPPED = 0.5
"""Seconds for which a stopped daemon stands still."""
UNFORCED = {State.ABORTED, State.CLOSED}
"""Reached only where something else went on: see the tests of an offer without an answer, and of one to a busy node."""
WHOLE = bool(os.environ.get("NOLOCOD_FAULTS"))
"""Kill in every state, not in two: about five minutes more."""


class FaultySwarm(Swarm):
    def daemon(self) -> Daemon:
        daemon = super().daemon()
        daemon.program = [str(FAULTY), str(orders_of(daemon))]
        return daemon

    @property
    def pair(self) -> tuple[Daemon, Daemon]:
        first, second = self.daemons
        return first, second

    def outlive(self, done: Callable[[], bool]) -> None:
        """Let each daemon go on whenever it has stopped itself, until all is `done` and all run."""
        deadline = time.monotonic() + ENOUGH
        while time.monotonic() < deadline:
            stopped = [daemon.process for daemon in self.daemons if daemon.process is not None and is_stopped(daemon.process)]
            if not stopped and done():
                return
            if stopped:
                time.sleep(STOPPED)
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        left = {daemon.paths.root.name: orders_left(daemon) for daemon in self.daemons}
        pytest.fail(f"not within {ENOUGH} s: {left}\n" + "\n".join(daemon.tail() for daemon in self.daemons))


@pytest.fixture(scope="module")
def swarm_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultySwarm]:
    """Two daemons that have paired. All tests here share them, the one that ends them comes last."""
    swarm = FaultySwarm(tmp_path_factory.mktemp("faulty"))
    try:
        swarm.wait_paired(swarm.joined_by(swarm.found(), 1), 1)
        yield swarm
    finally:
        swarm.end()


@pytest.fixture
def faulty(swarm_of_two: FaultySwarm) -> FaultySwarm:
    """The two, without orders, and pairing."""
    for daemon in swarm_of_two.daemons:
        forget_orders(daemon)
    swarm_of_two.outlive(lambda: not any(orders_left(daemon) for daemon in swarm_of_two.daemons))
    swarm_of_two.wait_paired(swarm_of_two.daemons, 1)
    return swarm_of_two


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def stands(daemon: Daemon) -> bool:
    assert daemon.process is not None
    return is_stopped(daemon.process)


def has_ended(daemon: Daemon) -> bool:
    assert daemon.process is not None
    return daemon.process.poll() is not None


def orders_of(daemon: Daemon) -> Path:
    return daemon.paths.root.with_suffix(".orders")


def orders_left(daemon: Daemon) -> list[str]:
    folder = orders_of(daemon)
    return sorted(os.listdir(folder)) if folder.exists() else []


def order(daemon: Daemon, what: str, states: Iterable[tuple[str, str]]) -> None:
    """In place of what is left of its orders, but for one that it carries out."""
    forget_orders(daemon)
    orders_of(daemon).mkdir(exist_ok=True)
    for side, state in states:
        (orders_of(daemon) / f"{side} {state}.{what}").touch()


def forget_orders(daemon: Daemon) -> None:
    """But for one that it carries out: `outlive` lets it go on."""
    for order in orders_of(daemon).glob("*.SIG*"):
        order.unlink(missing_ok=True)


def one_that(met: Callable[[Daemon], bool], faulty: FaultySwarm, what: str, at: tuple[str, State]) -> tuple[Daemon, Daemon]:
    """Order it of both, wait until one has `met` it, take the other's order back; that one first. Who offers is who is first
    at its boundary, and that may be the same node for hundreds of rounds."""
    pair, (side, state) = faulty.pair, at
    for daemon in pair:
        order(daemon, what, [(side, state.name)])
    faulty.wait(f"one is {side} and {state.name}", lambda: any(map(met, pair)))
    one, other = pair if met(pair[0]) else pair[::-1]
    forget_orders(other)  # it has not met it: of an exchange one offers and one answers
    return one, other


def same_receipts(*daemons: Daemon) -> bool:
    """Whether what one has signed with the other is what the other has signed with it."""
    kept = [{receipt.session: receipt.content for receipt in ReceiptStore(one.paths.receipts).all()} for one in daemons]
    common = kept[0].keys() & kept[1].keys()
    return bool(common) and all(kept[0][session] == kept[1][session] for session in common)


def test_stopped_where_a_node_is_too_busy_for_an_offer(faulty: FaultySwarm) -> None:
    """Its trainer stands still before it could apply a step, so that whoever offers it the next one is turned away."""
    first, second = faulty.pair
    order(second, "SIGSTOP", [(side, State.COMMITTED.name) for side in TABLE])
    faulty.wait("the second node stops", lambda: stands(second))
    trainer = trainer_of(second)
    trainer.suspend()
    order(second, "SIGSTOP", [("answerer", State.CLOSED.name)])
    order(first, "SIGSTOP", [("offerer", State.CLOSED.name)])
    faulty.outlive(lambda: not orders_left(first) and not orders_left(second))
    trainer.resume()
    faulty.wait_paired([first, second], 1)


def test_an_offer_that_a_stopped_node_answers_too_late_is_aborted_by_both(faulty: FaultySwarm) -> None:
    """Stopped for longer than an answer may take; both stop once more where they find that it came to nothing."""
    # before it says that it accepts; an offer may come too early to be accepted
    first, second = one_that(stands, faulty, "SIGSTOP", ("answerer", State.ACCEPTED))
    order(first, "SIGSTOP", [("answerer", "ABORTED")])
    order(second, "SIGSTOP", [("offerer", "ABORTED")])
    faulty.wait("the other node gives its offer up", lambda: stands(second))
    faulty.outlive(lambda: not orders_left(first))
    faulty.wait_paired([first, second], 1)


DECISIVE = [("offerer", State.DECIDED), ("answerer", State.COMMITTED)]
OTHERS = [(side, state) for side, states in TABLE.items() for state in states if (side, state) not in DECISIVE]


@pytest.mark.parametrize("cells", [DECISIVE, *([OTHERS] if WHOLE else [])], ids=["decisive", "others"][: 1 + WHOLE])
def test_killed_in_a_state_and_started_again(faulty: FaultySwarm, cells: list[tuple[str, State]]) -> None:
    """Who lost a step, or left its partner without an acknowledgement, is told; and the two go on."""
    for side, state in cells:
        if state in UNFORCED:
            continue
        killed, other = one_that(has_ended, faulty, "SIGKILL", (side, state))
        killed.run("join", "--bootstrap", other.address)
        faulty.wait("it trains again", lambda one=killed: bool((r := one.report) and r.state == "training"))
        if (side, state) == DECISIVE[0]:
            assert killed.report is not None
            assert LostStepsError.entry.code in [error.code for error in killed.report.errors]
        if (side, state) == DECISIVE[1]:
            assert other.report is not None
            assert UnacknowledgedError.entry.code in [row.error for row in other.report.exchanges]
        faulty.wait_paired(faulty.pair, 1)
    assert same_receipts(*faulty.pair)


def test_stopped_in_every_state_and_thawed(faulty: FaultySwarm) -> None:
    """Every state of both tables that comes about by itself, on either side, by whichever node is on it; half a second each."""
    first, second = faulty.pair
    exchanging = [(side, state.name) for side, states in TABLE.items() for state in states if state not in UNFORCED]
    for daemon in faulty.pair:
        order(daemon, "SIGSTOP", exchanging)
    faulty.outlive(lambda: not {*orders_left(first)} & {*orders_left(second)})
    for daemon in faulty.pair:
        forget_orders(daemon)
    faulty.outlive(lambda: not orders_left(first) and not orders_left(second))
    faulty.wait_paired([first, second], 1)
    serving = [state.name for state in Serving if state is not Serving.CLOSED]
    newcomer = faulty.daemon()
    for daemon in (first, second):
        order(daemon, "SIGSTOP", [("donor", state) for state in serving])
    order(newcomer, "SIGSTOP", [("newcomer", state) for state in serving])
    newcomer.run("join", "--bootstrap", first.address)
    faulty.outlive(lambda: not orders_left(newcomer) and not (orders_left(first) and orders_left(second)))
    for daemon in (first, second):
        forget_orders(daemon)
    faulty.outlive(lambda: not orders_left(first) and not orders_left(second))
    faulty.wait_paired([newcomer], 1)
    faulty.stop(first, second, newcomer)
    assert same_receipts(first, second)
