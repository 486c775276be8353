"""The model that a run starts from: what is pinned, what is loaded, and every way in which it cannot be had."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nolocod.errors import BaseModelError, RunFileError
from nolocod.identity import Identity
from nolocod.node.base import link_base
from nolocod.paths import DataDir
from nolocod.run.base import described
from nolocod.run.manifest import Manifest, seal, unseal
from nolocod.trainer import founding, offline
from nolocod.trainer import model_hub as hub
from nolocod.trainer.base_model import initial, open_base
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import ON_CPU, read_config
from nolocod.trainer.replica import open_replica
from tests.support.architectures import CASES
from tests.support.base_model import RUN_FILE, TEXT, publish
from tests.support.trainer_parts import save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "ab" * 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model", sharded=True)


def founded(folder: Path, base: Path | str, change: str = "") -> tuple[Manifest, Path]:
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(base=base).replace("[data]", f"{change}\n[data]"))
    manifest, where = founding.read(path)
    assert where is not None
    return manifest, where


def copy(base: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


# --- from a folder


def test_the_manifest_pins_every_file_that_a_run_needs(tmp_path: Path, base: Path) -> None:
    manifest, where = founded(tmp_path, base)
    assert where == base
    assert manifest.base is not None
    names = {file.name for file in manifest.base.files}
    weights = set(json.loads((base / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(weights) > 1
    assert names - {"generation_config.json"} == weights | {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
    }
    for file in manifest.base.files:
        assert (file.size, file.root) == ((base / file.name).stat().st_size, described(base / file.name).root.hex())
    assert (manifest.data.tokenizer, manifest.model["vocab_size"]) == ("base", 320)
    again = unseal(seal(manifest, Identity.generate()).to_bytes()).manifest
    assert again.base == manifest.base


def test_every_node_starts_from_the_base_s_weights(tmp_path: Path, base: Path) -> None:
    manifest, _ = founded(tmp_path, base)
    (tmp_path / "text.txt").write_text(TEXT)
    sealed = seal(manifest, Identity.generate())
    replica = open_replica(sealed, "alice", tmp_path / "text.txt", tmp_path / "cache", replace(ON_CPU, base=base))
    published = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, one in replica.layout.split(replica.phi):
        assert torch.equal(one, published.get_parameter(name)), name
    assert replica.evaluate() < 3.5
    for _ in range(2):
        replica.step()


def test_an_export_has_what_belongs_to_the_weights_and_is_not_trained(tmp_path: Path, base: Path) -> None:
    """The bias that balances the experts of deepseek 3 is no parameter: a published one differs from a new one."""
    folder = copy(base, tmp_path / "copy")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = AutoConfig.for_model("deepseek_v3", vocab_size=320, **CASES["deepseek_v3"])
    model = AutoModelForCausalLM.from_config(config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).copy_(torch.arange(8.0))
    model.save_pretrained(folder)
    sealed = seal(founded(tmp_path, folder)[0], Identity.generate())
    assert sealed.manifest.base is not None
    paths = DataDir(tmp_path / "node")
    link_base(sealed.manifest.base, folder, paths.base)
    (tmp_path / "text.txt").write_text(TEXT)
    replica = open_replica(sealed, "alice", tmp_path / "text.txt", tmp_path / "cache", replace(ON_CPU, base=paths.base))
    save(replica, paths.checkpoints, "alice")
    offline.export(paths, sealed, tmp_path / "out")
    for loaded in (replica.model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert torch.equal(loaded.get_buffer(bias), torch.arange(8.0))


def test_keys_of_the_run_file_count_before_the_base_s(tmp_path: Path, base: Path) -> None:
    assert founded(tmp_path, base, "attention_dropout = 0.1")[0].model["attention_dropout"] == 0.1
    with pytest.raises(RunFileError, match=r"makes model.layers.\d.mlp.\w+.weight \(.*96.*\), and the base has \(.*64.*\)"):
        founded(tmp_path, base, "intermediate_size = 96")


def test_what_the_base_lacks_is_not_made_up(tmp_path: Path, base: Path) -> None:
    manifest, _ = founded(tmp_path, base, "num_hidden_layers = 3")
    with pytest.raises(BaseModelError, match=r"no weights that fit model\.layers\.2"):
        initial(manifest, read_config(manifest, make_tokenizer(manifest.data, base).vocabulary), base)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizers file"),
        (lambda folder: next(folder.glob("*-00002-*")).unlink(), "lacks files that model.safetensors.index.json names"),
        (lambda folder: next(folder.glob("*-00002-*")).write_bytes(b"x" * 99), "is not a whole safetensors file"),
        (lambda folder: (folder / "tokenizer_config.json").write_text(""), "is empty"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is no index of weights"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "lacks files"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_one_error(tmp_path: Path, base: Path, harm: object, says: str) -> None:
    folder = copy(base, tmp_path / "copy")
    harm(folder)  # type: ignore[operator]
    with pytest.raises((BaseModelError, RunFileError), match=re.escape(says)):
        founded(tmp_path, folder)


def test_pickled_weights_are_never_loaded(tmp_path: Path, base: Path) -> None:
    folder = copy(base, tmp_path / "copy")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BaseModelError) as caught:
        founded(tmp_path, folder)
    assert "no model.safetensors" in caught.value.cause
    assert "pickles can hold code" in caught.value.remedy


def test_code_beside_the_model_is_not_a_part_of_it(tmp_path: Path, base: Path) -> None:
    folder = copy(base, tmp_path / "copy")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "adapter_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "modeling_evil.Config"}}))
    manifest, _ = founded(tmp_path, folder)
    assert manifest.base is not None
    assert not {"modeling_evil.py", "adapter_config.json"} & {file.name for file in manifest.base.files}


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../etc", "a b/c"])
def test_a_name_that_is_neither_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BaseModelError, match="no folder, and no name of a model on the hub"):
        open_base(name, tmp_path)


def test_a_run_file_cannot_write_the_pins_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[model]\nmodel_type = "llama"\n[base]\nfiles = []\n')
    with pytest.raises(RunFileError, match="`base` is a key of"):
        founding.read(path)
    path.write_text('name = "x"\n[model]\nmodel_type = "llama"\n[data]\ntokenizer = "base"\n')
    with pytest.raises(RunFileError, match=r"needs `model\.base`"):
        founding.read(path)


# --- from the hub


class Hub(BaseHTTPRequestHandler):
    """As the hub answers: one model, one that is gated, and nothing else."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if "gated" in parts:
            return self._say(403, {"X-Error-Code": "GatedRepo"})
        api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, file_name = [*(parts[2:] if api else parts), "", "", ""][:5]
        if (owner, name) != ("some", "model"):
            return self._say(404, {"X-Error-Code": "RepoNotFound"})
        if revision not in (COMMIT, "main"):
            return self._say(404, {"X-Error-Code": "RevisionNotFound"})
        if api and kind == "revision":
            names = [{"rfilename": file.name} for file in self.folder.iterdir()]
            return self._say(200, {}, json.dumps({"id": "some/model", "sha": COMMIT, "siblings": names}).encode())
        file = self.folder / file_name
        if kind != "resolve" or not file.exists():
            return self._say(404, {"X-Error-Code": "EntryNotFound"})
        return self._say(200, {"ETag": f'"{file.name}"', "X-Repo-Commit": COMMIT}, file.read_bytes())

    def _say(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def on_hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OneHub", (Hub,), {"folder": base})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HfApi", lambda: huggingface_hub.HfApi(endpoint=endpoint))
    yield kind
    server.shutdown()
    server.server_close()


def test_a_model_on_the_hub_is_pinned_by_its_commit(on_hub: type[Hub], tmp_path: Path, base: Path) -> None:
    manifest, where = founded(tmp_path, f"some/model@{COMMIT}")
    local, _ = founded(tmp_path, base)
    assert manifest.base is not None
    assert local.base is not None
    assert (manifest.base.source, manifest.base.revision) == ("some/model", COMMIT)
    assert manifest.base.files == local.base.files
    assert (where / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert founded(tmp_path, "some/model")[0].base == manifest.base, "the branch main is its commit of now"


@pytest.mark.parametrize(
    ("name", "says", "remedy"),
    [
        ("some/model@v9", "some/model has no such revision", "ID@REVISION"),
        ("some/other", "the hub has no such model", "HF_TOKEN"),
        ("some/gated", "is gated", "Accept its terms"),
    ],
)
def test_what_the_hub_does_not_give_is_one_error(on_hub: type[Hub], tmp_path: Path, name: str, says: str, remedy: str) -> None:
    with pytest.raises(BaseModelError) as caught:
        founded(tmp_path, name)
    assert says in caught.value.cause
    assert remedy in caught.value.remedy


def test_a_file_of_another_size_is_not_begun(on_hub: type[Hub], base: Path) -> None:
    size = (base / "config.json").stat().st_size
    with pytest.raises(BaseModelError, match=f"the hub has {size} bytes where {size + 1} are due"):
        hub.download("some/model", COMMIT, "config.json", size + 1)
    assert hub.download("some/model", COMMIT, "config.json", size).read_bytes() == (base / "config.json").read_bytes()
    with pytest.raises(BaseModelError, match="there is no such file"):
        hub.download("some/model", COMMIT, "absent.json")


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: huggingface_hub.HfApi(endpoint="http://127.0.0.1:1"))
    with pytest.raises(BaseModelError) as caught:
        open_base("some/model", tmp_path)
    assert "Check the network" in caught.value.remedy
