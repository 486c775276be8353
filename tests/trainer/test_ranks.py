"""A node of several devices, each with the whole model or with shards of it: real processes on the CPU with gloo; none of this
has seen a GPU. What shards alone have is in test_shards.py.

The other devices have no state that can be asked for: what they hold shows in the gradient that all have together.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
import trio
from msgspec.structs import replace

from nolocod.errors import DeviceError, TrainerError, UsageError, first_error
from nolocod.observe.events import DevicesChosen
from nolocod.run.manifest import Inner, Outer
from nolocod.trainer import checkpoint, muon, pace, process
from nolocod.trainer.devices import check_count, find_devices, read_devices
from nolocod.trainer.opening import open_shared
from nolocod.trainer.pace import shares
from tests.support.swarm import children, stopped_often
from tests.support.trainer_parts import child_of, make_replica, save, sealed_run, setup_for, trade

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from nolocod.observe.events import Event
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.pipe import Failed
    from nolocod.trainer.process import TrainerProcess
    from nolocod.trainer.replica import Replica

DEADLINE = 300
INNER = Inner(steps=4, batch=2, accumulation=2, sequence=32, learning_rate=1e-5)
"""At three hundred times the rate Adam makes 3e-4 of the last bits of a sum, between one device's own micro-batches too."""
CLOSE = 1e-6


def ranks_below(leader: psutil.Process) -> list[psutil.Process]:
    """The processes of the other devices, that of the second first."""
    return children(leader, "nolocod.trainer.rank")


@contextlib.contextmanager
def shared(sealed: Sealed, folder: Path, devices: str, peer: str = "alice", **changes: Any) -> Iterator[Replica]:  # noqa: ANN401
    """The leader's replica in this process."""
    fallen: list[Failed] = []
    setup = setup_for(sealed, folder, peer, devices=devices, **changes)
    replica, _ = open_shared(setup, sealed, lambda event: None, fallen.append)
    began = ranks_below(psutil.Process())
    try:
        yield replica
    finally:
        replica.close()
        assert not any(child.is_running() for child in began), "the devices are free once it is closed"
        assert fallen == []


def life(replica: Replica) -> list[Tensor]:
    """Theta after each part of an outer step's ways, one inner step further."""
    seen = []

    def step() -> None:
        replica.step()
        seen.append(replica.theta.clone())

    for _ in range(3):
        step()
    replica.solo()
    step()
    outbox = torch.empty(replica.plan.box_size, dtype=torch.uint8)
    replica.prepare(outbox, replica.subject)
    step()
    replica.discard()
    step()
    replica.prepare(outbox, replica.subject)
    step()
    replica.inspect(outbox)
    replica.apply(outbox, 0)
    step()
    replica.clip_change = 0.5 * (replica.theta - replica.phi).norm().item()
    replica.capture(replica.subject)
    step()
    return seen


@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3", "shard:cpu:2", "shard:cpu:3"])  # of three, one has two of four sequences
def test_any_number_of_devices_trains_as_one_does(tmp_path: Path, devices: str) -> None:
    sealed = sealed_run(inner=INNER, outer=Outer(rounds=100, turns=2), codec="float32")
    alone = make_replica(sealed, tmp_path)
    alone.draw_as("alice")
    wanted = life(alone)
    with shared(sealed, tmp_path, devices) as replica:
        assert replica.devices == (("cpu (shard)" if "shard" in devices else "cpu"),) * int(devices[-1])
        found = life(replica)
        assert abs(replica.report() - alone.report()) <= CLOSE, "the loss is of all sequences"
        assert abs(replica.evaluate() - alone.evaluate()) <= CLOSE
        for one in (alone, replica):
            one.step()
        assert (replica.theta - alone.theta).abs().max() <= CLOSE, "an evaluation changes nothing"
    for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert (one - other).abs().max() <= CLOSE, index


def test_a_step_is_the_same_with_unlike_shares_and_in_larger_steps(tmp_path: Path) -> None:
    sealed = sealed_run(inner=INNER, codec="float32")
    alone = make_replica(sealed, tmp_path)
    with shared(sealed, tmp_path, "cpu:2") as replica:
        assert replica._ranks is not None
        for shares, times in (([3, 1], (1, 1, 1)), ([2, 2], (1, 3, 1))):
            replica._ranks._shares = shares
            for one in (alone, replica):
                for larger in times:
                    one.times = larger
                    one.step()
            assert replica._ranks._shares == shares
            assert (replica.theta - alone.theta).abs().max() <= CLOSE
            assert abs(replica.report() - alone.report()) <= CLOSE


def test_a_slow_device_gets_less_of_a_step(tmp_path: Path) -> None:
    sealed = sealed_run(inner=replace(INNER, batch=8))
    with shared(sealed, tmp_path, "cpu:2") as replica:
        assert replica._ranks is not None
        (slow,) = ranks_below(psutil.Process())
        with stopped_often(slow, 2 / 3):
            ends = time.monotonic() + DEADLINE
            while not replica._ranks._shares or replica._ranks._shares[1] > 6:
                assert time.monotonic() < ends
                replica.step()
        assert sum(replica._ranks._shares) == 16


def test_shares_end_a_step_soonest() -> None:
    assert shares([1.0, 1.0], [6, 6]) == [6, 6]
    assert shares([1.0, 2.0], [6, 6]) == [8, 4]
    assert shares([2.0, 1.0, 1.0], [2, 2, 1]) == [1, 2, 2]
    assert shares([1.0, 100.0], [2, 2]) == [3, 1], "each has one, or it could not be timed"
    assert shares([1.04, 1.0], [26, 26]) == [26, 26], "which saves too little"
    assert shares([1.2, 1.0], [26, 26]) == [24, 28]


def test_a_pace_is_the_middle_of_recent_steps_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pace, "perf_counter", lambda: now)
    device = pace.Pace(torch.device("cpu"))
    told = []
    for took in (90.0, *[4.0] * 7, *[8.0] * 8):
        assert (device.seconds == 0) == (len(told) < 8)
        device.begin()
        now += took
        device.end(2)
        told.append(device.news())
    assert told == [*[None] * 7, 2.0, *[None] * 7, 4.0]


@pytest.mark.parametrize(("devices", "optimizer"), [("cpu:2", "adamw"), ("shard:cpu:3", "muon")])
def test_a_checkpoint_opens_with_any_number_of_devices(tmp_path: Path, devices: str, optimizer: str) -> None:
    sealed = sealed_run(inner=replace(INNER, optimizer=optimizer))
    with shared(sealed, tmp_path, devices) as replica:
        for _ in range(3):
            replica.step()
        replica.solo()
        save(replica, tmp_path / "alice" / "checkpoints", "alice")
        for _ in range(3):
            replica.step()
        wanted = replica.theta.clone()
    for others in ("cpu", "shard:cpu:2", "cpu:3"):
        with shared(sealed, tmp_path, others) as replica:
            assert replica.inner_steps == 3
            for _ in range(3):
                replica.step()
            assert (replica.theta - wanted).abs().max() <= CLOSE, others


@pytest.mark.parametrize("devices", ["cpu:2", "shard:cpu:2"])
def test_weights_that_are_adopted_reach_all_devices(tmp_path: Path, devices: str) -> None:
    """By AdamW: where a CPU multiplies in bfloat16, NorMuon makes much of the last bits of a matrix's small singular values."""
    sealed = sealed_run(inner=replace(INNER, optimizer="adamw"))
    donor = make_replica(sealed, tmp_path, "donor")
    for _ in range(3):
        donor.step()
    donor.solo()
    checkpoint.write_snapshot(tmp_path / "weights", *donor.snapshot())
    alone = make_replica(sealed, tmp_path)
    with shared(sealed, tmp_path, devices) as replica:
        for one in (alone, replica):
            one.step()
            one.adopt(tmp_path / "weights", donor.standing)
            one.step()
        assert (replica.theta - alone.theta).abs().max() <= CLOSE


def test_muon_takes_the_same_step_on_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads, with gloo: where a CPU multiplies in bfloat16, its rounding would hide what is to be seen."""
    monkeypatch.setattr(muon, "fast_kind", lambda device: torch.float32)
    sealed = sealed_run(inner=replace(INNER, optimizer="muon"))
    alone, first, second = (make_replica(sealed, tmp_path) for _ in range(3))
    store = dist.HashStore()  # type: ignore[attr-defined] # it is public
    failed: list[BaseException] = []
    windows = [torch.from_numpy(alone.source.take(4)) for _ in range(4)]

    def train(rank: int, replica: Replica) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=DEADLINE))
            replica.inner.share(lambda tensor: group.allreduce([tensor]).wait())
            for one in windows:
                replica.inner.step(one.tensor_split(2)[rank], 3e-3, 4)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=train, args=(rank, one)) for rank, one in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for one in windows:
        alone.inner.step(one, 3e-3)
    for thread in threads:
        thread.join(DEADLINE)
    assert not failed
    assert torch.equal(first.theta, second.theta), "bit for bit"
    assert (first.theta - alone.theta).abs().max() <= CLOSE
    assert all(
        torch.equal(one, other)
        for one, other in zip(first.inner.moments().values(), second.inner.moments().values(), strict=True)
    )


# --- the trainer as the network process has it


@contextlib.asynccontextmanager
async def loaded(sealed: Sealed, folder: Path, peer: str, devices: str, *events: list[Event]) -> Any:  # noqa: ANN401
    with trio.fail_after(DEADLINE):
        async with process.open_trainer(events[0].append if events else lambda event: None) as trainer:
            await trainer.load(setup_for(sealed, folder, peer, devices=devices))
            yield trainer


def exchange(*partners: Replica) -> list[bytes]:
    """Take a paired step; returns the messages."""
    boxes = [torch.empty(one.plan.box_size, dtype=torch.uint8) for one in partners]
    sizes = [one.prepare(box, 0).size for one, box in zip(partners, boxes, strict=True)]
    for one, box in zip(partners, reversed(boxes), strict=True):
        one.inspect(box)
        one.apply(box, 1)
    return [box[:size].numpy().tobytes() for box, size in zip(boxes, sizes, strict=True)]


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8"])
@pytest.mark.parametrize("devices", ["cpu:2", "shard:cpu:2"])
def test_an_exchange_is_bit_for_bit_that_of_two_nodes_of_one_device(codec: str, devices: str, tmp_path: Path) -> None:
    sealed = sealed_run(inner=INNER, codec=codec)
    again = {}
    with shared(sealed, tmp_path, devices) as alice:
        bob = make_replica(sealed, tmp_path, "bob")
        for name, node in (("alice", alice), ("bob", bob)):
            for _ in range(3):
                node.step()
            save(node, tmp_path / name / "checkpoints", name)
            again[name] = make_replica(sealed, tmp_path, name)
            again[name].resume(tmp_path / name / "checkpoints")
        assert exchange(alice, bob) == exchange(again["alice"], again["bob"])
        for node, other in ((alice, again["alice"]), (bob, again["bob"])):
            for one, wanted in ((node.phi, other.phi), (node.delta, other.delta), (node.theta, other.theta)):
                assert torch.equal(one, wanted)
            assert torch.equal(node.weights.distance.view(torch.uint8), other.weights.distance.view(torch.uint8))
        alice.step()
        again["alice"].step()
        assert (alice.theta - again["alice"].theta).abs().max() <= CLOSE, "all devices have what the partner brought"


@pytest.mark.parametrize("devices", ["cpu:2", "shard:cpu:2"])
async def test_trainers_of_two_devices_and_of_one_take_an_outer_step_together(tmp_path: Path, devices: str) -> None:
    sealed = sealed_run(inner=INNER, codec="modulo8")
    events: list[Event] = []
    async with loaded(sealed, tmp_path, "alice", devices, events) as alice, loaded(sealed, tmp_path, "bob", "cpu") as bob:
        assert any(isinstance(event, DevicesChosen) and len(event.devices) == 2 for event in events)
        for trainer in (alice, bob):
            await trainer.train()
            await trainer.wait_steps(4)
        assert len({seen.spread for seen in await trade(alice, bob)}) == 1  # while both train
        for trainer in (alice, bob):
            await trainer.apply(1, b"")
            await trainer.wait_steps(2)
            assert trainer.standing.round == 1


MOMENTS = {
    "a rank loads": (2, 1, ""),
    "a rank of three trains": (3, -1, "train"),
    "the leader trains": (2, 0, "train"),
    "a rank is paused": (2, -1, "pause"),
}
"""Of how many processes, leader and ranks, who is killed, and what the trainer was told to do."""


@pytest.mark.parametrize("moment", MOMENTS)
async def test_whoever_is_killed_takes_all_with_it_and_the_checkpoint_counts(moment: str, tmp_path: Path) -> None:
    sealed = sealed_run(inner=INNER)
    count, victim, doing = MOMENTS[moment]
    family: list[psutil.Process] = []

    async def kill(trainer: TrainerProcess) -> None:
        leader = child_of(trainer)
        while len(family) < count:
            family[:] = [leader, *ranks_below(leader)]
            await trio.sleep(0.01)
        family[victim].send_signal(signal.SIGKILL)

    async def live_and_die() -> None:
        with trio.fail_after(DEADLINE):
            async with process.open_trainer(lambda event: None) as trainer, trio.open_nursery() as nursery:
                if not doing:
                    nursery.start_soon(kill, trainer)
                await trainer.load(setup_for(sealed, tmp_path, devices=f"cpu:{count}"))
                await trainer.train()
                await trainer.wait_steps(2)
                await trainer.checkpoint()
                if doing == "pause":
                    await trainer.capture(0)
                    await trainer.pause()
                await kill(trainer)
                await trainer.wait_dead()

    causes = []
    try:
        await live_and_die()
    except* TrainerError as group:
        causes.append(first_error(group).cause)
    (cause,) = causes
    assert "ended by signal SIGKILL" in cause
    assert ("the process of cpu (device " in cause) == (victim != 0), "it says who"
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    if doing:
        replica = make_replica(sealed, tmp_path)
        replica.resume(tmp_path / "alice" / "checkpoints")
        assert replica.inner_steps >= 2
        replica.step()


def test_nothing_is_left_when_the_network_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, trio; from pathlib import Path; from tests.support.trainer_parts import sealed_run, setup_for\n"
        "from nolocod.trainer.process import open_trainer\n"
        "async def main():\n"
        "    async with open_trainer(lambda event: None) as trainer:\n"
        "        await trainer.load(setup_for(sealed_run(), Path(sys.argv[1]), devices='cpu:2'))\n"
        "        await trainer.train()\n"
        "        await trainer.wait_steps(2)\n"
        "        print('trains', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as network:
        assert network.stdout is not None
        assert network.stdout.readline() == "trains\n"
        family = psutil.Process(network.pid).children(recursive=True)
        assert len(family) == 2
        network.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


async def test_a_device_that_fails_while_it_loads_is_told(tmp_path: Path) -> None:
    sealed = sealed_run(inner=replace(INNER, batch=1, accumulation=1))
    with pytest.raises(DeviceError, match="has 1 sequences, and 2 devices"):
        async with loaded(sealed, tmp_path, "alice", "cpu:2"):
            pass


def test_a_run_that_one_device_cannot_open_leaves_no_process(tmp_path: Path) -> None:
    sealed = sealed_run(inner=INNER)
    setup = setup_for(sealed, tmp_path, devices="cpu:2", base_bits=8)
    with pytest.raises(Exception, match="--base-bits is for runs that train an adapter"):
        open_shared(setup, sealed, lambda event: None, lambda failed: None)
    assert ranks_below(psutil.Process()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("0,0", "names cuda:0 twice"), ("cuda:1,1", "names cuda:1 twice"), ("two", ""), ("shard:0,1", ""), ("shard:all", "")]
    + [("shard:0", "says one device, and shards"), ("shard:", "says no device"), ("shard:0,0", "names cuda:0 twice")]
    + [(text, "says no device") for text in ("0,cpu", "cpu:0", "cpu:65", "", "0,,1", "0,cuda", "-1")],
)
def test_what_names_no_devices_is_refused(text: str, message: str) -> None:
    if message:
        with pytest.raises(UsageError, match=message):
            read_devices(text, "--devices")
    else:
        assert read_devices(text, "--devices") == text, "torch may know it"


def test_devices_that_are_not_there_are_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="all GPUs are to be used, and this torch"):
        find_devices("all")
    with pytest.raises(DeviceError, match=r"cuda:0 is not there: this torch .* finds 0 GPUs \(none\)"):
        find_devices(read_devices("0, 1", "--devices"))
    with pytest.raises(DeviceError, match="'two' does not work"):
        find_devices("two")
    assert list(map(str, find_devices("cpu:2"))) == ["cpu", "cpu"]


def test_no_more_devices_than_sequences() -> None:
    check_count(4, sealed_run(inner=INNER).manifest)
    with pytest.raises(DeviceError, match="has 4 sequences, and 5 devices"):
        check_count(5, sealed_run(inner=INNER).manifest)
