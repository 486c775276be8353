"""A base in fewer bits beside an adapter: what is rounded, what is not, and that replicas of unlike bits exchange."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from nolocod.errors import UnsupportedModelError
from nolocod.run.manifest import seal
from nolocod.trainer import founding
from nolocod.trainer.base_model import initial
from nolocod.trainer.model import ON_CPU, bytes_on_device, layout_of, read_config
from nolocod.trainer.replica import open_replica
from tests.support.architectures import exchange
from tests.support.base_model import RUN_FILE, TEXT, publish
from tests.support.trainer_parts import OWNER, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Sealed
    from nolocod.trainer.replica import Replica


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model", hidden_size=64, intermediate_size=128)


@pytest.fixture
def sealed(tmp_path: Path, base: Path) -> Sealed:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(base=base).replace("1e-4", "1e-2") + '[adapter]\nkind = "lora"\nrank = 4\n')
    return seal(founding.read(path)[0], OWNER)


def replica_of(sealed: Sealed, base: Path, folder: Path, bits: int) -> Replica:
    (folder / "text.txt").write_text(" ".join(TEXT.split()[::-1]))
    return open_replica(sealed, f"{bits}", folder / "text.txt", folder / "cache", replace(ON_CPU, base=base, bits=bits))


@pytest.mark.parametrize(("bits", "kind", "error"), [(8, torch.int8, 0.02), (4, torch.uint8, 0.08)])
def test_matrices_are_rounded_and_all_else_is_as_it_was(
    sealed: Sealed, base: Path, bits: int, kind: torch.dtype, error: float
) -> None:
    config = read_config(sealed.manifest, 320)
    whole, rounded = (initial(sealed.manifest, copy.deepcopy(config), base, bits=one).eval() for one in (16, bits))
    as_before = dict(whole.named_parameters())
    matrices = 0
    for name, one in rounded.named_parameters():
        if "_proj" in name and "lora_" not in name:
            assert one.dtype == kind, name
            assert not one.requires_grad
            matrices += as_before[name].numel()
        else:
            assert torch.equal(one, as_before[name]), name
    layout = layout_of(config, sealed.manifest.adapter)
    assert layout.frozen_matrices == matrices
    spared = bytes_on_device(layout, sealed.manifest, torch.bfloat16) - bytes_on_device(
        layout, sealed.manifest, torch.bfloat16, bits
    )
    assert spared == matrices * (16 - bits) // 8
    ids = torch.arange(32)[None]
    with torch.no_grad():
        one, other = (model(input_ids=ids).logits for model in (whole, rounded))
    assert 0 < ((one - other).norm() / one.norm()).item() < error


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_go_through_the_matrices_after_an_evaluation_too(sealed: Sealed, base: Path, bits: int) -> None:
    """Where a processor has bfloat16, the library's layers of 4 bits are packed for inference then."""
    model = initial(sealed.manifest, read_config(sealed.manifest, 320), base, torch.bfloat16, bits)
    layer = model.get_submodule("model.layers.0.mlp.down_proj.base_layer")
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(32)[None])
        matrix = layer(torch.eye(128))
    model.train()
    x, gradient = torch.randn(16, 128, requires_grad=True), torch.randn(16, 64)
    layer(x).backward(gradient)
    assert x.grad is not None
    expected = gradient @ matrix.T.float()
    assert ((x.grad - expected).norm() / expected.norm()).item() < 0.02


def test_replicas_with_bases_of_unlike_bits_train_and_exchange(sealed: Sealed, base: Path, tmp_path: Path) -> None:
    nodes = [replica_of(sealed, base, tmp_path, bits) for bits in (8, 4)]
    assert torch.equal(nodes[0].theta, nodes[1].theta), "the adapter begins the same everywhere"
    before = [node.evaluate() for node in nodes]
    for node in nodes:
        for _ in range(20):
            node.step()
        node.report()
    exchange(*nodes)
    assert [node.standing.round for node in nodes] == [1, 1]
    assert all(node.evaluate() < loss - 0.1 for node, loss in zip(nodes, before, strict=True))


def test_without_the_library_or_an_adapter_it_is_refused(
    sealed: Sealed, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="this one trains the whole model"):
        replica_of(sealed_run(), base, tmp_path, 8)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedModelError, match="bitsandbytes is not installed") as caught:
        replica_of(sealed, base, tmp_path, 4)
    assert "[bits]" in caught.value.remedy
