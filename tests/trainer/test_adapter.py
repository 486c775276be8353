"""An adapter beside a published model: what is trained, sent and kept, how it is exported, and what is refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nolocod import cli
from nolocod.errors import RunFileError, UnsupportedModelError
from nolocod.node.base import link_base
from nolocod.observe.words import amount
from nolocod.paths import DataDir
from nolocod.run.manifest import seal, unseal
from nolocod.trainer import checkpoint, founding, offline
from nolocod.trainer.base_model import initial
from nolocod.trainer.estimate import estimate
from nolocod.trainer.inner import mean_loss
from nolocod.trainer.model import ON_CPU, layout_of, read_config
from nolocod.trainer.objective import Preferences, objective_of
from nolocod.trainer.replica import open_replica
from tests.support.architectures import CASES, exchange
from tests.support.base_model import RUN_FILE, TEXT, publish
from tests.support.trainer_parts import MODEL, OWNER, as_donated, dump, save, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Sealed
    from nolocod.trainer.replica import Replica

RANK = 4
ADAPTER = f'kind = "lora"\nrank = {RANK}\n'
PER_LAYER = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
"""In and out of llama's seven matrices (base_model.CONFIG): q and o, k and v, the feed-forward's three."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model")


def founded(folder: Path, base: Path, lines: str = ADAPTER) -> Sealed:
    """The run, with the base linked in the data directory `folder`/node, as `create` does."""
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(base=base).replace("1e-4", "1e-2") + f"[adapter]\n{lines}")
    sealed = seal(founding.read(path)[0], OWNER)
    assert sealed.manifest.base is not None
    link_base(sealed.manifest.base, base, DataDir(folder / "node").base)
    return sealed


def replica_of(sealed: Sealed, folder: Path, peer: str = "alice") -> Replica:
    (folder / "text.txt").write_text(" ".join(TEXT.split()[::-1]))  # the base knows it the other way round
    return open_replica(
        sealed, peer, folder / "text.txt", folder / "cache", replace(ON_CPU, base=DataDir(folder / "node").base)
    )


def train(replica: Replica, steps: int = 10) -> None:
    for _ in range(steps):
        replica.step()
    replica.report()


# --- what is trained


def test_only_the_adapter_is_trained_sent_and_kept(tmp_path: Path, base: Path) -> None:
    replica = replica_of(founded(tmp_path, base), tmp_path)
    frozen = {name: one.clone() for name, one in replica.model.named_parameters() if "lora_" not in name}
    before = replica.evaluate()
    train(replica, 20)
    assert replica.evaluate() < before - 0.1
    size = 2 * RANK * PER_LAYER
    assert (replica.layout.size, replica.theta.numel()) == (size, size)
    assert replica.plan.box_size < 2 * size * 1.2, "at most two bytes of each, and records' heads"
    for name, one in replica.model.named_parameters():
        assert "lora_" in name or torch.equal(one, frozen[name]), name
    assert all("lora_" in name for name in replica.snapshot()[0])
    assert save(replica, tmp_path / "checkpoints", "alice") < 20 * size + 20_000


def test_nodes_start_as_the_base_with_the_same_matrices(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base)
    torch.manual_seed(1)
    alice = replica_of(sealed, tmp_path)
    torch.manual_seed(2)
    bob = replica_of(sealed, tmp_path, "bob")
    assert torch.equal(alice.theta, bob.theta)
    named = dict(alice.layout.split(alice.phi))
    assert all(named[name].any() == ("lora_A" in name) for name in named)
    first = named["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert 0.9 / math.sqrt(32) < first.abs().max() < 1 / math.sqrt(32), "as LoRA's authors draw them, by the inputs' number"
    other = seal(msgspec.structs.replace(sealed.manifest, seed=1), OWNER)
    assert not torch.equal(replica_of(other, tmp_path).theta, alice.theta)
    model = initial(sealed.manifest, alice.model.config, base)
    published = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    ids = torch.arange(32)[None]
    assert torch.equal(model.eval()(input_ids=ids).logits, published.eval()(input_ids=ids).logits)


def test_the_base_is_frozen_in_bfloat16_where_the_hardware_has_it(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base)
    config = read_config(sealed.manifest, 320)
    held = {kind: initial(sealed.manifest, config, base, kind) for kind in (torch.bfloat16, torch.float32)}
    for name, one in held[torch.bfloat16].named_parameters():
        other = held[torch.float32].get_parameter(name)
        assert (one.dtype, other.dtype) == (torch.float32 if "lora_" in name else torch.bfloat16, torch.float32), name
        assert torch.equal(one.float(), other), "the same values"
        assert one.requires_grad == ("lora_" in name)
    assert held[torch.bfloat16].get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


def test_what_preferences_are_compared_by_shares_the_base(tmp_path: Path, base: Path) -> None:
    manifest = founded(tmp_path, base).manifest
    model = initial(manifest, read_config(manifest, 320), base)
    data = msgspec.structs.replace(manifest.data, source="jsonl", kind="preference")
    objective = objective_of(msgspec.structs.replace(manifest, data=data), model)
    assert isinstance(objective, Preferences)
    for name, one in model.named_parameters():
        assert (objective._reference.get_parameter(name) is one) == ("lora_" not in name), name
        assert one.requires_grad == ("lora_" in name)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base)
    alice, bob = (replica_of(sealed, tmp_path, peer) for peer in ("alice", "bob"))
    for _ in range(2):
        train(alice)
        train(bob)
        exchange(alice, bob)
    assert torch.equal(alice.phi, bob.phi)
    train(alice, 3)
    save(alice, tmp_path / "checkpoints", "alice")
    again = replica_of(sealed, tmp_path)
    found = checkpoint.find(tmp_path / "checkpoints", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    again.restore(found.path, found.state)
    for one in (alice, again):
        train(one, 7)
        one.solo()
        train(one, 2)
    assert all(torch.equal(getattr(alice, name), getattr(again, name)) for name in ("theta", "phi", "delta"))


def test_a_newcomer_takes_a_donor_s_matrices(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base)
    donor, newcomer = (replica_of(sealed, tmp_path, peer) for peer in ("alice", "bob"))
    train(donor)
    donor.solo()
    description = dump(donor, tmp_path / "snapshot")
    assert description.size < 2 * donor.layout.size + 10_000
    newcomer.adopt(tmp_path / "snapshot", donor.standing)
    assert torch.equal(newcomer.phi, as_donated(donor))
    first = donor.layout.names[0]
    assert torch.equal(newcomer.model.get_parameter(first), dict(newcomer.layout.split(newcomer.phi))[first])


# --- what is exported


def loss_of(model: torch.nn.Module, replica: Replica) -> float:
    return mean_loss(model.float().eval(), replica.source.held_out(4), 4, torch.device("cpu"))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_adapter_and_the_merged_model_have_the_run_s_loss(tmp_path: Path, base: Path, model_type: str) -> None:
    """GPT-2's matrices lie the other way round."""
    from peft import PeftModel  # takes in bitsandbytes, and with that a compiler: six seconds of each process of ./test

    if model_type == "gpt2":
        (folder := tmp_path / "gpt2").mkdir()
        (folder / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=320, **CASES["gpt2"]))
        model.to(torch.bfloat16).save_pretrained(base := folder)
    sealed = founded(tmp_path, base)
    replica, paths = replica_of(sealed, tmp_path), DataDir(tmp_path / "node")
    train(replica, 20)
    replica.solo()
    save(replica, paths.checkpoints, "alice")
    told = offline.evaluate(paths, sealed, tmp_path / "text.txt")
    for folder, merged in (("adapter", False), ("merged", True)):
        offline.export(paths, sealed, tmp_path / folder, merged=merged)
    assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = loss_of(plain, replica)
    loaded = loss_of(PeftModel.from_pretrained(plain, tmp_path / "adapter"), replica)
    whole, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert told < before - 0.1
    assert loaded == pytest.approx(told, abs=1e-4)
    assert loss_of(whole, replica) == pytest.approx(told, abs=1e-4)
    assert replica.evaluate() == pytest.approx(told, abs=0.03), "what bfloat16 costs, where the hardware has it"


def test_there_is_nothing_to_merge_without_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DataDir(tmp_path).manifest.write_bytes(sealed_run(model=MODEL).to_bytes())
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "out"), "--merged", "--data-dir", str(tmp_path)])
    assert "the run has no adapter: its model is exported whole." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- what is refused


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ADAPTER + 'targets = ["q_proj", "query"]',
            r"no layer is named 'query'; there are down_proj, gate_proj, k_proj, o_proj,",
        ),
        (ADAPTER + 'targets = ["lm_head"]', r"no layer is named 'lm_head'"),
        (ADAPTER + 'targets = ["proj"]', r"no layer is named 'proj'"),
        (ADAPTER + 'targets = ["q.*"]', r"targets"),
        ('kind = "lora"\nrank = 17', r"`adapter.rank` = 17 is more than model.layers.0.self_attn.k_proj has: 16"),
        ('kind = "lora"\nrank = 0', r"line \d+, key `adapter.rank`"),
        ('kind = "lora"\nrank = 1025', r"line \d+, key `adapter.rank`"),
        ('kind = "lora"\nalpha = 0.0', r"line \d+, key `adapter.alpha`"),
        ('kind = "ia3"', r"line \d+, key `adapter.kind`"),
        ("rank = 4", r"kind"),
    ],
)
def test_an_adapter_that_no_node_could_train(tmp_path: Path, base: Path, lines: str, says: str) -> None:
    with pytest.raises(RunFileError, match=says) as caught:
        founded(tmp_path, base, lines)
    assert caught.value.code == "NLC-101"
    assert caught.value.remedy


def test_targets_are_ends_of_names(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base, ADAPTER + 'targets = ["self_attn.q_proj", "up_proj"]')
    layout = layout_of(read_config(sealed.manifest, 320), sealed.manifest.adapter)
    assert {name.split(".")[4] for name in layout.names} == {"q_proj", "up_proj"}
    assert layout.size == 2 * RANK * (2 * 32 + 32 + 64)


def test_an_adapter_needs_a_base(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n[model]\nmodel_type = "llama"\n[adapter]\n{ADAPTER}')
    with pytest.raises(RunFileError, match=r"`adapter` needs `model.base`"):
        founding.read(path)


def test_without_peft_it_is_told_what_to_install(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedModelError, match="peft is not installed here") as caught:
        founded(tmp_path, base)
    assert "nolocod with its extra [adapters]" in caught.value.remedy


def test_a_run_without_an_adapter_is_signed_as_before_and_one_with_it_reads_back(tmp_path: Path, base: Path) -> None:
    assert b"adapter" not in sealed_run(model=MODEL).body
    sealed = founded(tmp_path, base)
    assert unseal(sealed.to_bytes()).manifest == sealed.manifest


# --- what it takes


def test_what_is_planned_is_what_a_replica_has(tmp_path: Path, base: Path) -> None:
    sealed = founded(tmp_path, base)
    replica = replica_of(sealed, tmp_path)
    needs = estimate(sealed.manifest, base)
    frozen = sum(one.numel() for name, one in replica.model.named_parameters() if "lora_" not in name)
    size = replica.layout.size
    assert (needs.trained, needs.parameters, needs.message) == (size, size + frozen, replica.plan.box_size)
    assert needs.on_device == 16 * size + 2 * frozen
    assert estimate(sealed.manifest, base, torch.float32).on_device == 16 * size + 4 * frozen
    assert needs.on_host == 8 * size + replica.plan.exchange_size
    tokens, layers, hidden, sequence = 2 * 32, 2, 32, 32
    assert needs.operations == tokens * (6 * size + 4 * frozen + 12 * layers * hidden * sequence)


def test_the_plan_tells_the_adapter(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    founded(tmp_path, base)
    cli.main(["create", str(tmp_path / "run.toml"), "--plan", "--device", "cpu", "--data-dir", str(tmp_path / "home")])
    out = " ".join(capsys.readouterr().out.split())
    assert f"adapter {2 * RANK * PER_LAYER:,} parameters, which alone are trained and exchanged" in out
    assert f"checkpoint {amount(20 * 2 * RANK * PER_LAYER)}, about" in out
