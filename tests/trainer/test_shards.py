"""A model in shards over the devices of a node: what is cut, which runs may have it, and when it is chosen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replaced
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from nolocod.errors import DeviceError, ModelTooLargeError, UnsupportedModelError
from nolocod.paths import DataDir
from nolocod.run.manifest import Inner, Outer
from nolocod.trainer import muon, shards
from nolocod.trainer.inner import pieces
from nolocod.trainer.model import BYTES_ON_HOST, Place, bytes_on_device, check_memory, fast_kind, layout_of, read_config
from nolocod.trainer.opening import open_shared
from tests.support.architectures import CASES
from tests.support.base_model import publish
from tests.support.chat_templates import plain
from tests.support.trainer_parts import make_replica, sealed_run, setup_for
from tests.trainer import test_adapter, test_objective
from tests.trainer.test_ranks import CLOSE, INNER, ranks_below, shared

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.model import Layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3", "mamba"])
def test_an_architecture_trains_as_on_one_device(tmp_path: Path, model_type: str) -> None:
    """Tied weights, buffers, experts, and states in place of attention."""
    sealed = sealed_run(model=CASES[model_type] | {"model_type": model_type}, inner=replace(INNER, batch=1))
    alone = make_replica(sealed, tmp_path)
    with shared(sealed, tmp_path, "shard:cpu:2") as replica:
        for one in (alone, replica):
            for _ in range(3):
                one.step()
        assert (replica.theta - alone.theta).abs().max() <= CLOSE


def test_an_adapter_trains_beside_a_base_in_shards(tmp_path: Path) -> None:
    sealed = test_adapter.founded(tmp_path, publish(tmp_path / "published"))
    alone = test_adapter.replica_of(sealed, tmp_path)
    base = DataDir(tmp_path / "node").base
    setup = setup_for(sealed, tmp_path, data=tmp_path / "text.txt", base=base, devices="shard:cpu:2")
    (tmp_path / "text.txt").write_text(" ".join(test_adapter.TEXT.split()[::-1]))
    replica, _ = open_shared(setup, sealed, lambda event: None, lambda failed: None)
    try:
        for one in (alone, replica):
            for _ in range(3):
                one.step()
        assert (replica.theta - alone.theta).abs().max() <= 1e-4, "at its rate of 1e-2"
        rounded = fast_kind(torch.device("cpu")) == torch.bfloat16  # the base is multiplied in it, by one or two rows at a time
        assert abs(replica.evaluate() - alone.evaluate()) <= (1e-3 if rounded else 1e-5)
    finally:
        replica.close()


def test_answers_are_learnt_in_shards(tmp_path: Path) -> None:
    """The devices find out together whether the model keeps documents apart."""
    base = publish(tmp_path / "published", template=plain("chatml"), special=test_objective.SPECIAL)
    sealed, data = test_objective.founded(tmp_path, base, "chat")
    alone = test_objective.opened(sealed, data, base)
    setup = setup_for(sealed, tmp_path, data=data, base=base, devices="shard:cpu:2")
    replica, _ = open_shared(setup, sealed, lambda event: None, lambda failed: None)
    try:
        for one in (alone, replica):
            one.step()
            one.step()
        assert (replica.theta - alone.theta).abs().max() <= 1e-4, "at its rate of 2e-3"
        assert abs(replica.evaluate() - alone.evaluate()) <= 1e-4
    finally:
        replica.close()


def test_only_the_fragments_that_are_asked_for_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealed_run(inner=INNER, outer=Outer(rounds=100, turns=4))
    with shared(sealed, tmp_path, "shard:cpu:2") as replica:
        replica.step()
        brought: list[slice] = []
        give = shards.Area.give
        monkeypatch.setattr(shards.Area, "give", lambda self, rows, span: (brought.append(span), give(self, rows, span)))
        replica.solo()
        assert brought == [replica.plan.fragments[0].span]
        replica.evaluate()
        replica.solo(subject=2)
        replica.step()
        first, last = (replica.plan.fragments[index].span for index in (0, 2))
        assert brought == [first, last], "the first is there already"


def test_what_lies_between_two_changes_is_not_set_back(tmp_path: Path) -> None:
    """Outer steps about the first and the third of four fragments, with no inner step between."""
    sealed = sealed_run(inner=INNER, outer=Outer(rounds=100, turns=4))
    alone = make_replica(sealed, tmp_path)
    with shared(sealed, tmp_path, "shard:cpu:2") as replica:
        for one in (alone, replica):
            one.step()
            one.step()
            one.solo(subject=0)
            one.solo(subject=2)
            one.step()
        assert (replica.theta - alone.theta).abs().max() <= CLOSE


def test_idle_windows_count_for_nothing() -> None:
    windows = torch.arange(5)[:, None]
    assert [(part.flatten().tolist(), counts) for part, counts in pieces(windows, 2, 2)] == [
        ([0, 1], True), ([2], True), ([3], False), ([4], False),
    ]  # fmt: skip
    assert list(pieces(windows[:0], 2)) == []


# --- which runs, and when


def facts(manifest: Manifest) -> tuple[Layout, int]:
    config = read_config(manifest, 256)
    return layout_of(config, manifest.adapter), config.vocab_size


def test_what_cannot_lie_in_shards_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = sealed_run(inner=INNER).manifest
    layout, _ = facts(manifest)
    shards.check_shards(manifest, layout, 16)
    pairs = replace(manifest, data=replace(manifest.data, kind="preference", source="jsonl"))
    scalar = replaced(layout, names=("scale", *layout.names), shapes=((), *layout.shapes))
    for refused, of, bits, why in (
        (pairs, layout, 16, "from preferences"),
        (manifest, layout, 8, "--base-bits and shards"),
        (manifest, scalar, 16, "scale has no rows"),
    ):
        with pytest.raises(UnsupportedModelError, match=why):
            shards.check_shards(refused, of, bits)
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    sealed = sealed_run(inner=INNER)
    with pytest.raises(UnsupportedModelError, match="too old for shards"):
        open_shared(setup_for(sealed, tmp_path, devices="shard:cpu:2"), sealed, lambda event: None, lambda failed: None)
    assert ranks_below(psutil.Process()) == []


def test_shards_are_chosen_where_the_whole_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = sealed_run(
        inner=Inner(batch=2, accumulation=2, sequence=8), model=CASES["llama"] | {"model_type": "llama"}
    ).manifest
    layout, vocabulary = facts(manifest)
    both, free = [CPU, CPU], psutil.virtual_memory()

    def chosen(named: str, available: int) -> bool:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=available))
        return shards.in_shards(named, both[: 1 if named in ("cpu", "shard:all") else 2], layout, vocabulary, manifest)

    assert not chosen("cpu:2", 1 << 40)
    assert chosen("shard:cpu:2", 1 << 40)
    with pytest.raises(DeviceError, match="there is one device"):
        chosen("shard:all", 1 << 40)
    enough = 2 * bytes_on_device(layout, manifest, torch.float32) + BYTES_ON_HOST * layout.size
    assert chosen("cpu:2", enough)
    with pytest.raises(ModelTooLargeError):
        chosen("cpu", enough // 4)
    preferences = replace(manifest, data=replace(manifest.data, kind="preference", source="jsonl"))
    with pytest.raises(ModelTooLargeError):
        shards.in_shards("cpu:2", both, layout, vocabulary, preferences)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=enough))
    with pytest.raises(ModelTooLargeError):
        check_memory(layout, vocabulary, manifest, 0, Place(CPU, processes=2))
    large = replaced(layout, shapes=(*layout.shapes, (1 << 20, 8)), names=(*layout.names, "z"))
    spread = bytes_on_device(large, manifest, torch.float32) + (BYTES_ON_HOST + 12) * large.size + 16 * (8 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=spread + (1 << 20)))
    check_memory(large, vocabulary, manifest, 0, Place(CPU, processes=2, shards=2))


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_matrices_have_the_update_that_the_whole_have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In threads, with gloo: where a CPU multiplies in bfloat16, its rounding would hide what is to be seen. The last of three
    devices has no row of some, and of fewer matrices than devices one has none to compute."""
    monkeypatch.setattr(muon, "fast_kind", lambda device: torch.float32)
    generator, store = torch.Generator().manual_seed(0), dist.HashStore()  # type: ignore[attr-defined] # it is public
    shapes = [torch.Size(shape) for shape in [(5, 4)] * count + [(2, 7)]]  # rows are made alike, and columns
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]

    def train(rank: int) -> list[torch.Tensor]:
        gloo = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=60))

        def trade(given: torch.Tensor, sizes: list[int], got: list[int]) -> torch.Tensor:
            found = given.new_empty(sum(got))
            gloo.alltoall_base(found, given, got, sizes).wait()
            return found

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return (*tensor.chunk(3), tensor[:0])[rank].clone()  # of two rows the third device has none

        rows = [own(matrix) for matrix in whole]
        group: Any = SimpleNamespace(rank=rank, count=3, trade=trade, add=lambda tensor: gloo.allreduce([tensor]).wait())
        optimizer = shards.ShardedMuon(rows, shapes, group)
        for _ in range(2):
            for one, gradient in zip(rows, gradients, strict=True):
                one.grad = own(gradient)
            optimizer.step(0.1, 0.1, torch.ones(()))
        return rows

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(train, range(3)))
    alone = [one.clone() for one in whole]
    optimizer = muon.Muon(alone, shapes)
    for _ in range(2):
        for one, gradient in zip(alone, gradients, strict=True):
            one.grad = gradient.clone()
        optimizer.step(0.1, 0.1, torch.ones(()))
    for index, one in enumerate(alone):
        torch.testing.assert_close(torch.cat([rows[index] for rows in found]), one, rtol=0, atol=CLOSE)
        assert (one - whole[index]).abs().max() > 0.01
