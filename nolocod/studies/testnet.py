"""`nolocod testnet`: real daemons on this machine's loopback, watched until their run ends.

What is shown comes from their status pages, and the summary from their last checkpoints.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import UsageError
from nolocod.run import presets
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon, folder

if TYPE_CHECKING:
    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Sealed

_START_SECONDS = 60.0
"""For the first node to tell its address."""
_STOP_SECONDS = 30.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """`outer_steps`, of the whole model, is the run's goal; times in seconds."""

    nodes: int = 4
    outer_steps: int = 40
    inner_steps: int = 10
    data: Path | None = None
    model: str = "small"
    keep: Path | None = None
    seed: int = 0
    threads: int = 0
    """Of each trainer; 0 shares the cores out."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64:
            raise UsageError(f"--nodes {self.nodes} is not between 1 and 64.")
        if self.outer_steps < 1:
            raise UsageError(f"--outer-steps {self.outer_steps} is not positive.")


@dataclass(frozen=True)
class NodeSummary:
    peer_id: str
    inner_steps: int
    outer_paired: int
    outer_solo: int
    tokens: int
    val_loss_first: float | None
    val_loss_last: float | None
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class Summary:
    """What `--report` writes. A loss is None where the testnet was interrupted before it was measured."""

    nodes: list[NodeSummary]
    averaged_val_loss: float | None
    alone_val_loss: float | None
    weight_std: float | None
    seconds: float
    interrupted: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


class Testnet:
    """The nodes of one testnet. `root` holds node-0, node-1, … and their logs."""

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._root = root
        self.nodes: list[Daemon] = []

    def start(self) -> Sealed:
        """Found the run, bring up its first node, and have the others join it."""
        options = self._options
        manifest = presets.local_run(
            presets.model(options.model, Path()),
            rounds=options.outer_steps,
            inner_steps=options.inner_steps,
            seed=options.seed,
            own_text=options.data is not None,
        )
        sealed = daemons.found(manifest, self._root / "node-0")
        self._spawn("start")
        for _ in range(1, options.nodes):
            self.join()
        return sealed

    def join(self) -> Daemon:
        """Have one more node join through the first."""
        self.nodes[0].wait("telling its address", _START_SECONDS, lambda _: True)
        return self._spawn("join", "--bootstrap", self.nodes[0].address)

    def _spawn(self, *command: str) -> Daemon:
        options = self._options
        threads = options.threads or max(1, (os.cpu_count() or 1) // options.nodes)
        data = [] if options.data is None else ["--data", str(options.data.resolve())]
        line = ("--threads", str(threads), "--log-format", options.log_format, *data)
        self.nodes.append(Daemon(self._root / f"node-{len(self.nodes)}", *line))
        self.nodes[-1].start(*command)
        return self.nodes[-1]

    def watch(self) -> Iterator[list[StatusReport | None]]:
        """Yield all reports once a second until every node has finished."""
        while True:
            for node in self.nodes:
                node.poll()
            reports = [node.last for node in self.nodes]
            yield reports
            if all(report is not None and _has_ended(report) for report in reports):
                return
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End all nodes in order, or as soon as they may be."""
        daemons.end(self.nodes, _STOP_SECONDS)


View = Callable[[str], AbstractContextManager[Callable[[list["StatusReport | None"]], None]]]
"""Shows reports under a title; `terminal.swarm_view` is the one that people see."""


def run(options: Options, view: View, say: Callable[[str], None]) -> Summary:
    """Run a whole testnet; Ctrl-C ends it early, with the summary of what was done."""
    began = time.monotonic()
    interrupted = False
    with folder(options.keep) as root:
        testnet = Testnet(options, root)
        try:
            sealed = testnet.start()
            steps = options.outer_steps * sealed.manifest.outer.turns  # as nodes count them
            with view(f"{options.nodes} nodes, {steps} outer steps each; logs in {root}") as show:
                for reports in testnet.watch():
                    show(reports)
        except KeyboardInterrupt:
            interrupted = True
            say("Stopping the nodes; a second Ctrl-C kills them.")
        finally:
            testnet.stop()
        averaged = alone = std = None
        if not interrupted:
            say("Training one node alone on as many tokens, and measuring the averaged model.")
            try:
                averaged, alone, std = _measure(sealed, testnet.nodes, options)
            except KeyboardInterrupt:
                interrupted = True
        last = [node.last for node in testnet.nodes if node.last is not None]
        return Summary(
            nodes=[_sum_up(report) for report in last],
            averaged_val_loss=averaged,
            alone_val_loss=alone,
            weight_std=std,
            seconds=time.monotonic() - began,
            interrupted=interrupted,
        )


def _has_ended(report: StatusReport) -> bool:
    """Finished, and its last weights are measured and written, in this order; or something is wrong, and nothing may follow."""
    return report.state == "finished" and (report.checkpoint_round == report.round or bool(report.errors))


def _sum_up(report: StatusReport) -> NodeSummary:
    return NodeSummary(
        peer_id=report.peer_id,
        inner_steps=report.inner_steps,
        outer_paired=report.outer_paired,
        outer_solo=report.outer_solo,
        tokens=report.tokens,
        val_loss_first=report.validation_loss_first,
        val_loss_last=report.validation_loss,
        bytes_sent=report.sent,
        bytes_received=report.received,
    )


def _measure(sealed: Sealed, nodes: list[Daemon], options: Options) -> tuple[float | None, float | None, float | None]:
    """The figures that no node can know by itself, averaged_val_loss, alone_val_loss and weight_std of the summary; torch is
    imported here for the first time."""
    from nolocod.trainer import offline
    from nolocod.trainer.pipe import Setup

    folders = [node.paths.checkpoints for node in nodes]
    first, cache = nodes[0].last, nodes[0].paths.cache
    if first is None:
        raise AssertionError("a finished node without a report")
    setup = Setup(
        manifest=sealed.to_bytes(),
        peer_id=first.peer_id,
        data=options.data,
        devices="auto",
        threads=1,  # both as the nodes had; more threads wait for one another where cores are shared
        checkpoints=folders[0],
        cache=cache,
    )
    # as many inner steps as the node that took most: the comparison favours the one that trained alone
    most = max(node.last.inner_steps for node in nodes if node.last is not None)
    averaged = offline.averaged_loss(sealed, folders, options.data, cache)
    std = offline.weight_std(sealed, folders)
    _, alone = offline.train_alone(setup, most)
    return averaged, alone, std
