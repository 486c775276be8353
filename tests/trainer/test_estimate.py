"""`nolocod create --plan`, and the run files that docs/runs gives as a start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from nolocod import cli
from nolocod.disk import USUAL_RATE
from nolocod.run import presets
from nolocod.run.manifest import Inner, Outer
from nolocod.run.run_file import read_run_file
from nolocod.trainer import checkpoint
from nolocod.trainer import estimate as module
from nolocod.trainer.estimate import EFFICIENCY, Estimate, Machine, estimate, needs_on
from nolocod.trainer.files import REST
from nolocod.trainer.head import plain_head
from nolocod.trainer.model import from_config, read_config
from nolocod.trainer.objective import NextToken
from tests.support.trainer_parts import make_replica, save, sealed_run

RUNS = Path(__file__).resolve().parents[2] / "docs" / "runs"
MB = 1_000_000
RUN = Estimate(
    parameters=MB,
    trained=MB,
    inner_steps=50,
    turns=5,
    on_device=16 * MB,
    activations=30 * MB,
    locked=12 * MB,
    shared=13 * MB,
    gathered=3 * MB,
    on_host=20 * MB,
    boxes=MB,
    kept=MB,
    message=4 * MB,
    turn_message=2 * MB,
    checkpoint=20 * MB,
    weights=4 * MB,
    text=MB,
    operations=8e9,
)
MACHINE = Machine(step=2.0, down=4e6, up=1e6, disk=1e7, network=100 * MB, trainer=400 * MB)


@pytest.mark.parametrize(("name", "least", "most"), [("10m", 9e6, 12e6), ("125m", 1e8, 1.4e8), ("1.3b", 1.1e9, 1.4e9)])
def test_the_run_files_are_good_and_as_large_as_they_say(name: str, least: float, most: float) -> None:
    needs = estimate(read_run_file(RUNS / f"{name}.toml"))
    assert least < needs.parameters < most
    assert 12 * needs.parameters < needs.on_device < 13.5 * needs.parameters, "a moment instead of two, where Muon trains"
    assert 16 * needs.parameters < needs.checkpoint < 17.5 * needs.parameters, "in checkpoints too"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_what_is_estimated_is_what_a_replica_has(tmp_path: Path, optimizer: str) -> None:
    inner = Inner(steps=4, batch=2, sequence=32, optimizer=optimizer)
    sealed = sealed_run(inner=inner, outer=Outer(turns=2))
    needs, replica = estimate(sealed.manifest), make_replica(sealed, tmp_path)
    assert needs.parameters == replica.layout.size == replica.theta.numel()
    assert needs.message == replica.plan.box_size
    replica.step()
    _, tensors = replica.to_save("alice")
    moments = {name: one for name, one in tensors.items() if not name.startswith(("rng.", "distance."))}
    assert needs.checkpoint == checkpoint.size_of(moments)
    tensors, _, kinds = replica.snapshot()
    assert needs.weights == checkpoint.size_of(tensors, kinds)
    box = torch.zeros(replica.plan.boxes_size, dtype=torch.uint8)
    first = replica.prepare(box[replica.plan.outbox_offset :], 0).size
    assert 2 * first == needs.boxes, "the first message has two bytes for each parameter, and the partner's too"
    assert needs.kept == replica.captured[1].numel() * 2


def test_activations_are_what_a_backward_pass_keeps() -> None:
    """And the logits, in a heap with its holes."""
    manifest = sealed_run(inner=Inner(steps=1, batch=8, sequence=64)).manifest
    model = from_config(read_config(manifest, 256))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        NextToken(plain_head(model)).loss(model, torch.zeros(8, 65, dtype=torch.int64), torch.device("cpu"))
    real = sum(one.untyped_storage().nbytes() for pointer, one in kept.items() if pointer not in own)
    needs = estimate(manifest)
    holes = (module._HOLES - 1) * 4 * needs.trained  # of the gradients
    assert (needs.activations - holes) / module._HOLES - 4 * 8 * 64 * 256 == pytest.approx(real, rel=0.1)


def test_activations_of_what_does_not_run_without_values_follow_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = sealed_run().manifest
    known = estimate(manifest).activations

    def fails(*_: object) -> None:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(module, "from_config", fails)
    assert known / 3 < estimate(manifest).activations < 3 * known


def test_windows_are_shared_by_devices() -> None:
    manifest, cpu = sealed_run(inner=Inner(steps=1, batch=8, sequence=32)).manifest, torch.device("cpu")
    one, four = (estimate(manifest, devices=[cpu] * count).activations for count in (1, 4))
    assert 3.5 < one / four < 4.5


def test_times_follow_from_operations_and_rates() -> None:
    assert RUN.step_seconds(1e10) == pytest.approx(0.8 / EFFICIENCY)
    needs = needs_on(RUN, MACHINE, 3.0)
    assert needs.phase == 100.0
    assert needs.exchange == 2.0 + 3.0, "by the slower direction, and a step and a half that it waits for"
    assert needs.late == 1.0 + 0.75
    assert (needs.busy, needs.hidden) == (0.1, 1.0)
    assert needs.fetch == pytest.approx(4.0 + 1.0 + 0.4 + REST * 0.004), (
        "the line, half of the donor's step, the disk, and rests between"
    )
    assert (needs.fewest_steps - 1) * 2.0 < 2 * 10.0 <= needs.fewest_steps * 2.0, "busy for half of them"


def test_a_line_that_cannot_keep_up_exchanges_as_many_parts_at_once_as_may_be() -> None:
    needs = needs_on(RUN, replace(MACHINE, up=5e4), 3.0)
    assert (needs.busy, needs.hidden) == (2.0, 0.5)
    assert needs.exchange == 2 * 40.0 + 3.0, "a quarter of five parts"


def test_files_wear_and_stop() -> None:
    needs = needs_on(RUN, MACHINE, 3.0)
    assert needs.disk == (checkpoint.KEPT + 1) * 20 * MB + 2 * 4 * MB
    assert (needs.saving, needs.saved_every) == (2.0, 100.0), "fifty times as long as it took"
    assert needs.written == 864 * 20 * MB
    assert needs.stop == 2.0 + 3.0 + 2.0, "the step, the grace for an exchange, the checkpoint"
    quick = needs_on(RUN, replace(MACHINE, disk=USUAL_RATE, up=4e6), 5.0)
    assert quick.saved_every == 60.0
    assert quick.stop == 2.0 + 3.5 + 20 * MB / USUAL_RATE


def test_memory_by_process_and_device() -> None:
    needs = needs_on(RUN, MACHINE, 3.0)
    assert needs.network_memory == 100 * MB
    assert needs.trainer_memory == (400 + 8 + 2 + 1 + 16 + 30) * MB, "on the CPU with what a device would hold"
    assert needs.saving_memory == needs.trainer_memory + 20 * MB
    assert needs.device_memory == 0
    two = needs_on(RUN, replace(MACHINE, processes=2), 3.0)
    assert two.trainer_memory == needs.trainer_memory + (400 + 16 + 30) * MB
    card = needs_on(RUN, replace(MACHINE, on_cpu=False), 3.0)
    assert (card.trainer_memory, card.device_memory, card.locked) == ((400 + 8 + 2 + 1 + 12) * MB, 46 * MB, 12 * MB)
    assert needs.locked == 0
    sharded = needs_on(RUN, replace(MACHINE, processes=2, shards=2, on_cpu=False), 3.0)
    assert sharded.trainer_memory == (400 + 8 + 2 + 1 + 13 + 400) * MB, "theta once more, and nothing is pinned"
    assert (sharded.device_memory, sharded.locked) == ((16 // 2 + 30 + 3) * MB, 0)


def test_a_checkpoint_as_it_is_written_is_the_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Needs.disk` counts is what a disk must hold."""
    replica = make_replica(sealed_run(), tmp_path)
    folder, most = tmp_path / "kept", 0
    tree = checkpoint.shutil.rmtree

    def removed(path: Path, ignore_errors: bool = False) -> None:
        nonlocal most
        most = max(most, len(list(folder.glob("round-????????"))))
        tree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", removed)
    for _ in range(4):
        replica.solo()
        save(replica, folder, "alice")
    assert most == checkpoint.KEPT + 1


def test_operations_are_those_of_the_formula_by_hand() -> None:
    manifest = presets.local_run(presets.MODELS["tiny"], rounds=1, inner_steps=1, seed=1, own_text=False)
    needs = estimate(manifest)
    tokens, layers, hidden, sequence = 4 * 128, 2, 64, 128
    alone = tokens * (6 * needs.parameters + 12 * layers * hidden * sequence)
    square, wide = (5 * (4 * 64**2 * width + 2 * 64**3) for width in (64, 176))
    assert needs.operations == alone + layers * (4 * square + 3 * wide)
    inner = msgspec.structs.replace(manifest.inner, optimizer="adamw")
    needs = estimate(msgspec.structs.replace(manifest, inner=inner))
    assert (needs.operations, needs.on_device) == (alone, 16 * needs.parameters)


def test_a_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--line", "20/5Mbit", "--data-dir", str(tmp_path / "home"))
    cli.main(["create", str(RUNS / "10m.toml"), "--plan", "--device", "cpu", *line])
    out = " ".join(capsys.readouterr().out.split())
    assert "10,720,128 parameters" in out
    assert "every 24 inner steps" in out
    assert "at 20/5 Mbit/s" in out
    assert "a newcomer fetches 21.5 MB, " in out
    assert "559 MB: three checkpoints at the peak, two files of weights" in out
    assert not (tmp_path / "home").exists()


def test_a_plan_for_a_line_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["create", str(RUNS / "10m.toml"), "--plan", "--line", "fast"])
    assert "--line 'fast'" in capsys.readouterr().err
