"""What `create` looks at before a run is founded: published configurations, and what no node could train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nolocod.errors import RunFileError, TooLongError, UnsupportedModelError
from nolocod.identity import Identity
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, seal, unseal
from nolocod.trainer import founding, inner
from nolocod.trainer.model import build, layout_of, read_config
from nolocod.trainer.objective import NextToken, cross_entropy
from tests.support.architectures import CASES, run_file
from tests.support.trainer_parts import MODEL, make_replica, sealed_run

PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))
GPT2 = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64}


def created(folder: Path, config: dict[str, Any], more: str = "") -> tuple[Manifest, list[str]]:
    """The run of a published configuration, and the keys that were left out of it."""
    path = run_file(folder, config["model_type"], config)
    path.write_text(path.read_text() + more)
    told: list[str] = []
    manifest, _ = founding.read(path, told.append)
    return manifest, [line.split("`")[1].removeprefix("model.") for line in told]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_configurations_make_runs(tmp_path: Path, path: Path) -> None:
    """The keys of the files as they were published; the sizes are small."""
    config = json.loads(path.read_text())
    manifest, left_out = created(tmp_path, config)
    assert manifest.model == {key: value for key, value in config.items() if key not in left_out}
    assert {"architectures", "transformers_version"} & config.keys() <= set(left_out)
    again = unseal(seal(manifest, Identity.generate()).to_bytes()).manifest  # as a node gets it
    model = build(read_config(again, 256), 0)
    assert layout_of(model.config).size == sum(parameter.numel() for parameter in model.parameters())
    for key in ("vocab_size", "hidden_size", "max_position_embeddings", "head_dim", "eos_token_id", "sliding_window"):
        if config.get(key) is not None and key in manifest.model and config.get("use_sliding_window") is not False:
            assert getattr(model.config, key) == config[key]


def test_old_names_mean_what_they_meant(tmp_path: Path) -> None:
    configs = {path.stem: json.loads(path.read_text()) for path in PUBLISHED}
    llama = read_config(created(tmp_path, configs["llama-3.2"])[0], 256).to_json_string(use_diff=False)
    assert "500000.0" in llama
    assert '"llama3"' in llama
    pythia = read_config(created(tmp_path, configs["pythia"])[0], 256)
    assert "0.25" in pythia.to_json_string(use_diff=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hiden_size": 3}, "`model.hiden_size` is not a key of the llama architecture"),
        ({"rotary_pct": 0.5}, "`model.rotary_pct` is not a key of the llama architecture"),
        ({"rope_interleaved": True}, "`model.rope_interleaved` is not a key"),
        ({"trust_remote_code": True}, "`model.trust_remote_code` is set: no code"),
        ({"quantization_config": {"quant_method": "awq"}}, "`model.quantization_config` is set: quantized"),
        ({"use_kernels": True}, "`model.use_kernels` is set: it has code fetched"),
        ({"rms_norm_eps": float("inf")}, "`model.rms_norm_eps` holds a number that is not finite"),
        ({"hidden_act": "some/where"}, "`model.hidden_act` holds 'some/where'"),
        ({"intermediate_size": "large"}, "`[model]`"),
    ],
)
def test_a_key_that_may_mean_something_or_that_fetches_code_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    with pytest.raises(RunFileError) as caught:
        created(tmp_path, MODEL | change)
    assert says in caught.value.cause


def test_what_names_code_or_a_repository_is_left_out_and_told(tmp_path: Path) -> None:
    named = {"auto_map": {"AutoConfig": "evil--code.Config"}, "_name_or_path": "/etc/passwd", "trust_remote_code": False}
    manifest, told = created(tmp_path, MODEL | named | {"attn_implementation": "somebody/kernel", "torch_dtype": "bfloat16"})
    assert manifest.model == MODEL
    assert set(told) == {*named, "attn_implementation", "torch_dtype"}


def test_keys_in_the_run_file_count_before_those_of_the_configuration_it_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[model]\nnum_hidden_layers = 3\nconfig = "config.json"\n')
    assert founding.read(path)[0].model == MODEL | {"num_hidden_layers": 3}


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"model_type": 5}', "[" * 100_000])
def test_a_configuration_that_is_none_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[model]\nconfig = "config.json"\n')
    with pytest.raises(RunFileError, match="model"):
        founding.read(path)


def test_a_sequence_longer_than_the_model_s_positions_is_refused_with_the_key(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2"} | GPT2
    with pytest.raises(TooLongError, match=r"`inner.sequence` = 65 is more than `model.n_positions` = 64"):
        created(tmp_path, gpt2, "[inner]\nsequence = 65\n")
    assert created(tmp_path, gpt2, "[inner]\nsequence = 64\n")[0].inner.sequence == 64
    with pytest.raises(TooLongError, match="max_position_embeddings"):
        created(tmp_path, MODEL | {"max_position_embeddings": 64}, "[inner]\nsequence = 65\n")


def test_a_node_of_a_run_that_was_signed_without_that_look_has_the_same_error(tmp_path: Path) -> None:
    inner = Inner(steps=4, batch=2, sequence=65)
    with pytest.raises(TooLongError):
        make_replica(sealed_run(model={"model_type": "gpt2"} | GPT2, inner=inner), tmp_path)
    rotary = make_replica(sealed_run(model=MODEL | {"max_position_embeddings": 64}, inner=inner), tmp_path)
    rotary.step()  # such runs exist, and go on


def test_parts_that_do_not_fit_are_found_without_a_step(tmp_path: Path) -> None:
    """The states of mamba 2: eight groups by default, for four heads."""
    mamba2 = CASES["mamba2"] | {"n_groups": 8, "model_type": "mamba2"}
    with pytest.raises(RunFileError, match="does not compute"):
        created(tmp_path, mamba2)


def test_the_limit_that_json_has_no_number_for_is_the_architecture_s_own(tmp_path: Path) -> None:
    mamba2 = CASES["mamba2"] | {"model_type": "mamba2"}
    for unbounded in (float("inf"), {"__float__": "Infinity"}):
        manifest, told = created(tmp_path, mamba2 | {"time_step_limit": [0.0, unbounded]})
        assert told == ["time_step_limit"]
        assert read_config(manifest, 256).time_step_limit == (0.0, float("inf"))
    with pytest.raises(UnsupportedModelError, match="time_step_limit"):
        created(tmp_path, mamba2 | {"time_step_limit": [0.1, float("inf")]})


# --- experts


def routed(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """The largest share of tokens that one expert of the first layer has."""
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1], output_router_logits=True).router_logits[0]
    top = logits.reshape(-1, logits.shape[-1]).topk(2, dim=-1).indices
    return float(torch.bincount(top.flatten(), minlength=8).max() / top.numel())


def experts(share: float) -> Manifest:
    return Manifest(
        name="x",
        model=CASES["mixtral"] | {"model_type": "mixtral", "router_aux_loss_coef": share},
        data=Data(source="text"),
        inner=Inner(steps=4, batch=2, sequence=32, learning_rate=3e-3),
    )


def test_the_loss_of_experts_has_the_part_that_balances_them() -> None:
    """Against the published formula: the experts' number, times the sum over them of share of tokens times mean probability."""
    model = build(read_config(experts(0.5), 256), 0)
    windows = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    loss, balanced = NextToken().loss(model, windows, torch.device("cpu"))
    assert torch.equal(loss, cross_entropy(model, windows))
    logits = model(input_ids=windows[:, :-1], output_router_logits=True).router_logits
    probabilities = torch.cat([one.reshape(-1, 8) for one in logits]).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2, dim=-1).indices, 1.0)
    expected = 8 * (chosen.mean(0) * probabilities.mean(0)).sum()
    assert (balanced - loss).item() == pytest.approx(0.5 * expected.item(), rel=1e-4)
    loss, balanced = NextToken().loss(build(read_config(experts(0.0), 256), 0), windows, torch.device("cpu"))
    assert loss is balanced


def test_experts_stay_balanced_where_the_run_asks_for_it(tmp_path: Path) -> None:
    shares = []
    for share in (0.0, 1.0):
        folder = tmp_path / f"{share}"
        folder.mkdir()
        replica = make_replica(seal(experts(share), Identity.from_secret(b"o" * 32)), folder)
        windows = torch.from_numpy(replica.source.held_out(16))
        seen = []  # it goes up and down by a fifth, and last bits, which a machine may have its own of, say when
        for number in range(160):
            replica.step()
            if number >= 80 and number % 10 == 0:
                seen.append(routed(replica.model, windows))
        shares.append(sum(seen) / len(seen))
    assert shares[1] < 0.6 * shares[0], shares


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_no_token_reached_counts_the_same_steps(optimizer: Any) -> None:  # noqa: ANN401 - a literal
    """A checkpoint has one count for all: an expert that the first step left out would resume with a wrong one."""
    run = Manifest(name="x", model=MODEL, inner=Inner(steps=4, batch=2, sequence=32, optimizer=optimizer))
    model = build(read_config(run, 256), 0)
    model.register_parameter("experts_without_a_token", torch.nn.Parameter(torch.ones(4)))
    one = inner.Inner(model, run, torch.device("cpu"), 2, NextToken())
    windows = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    one.step(windows, 1e-3)
    steps = {float(state["step"]) for state in one.optimizer.state.values()}
    assert (steps, len(one.optimizer.state)) == ({1.0}, len(one._parameters))
