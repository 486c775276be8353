"""The mean of members' weights, and who of them is left out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from nolocod.errors import RejectedTensorError
from nolocod.identity import Identity, PeerId
from nolocod.run import presets
from nolocod.run.manifest import Sealed, seal
from nolocod.trainer import checkpoint
from nolocod.trainer.average import Members
from nolocod.trainer.model import layout_of, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@pytest.fixture(scope="module")
def sealed() -> Sealed:
    run = presets.local_run(presets.llama(32, 1, 2, 64), rounds=1, inner_steps=1, seed=1, own_text=False)
    return seal(
        msgspec.structs.replace(run, evaluation=msgspec.structs.replace(run.evaluation, batches=1)), Identity.generate()
    )


class Given:
    """Members' files in `folder`, made of one flat tensor and a part of each one's own."""

    def __init__(self, folder: Path, sealed: Sealed) -> None:
        self.members = Members(sealed, None, folder, None)
        self.layout = layout_of(read_config(sealed.manifest, 256))
        self.base = 0.02 * torch.randn(self.layout.size, generator=torch.Generator().manual_seed(1))
        self.files: dict[PeerId, Path] = {}
        self.folder = folder

    def near(self) -> Tensor:
        """Another honest replica."""
        own = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(len(self.files)))
        return self.base + 0.002 * own

    def put(self, flat: Tensor) -> PeerId:
        peer = PeerId(f"peer {len(self.files)}")
        self.files[peer] = self.folder / f"{peer}.weights"
        with self.files[peer].open("wb") as handle:
            said, kinds = {"run_id": self.members.sealed.run_id}, self.layout.donated(self.members.sealed.manifest.weights)
            checkpoint.write_tensors(handle, dict(self.layout.split(flat)), said, kinds=kinds)
        return peer

    def admitted(self) -> Members:
        for peer, path in self.files.items():
            self.members.admit(peer, path)
        return self.members


@pytest.fixture
def given(tmp_path: Path, sealed: Sealed) -> Given:
    return Given(tmp_path, sealed)


def test_the_mean_is_the_mean_and_a_file_has_the_size_that_is_due(given: Given) -> None:
    for _ in range(4):
        given.put(given.near())
    flats = [torch.cat([t.reshape(-1) for _, t in sorted(checkpoint.read_tensors(p).items())]) for p in given.files.values()]
    members = given.admitted()
    mean = members.mean([*given.files.values()])
    torch.testing.assert_close(mean.double(), torch.stack(flats).double().mean(0), rtol=1e-6, atol=1e-9)
    assert members.objections(given.files) == {}
    assert set(members.losses) == set(given.files)
    assert members.loss(mean) == pytest.approx(5.5, abs=0.3), "a model of noise"
    assert {path.stat().st_size for path in given.files.values()} == {members.size}


@pytest.mark.parametrize("lie", ["noise", "flipped", "one matrix of zeros"])
def test_a_liar_among_three_is_left_out_and_of_two_that_disagree_both(given: Given, lie: str) -> None:
    flat = given.near()
    if lie == "noise":
        flat = 0.02 * torch.randn(flat.shape)
    elif lie == "flipped":
        flat = -flat
    else:
        dict(given.layout.split(flat))["model.layers.0.mlp.up_proj.weight"].zero_()
    liar = given.put(flat)
    honest = given.put(given.near())
    members = given.admitted()
    assert set(members.objections(given.files)) == {liar, honest}, "nobody knows who of two lies"
    given.put(given.near())
    found = given.admitted().objections(given.files)
    assert set(found) == {liar}
    assert "from most others'" in found[liar]


def test_two_that_lie_alike_are_left_out_among_five(given: Given) -> None:
    liars = {given.put(-given.base), given.put(-given.base)}
    for _ in range(3):
        given.put(given.near())
    assert set(given.admitted().objections(given.files)) == liars


def test_who_is_near_and_much_worse_on_held_out_text_is_left_out(given: Given) -> None:
    peers = [given.put(given.near()) for _ in range(3)]
    members = given.admitted()
    assert members.objections(given.files) == {}
    usual = members.losses[peers[1]]
    members.losses[peers[1]] = 1.15 * usual  # an honest one in a young run
    assert members.objections(given.files) == {}
    members.losses[peers[1]] = 1.4 * usual
    assert set(members.objections(given.files)) == {peers[1]}


def test_whose_loss_is_no_number_does_not_count(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = given.put(given.near())
    with monkeypatch.context() as patch:
        patch.setattr(Members, "loss", lambda _, __: float("nan"))
        given.members.admit(broken, given.files[broken])
    for _ in range(2):
        peer = given.put(given.near())
        given.members.admit(peer, given.files[peer])
    assert set(given.members.objections(given.files)) == {broken}


def test_what_does_not_fit_or_is_not_finite_is_not_admitted(given: Given) -> None:
    broken = given.near()
    broken[7] = torch.inf
    given.put(broken)
    with pytest.raises(RejectedTensorError):
        given.admitted()
    given.files.clear()
    other = given.folder / "other"
    other.write_bytes(b"no weights")
    with pytest.raises(RejectedTensorError):
        given.members.admit(PeerId("x"), other)
