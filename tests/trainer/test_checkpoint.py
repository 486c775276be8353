"""Checkpoints: exact resume, damage found, disks that fill."""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nolocod.errors import CheckpointError, DiskFullError, NothingToUseError, OwnTensorsError, RejectedTensorError
from nolocod.paths import DataDir
from nolocod.proto.types import Standing, describe
from nolocod.run.manifest import Inner, Outer
from nolocod.trainer import checkpoint, offline
from nolocod.trainer.built import built_of
from tests.support.trainer_parts import MODEL, as_donated, dump, make_replica, save, sealed_run, setup_for, write_text

if TYPE_CHECKING:
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.replica import Replica


def steps(replica: Replica, count: int) -> None:
    for _ in range(count):
        replica.step()


def partly_trained(folder: Path, sealed: Sealed | None = None) -> Replica:
    """In mid-phase of round 2: outer momentum, the optimizers' states and the data position are all in use."""
    replica = make_replica(sealed or sealed_run(), folder)
    for count in (4, 5):
        steps(replica, count)
        replica.report()
        replica.solo()
    steps(replica, 3)
    return replica


def test_a_checkpoint_of_tensors_that_were_split_otherwise_is_not_read(tmp_path: Path) -> None:
    """Of one size in all, so that phi, delta and theta would fit: after another release of transformers was installed."""
    sealed = sealed_run()
    first = make_replica(sealed, tmp_path)
    names, shapes = first.layout.names, first.layout.shapes
    cut = next(number for number, shape in enumerate(shapes) if len(shape) == 2)
    rows, columns = shapes[cut]
    halves = tuple((rows // 2, columns) for _ in range(2))
    split = replace(
        first.layout,
        names=(*names[:cut], f"{names[cut]}.0", f"{names[cut]}.1", *names[cut + 1 :]),
        shapes=(*shapes[:cut], *halves, *shapes[cut + 1 :]),
    )
    assert split.size == first.layout.size
    other = built_of(sealed.manifest, split, first.phi)
    assert not first.built.fits(other)
    assert first.built.starts_as(other)
    assert first.built.fits(make_replica(sealed, tmp_path).built)
    assert first.built == make_replica(sealed, tmp_path).built, "the same on each machine with these libraries"
    first.built = replace(other, libraries="torch 1, transformers 2")
    save(first, tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    second = make_replica(sealed, tmp_path)
    with pytest.raises(OwnTensorsError, match=r"than with torch 1, transformers 2\."):
        second.restore(found.path, found.state)
    second.restore(found.path, msgspec.structs.replace(found.state, layout=b""))  # one of the release before
    save(first, DataDir(tmp_path).checkpoints, "alice")
    for use in (
        lambda: offline.export(DataDir(tmp_path), sealed, tmp_path / "out"),
        lambda: offline.evaluate(DataDir(tmp_path), sealed, tmp_path / "text"),
        lambda: offline.generate(DataDir(tmp_path), sealed, "", 1, 0.0, 0),
    ):
        with pytest.raises(OwnTensorsError, match=r"than with torch 1, transformers 2\."):
            use()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("model", [MODEL, {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}])
def test_resume_is_exact(tmp_path: Path, model: dict[str, object], optimizer: Any) -> None:  # noqa: ANN401 - a literal
    """gpt2 has dropout: the random state counts."""
    sealed = sealed_run(model=model, inner=Inner(steps=4, batch=2, sequence=32, optimizer=optimizer))
    first = partly_trained(tmp_path, sealed)
    save(first, tmp_path / "c", "alice")
    second = make_replica(sealed, tmp_path)
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    steps(first, 6)
    first.solo()
    steps(first, 2)
    second.restore(found.path, found.state)
    steps(second, 6)
    second.solo()
    steps(second, 2)
    for name in ("theta", "phi", "delta"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert first.source.position == second.source.position
    assert first.standing == second.standing
    assert (first.inner_steps, first.steps_since_outer) == (second.inner_steps, second.steps_since_outer) == (20, 2)


def test_a_checkpoint_of_muon_without_squares_goes_on_as_if_lines_were_alike(tmp_path: Path) -> None:
    """As they were before NorMuon."""
    sealed = sealed_run(inner=Inner(steps=4, batch=2, sequence=32))
    first, second = partly_trained(tmp_path, sealed), make_replica(sealed, tmp_path)
    moments = first.inner.moments()
    squares = [name for name in moments if name.startswith("squares.")]
    begins = [second.inner.moments()[name] for name in squares]
    second.inner.restore({name: one for name, one in moments.items() if name not in squares}, first.inner.optimizer_steps)
    restored = second.inner.moments()
    assert squares
    assert all(torch.equal(restored[name], one) for name, one in zip(squares, begins, strict=True))
    assert all(torch.equal(restored[name], one) for name, one in moments.items() if name not in squares)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells what is mapped")
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_restart_lets_go_of_its_checkpoint(tmp_path: Path, optimizer: Any) -> None:  # noqa: ANN401 - a literal
    """Else its space stays taken when the next ones have replaced it, and its optimizer's state is read from the disk."""
    sealed = sealed_run(inner=Inner(steps=4, batch=2, sequence=32, optimizer=optimizer))
    save(partly_trained(tmp_path, sealed), tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    replica = make_replica(sealed, tmp_path)
    replica.restore(found.path, found.state)
    assert replica.inner.moments(), "the optimizers' states are back"
    assert str(found.path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "goes_on"), [(None, True), ("", True), ("a/b/None/train/text", False)])
def test_a_place_in_another_text_is_none_in_this_one(tmp_path: Path, text: str | None, goes_on: bool) -> None:
    """The run's owners may give it another one meanwhile; checkpoints of before say nothing of it."""
    sealed = sealed_run()
    first = partly_trained(tmp_path, sealed)
    save(first, tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    again = make_replica(sealed, tmp_path)
    begins = again.source.position
    state = found.state if text is None else msgspec.structs.replace(found.state, text=text)
    again.restore(found.path, state)
    assert again.source.position == (first.source.position if goes_on else begins)
    assert first.source.position != begins


def test_resume_is_exact_for_a_codec_with_a_state_and_for_fragments(tmp_path: Path) -> None:
    sealed = sealed_run(codec="modulo8", outer=Outer(rounds=100, turns=2))
    alice, bob = make_replica(sealed, tmp_path, "alice"), make_replica(sealed, tmp_path, "bob")
    boxes = [torch.zeros(alice.plan.box_size, dtype=torch.uint8) for _ in range(2)]

    def exchange(fragment: int) -> None:
        for replica, box in zip((alice, bob), boxes, strict=True):
            steps(replica, 2)
            replica.prepare(box, fragment)
        for replica, other in ((alice, boxes[1]), (bob, boxes[0])):
            replica.inspect(other)
            replica.apply(other, 0)

    exchange(0)
    exchange(1)
    save(alice, tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    resumed = make_replica(sealed, tmp_path, "alice")
    resumed.restore(found.path, found.state)
    assert resumed.ages == alice.ages == [2, 0]
    contents = []
    for replica in (alice, resumed):
        steps(replica, 3)
        contents.append(replica.prepare(boxes[0], 0))
    assert contents[0] == contents[1], "the same message, to the last bit"


def test_two_are_kept_and_left_overs_removed(tmp_path: Path) -> None:
    replica = partly_trained(tmp_path)
    for _ in range(3):
        save(replica, tmp_path / "c", "alice")
        replica.solo()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["round-00000003", "round-00000004"]
    (tmp_path / "c" / "round-00000005.partial").mkdir()
    checkpoint.find(tmp_path / "c", sealed_run().run_id)
    assert len(list((tmp_path / "c").iterdir())) == 3, "who only looks, beside a node that writes, changes nothing"
    replica.resume(tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.parametrize("same_round", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, same_round: bool) -> None:
    """A child writes a second checkpoint, and is gone before its first change on the disk, its second, and so on."""
    replica, run_id, changes = partly_trained(tmp_path), sealed_run().run_id, {"open", "os.rename", "os.mkdir", "os.remove"}
    for last in range(100):
        folder = tmp_path / f"c{last}"
        save(replica, folder, "alice")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch has threads; the child needs none
            child = os.fork()
        if child == 0:
            left = last

            def die(event: str, _: object) -> None:
                nonlocal left
                left -= event in changes
                if left < 0:
                    os._exit(9)

            sys.addaudithook(die)
            state, tensors = replica.to_save("alice")
            standing = Standing(state.standing.round + (not same_round), 0, 0.0)
            checkpoint.save(folder, msgspec.structs.replace(state, standing=standing), tensors)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        checkpoint.recover(folder)
        found = status, checkpoint.find(folder, run_id)
        assert found[1].state is not None
        assert found[1].trouble == ()
        if found[0] == 0:
            assert last > 6
            return
    pytest.fail("it never came to its end")


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    replica = partly_trained(tmp_path)
    state, _ = replica.to_save("alice")
    huge = {"x": torch.zeros(1).expand(1 << 58)}

    def begun() -> None:
        raise AssertionError

    with pytest.raises(DiskFullError, match="are to be written"):
        checkpoint.save(tmp_path / "c", state, huge, begun)
    with pytest.raises(DiskFullError, match="are to be written"):
        checkpoint.write_snapshot(tmp_path / "c" / "w", huge, {}, {}, begun)
    assert not list((tmp_path / "c").iterdir())


def test_a_second_checkpoint_of_one_round_replaces_the_first(tmp_path: Path) -> None:
    replica = partly_trained(tmp_path)
    save(replica, tmp_path / "c", "alice")
    replica.step()
    save(replica, tmp_path / "c", "alice")
    (only,) = (tmp_path / "c").iterdir()
    assert checkpoint.check(only, sealed_run().run_id).inner_steps == 13


def test_the_last_one_stays_also_below_damaged_ones_of_higher_rounds(tmp_path: Path) -> None:
    replica = partly_trained(tmp_path)
    for name in ("round-00000090", "round-00000100"):
        (tmp_path / "c" / name).mkdir(parents=True)
    for number in (2, 3):
        save(replica, tmp_path / "c", "alice")
        found = checkpoint.find(tmp_path / "c", sealed_run().run_id)
        assert found.path == tmp_path / "c" / f"round-{number:08d}"
        replica.solo()
    assert len(list((tmp_path / "c").iterdir())) == checkpoint.KEPT


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_damaged_one_is_named_and_the_one_before_used(tmp_path: Path, file: str) -> None:
    replica = partly_trained(tmp_path)
    save(replica, tmp_path / "c", "alice")
    replica.solo()
    save(replica, tmp_path / "c", "alice")
    last = tmp_path / "c" / "round-00000003" / file
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content[: -1 if file == "state.json" else None])
    found = checkpoint.find(tmp_path / "c", sealed_run().run_id)
    assert found.path == tmp_path / "c" / "round-00000002"
    assert len(found.trouble) == 1
    assert "NLC-123" in found.trouble[0]
    assert "round-00000003" in found.trouble[0]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    replica = partly_trained(tmp_path)
    save(replica, tmp_path / "c", "alice")
    replica.solo()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DiskFullError, match="round-00000003"):
            save(replica, tmp_path / "c", "alice")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["round-00000002"]
    assert checkpoint.find(tmp_path / "c", sealed_run().run_id).state is not None


def test_tensor_files_are_what_the_format_s_own_library_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.uint8)}
    with (tmp_path / "x").open("wb") as handle:
        checkpoint.write_tensors(handle, tensors, {"k": "v"})
    read = safetensors.torch.load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    (tmp_path / "y").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a whole"):
        checkpoint.read_tensors(tmp_path / "y")


# --- weights for newcomers


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_a_newcomer_starts_where_its_donor_is(tmp_path: Path, weights: str) -> None:
    sealed = sealed_run(weights=weights)
    donor = partly_trained(tmp_path, sealed)
    description = dump(donor, tmp_path / "w")
    assert description == describe(memoryview((tmp_path / "w").read_bytes()))
    newcomer = make_replica(sealed, tmp_path, "bob")
    assert newcomer.snapshot_size == donor.snapshot_size == description.size, "known before any donor tells it"
    newcomer.adopt(tmp_path / "w", Standing(2, 1000, 2.5))
    phi = as_donated(donor) if weights == "bfloat16" else donor.phi
    assert torch.equal(newcomer.phi, phi)
    assert torch.equal(newcomer.theta, phi)
    other = make_replica(sealed_run(weights="float32" if weights == "bfloat16" else "bfloat16"), tmp_path, "carol")
    with pytest.raises(RejectedTensorError, match="does not fit"):
        other.adopt(tmp_path / "w", Standing(2, 1000, 2.5))
    assert newcomer.standing == Standing(2, 1000, 2.5)
    newcomer.step()
    donor.ages = [0]
    donor.step()
    assert newcomer.rate == donor.rate


def test_weights_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    donor = partly_trained(tmp_path)
    donor.phi[7] = float("nan")
    dump(donor, tmp_path / "w")
    newcomer = make_replica(sealed_run(), tmp_path, "bob")
    with pytest.raises(RejectedTensorError, match="not finite"):
        newcomer.adopt(tmp_path / "w", Standing(2, 0, 0))
    assert torch.equal(newcomer.phi, make_replica(sealed_run(), tmp_path).phi)
    with (tmp_path / "v").open("wb") as handle:
        checkpoint.write_tensors(handle, {"other": torch.zeros(3)}, {})
    with pytest.raises(RejectedTensorError, match="names"):
        newcomer.adopt(tmp_path / "v", Standing(2, 0, 0))


# --- offline commands


def test_an_export_loads_with_from_pretrained(tmp_path: Path) -> None:
    sealed = sealed_run()
    replica = partly_trained(tmp_path)
    paths = DataDir(tmp_path)
    save(replica, paths.checkpoints, "alice")
    offline.export(paths, sealed, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "tide und Zeit ü\n\x00"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    replica.theta.copy_(replica.phi)
    ids = torch.tensor([list(b"time and tide")])
    replica.model.eval()
    assert torch.allclose(model(ids).logits, replica.model(input_ids=ids).logits, atol=1e-6)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"generation_config.json", "tokenizer_config.json"}


def test_evaluate_and_generate_from_the_last_checkpoint(tmp_path: Path) -> None:
    sealed, paths = sealed_run(), DataDir(tmp_path)
    with pytest.raises(NothingToUseError):
        offline.evaluate(paths, sealed)
    replica = partly_trained(tmp_path)
    save(replica, paths.checkpoints, "alice")
    replica.theta.copy_(replica.phi)
    assert offline.evaluate(paths, sealed, write_text(tmp_path)) == pytest.approx(replica.evaluate(), abs=1e-6)
    likeliest = offline.generate(paths, sealed, "time", 8, 0.0, 0)
    assert likeliest == offline.generate(paths, sealed, "time", 8, 0.0, 1)
    assert likeliest == offline.generate(paths, sealed, "time", 8, 5e-324, (1 << 63) - 1), "the smallest temperature"
    drawn = [offline.generate(paths, sealed, "time", 8, 1.0, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_replicas_are_compared_by_their_fast_weights(tmp_path: Path) -> None:
    sealed = sealed_run()
    replica = make_replica(sealed, tmp_path)
    start = replica.theta.clone()
    folders = []
    for peer, shift in (("a", 0.01), ("b", -0.01)):
        replica.theta.copy_(start + shift)
        save(replica, tmp_path / peer, peer)
        folders.append(tmp_path / peer)
    assert offline.weight_std(sealed, folders) == pytest.approx(0.01, rel=1e-3)
    replica.theta.copy_(start)
    assert offline.averaged_loss(sealed, folders, write_text(tmp_path), tmp_path / "cache") == pytest.approx(
        replica.evaluate(), abs=1e-4
    )


def test_training_alone_learns_and_follows_the_schedule(tmp_path: Path) -> None:
    sealed = sealed_run()
    first, last = offline.train_alone(setup_for(sealed, tmp_path), 40)
    assert last < first - 1
