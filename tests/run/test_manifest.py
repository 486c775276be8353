"""The manifest: what a run file may say, and that nobody can alter what was signed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import ManifestError, RunFileError, UnstableError, VersionError
from nolocod.identity import Identity
from nolocod.run.data import Data
from nolocod.run.manifest import MAX_MANIFEST_BYTES, Codec, Inner, Manifest, Outer, Sealed, seal, unseal, wire_name  # fmt: skip
from nolocod.run.presets import to_toml
from nolocod.run.run_file import read_run_file

if TYPE_CHECKING:
    from pathlib import Path

OWNER = Identity.from_secret(bytes(range(32)))
MODEL = {"model_type": "llama", "hidden_size": 64}
RUN_FILE = """\
name = "demo"

[model]
model_type = "llama"

[inner]
steps = 10

[outer]
alpha = 0.5
gamma = 0.75
"""


def sealed(seed: int = 0) -> Sealed:
    return seal(Manifest(name="demo", model=MODEL, seed=seed), OWNER)


def signed(content: dict[str, Any]) -> bytes:
    """Sign what no honest release would: the owner's own signature over `content`."""
    body = json.dumps(content).encode()
    return OWNER.sign(b"nolocod manifest 1\0" + body) + body


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


# --- run files -------------------------------------------------------------------------------------


def test_a_run_file_gives_a_manifest_with_defaults(tmp_path: Path) -> None:
    manifest = read_run_file(written(tmp_path, RUN_FILE))
    assert (manifest.name, manifest.inner.steps, manifest.outer.gamma) == ("demo", 10, 0.75)
    assert (manifest.data.source, manifest.codec, manifest.owner) == ("stdlib", "modulo8", "")


def test_every_codec_has_a_name_with_its_version() -> None:
    names = {wire_name(codec) for codec in get_args(Codec)}
    assert len(names) == 4
    assert all(re.fullmatch(r"[a-z0-9]{1,13}/\d", name) for name in names), "a message's header holds sixteen bytes of it"


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("steps = 10", "steps = 0", "line 7, key `inner.steps`"),
        ("steps = 10", 'steps = "ten"', "line 7, key `inner.steps`"),
        ("steps = 10", "stepps = 10", "line 7, key `inner.stepps`"),
        ("alpha = 0.5", "alpha = 1.0", "line 10, key `outer.alpha`"),
        ('name = "demo"', 'name = "a b"', "line 1, key `name`"),
        ('name = "demo"', 'name = "demo"\ncodec = "int1"', "line 2, key `codec`"),
        ('name = "demo"', 'name = "demo"\nflavour = 1', "line 2, key `flavour`"),
        ("gamma = 0.75", "turns = 65", "line 11, key `outer.turns`"),
        ("[inner]", "[innner]", "line 6"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(tmp_path: Path, old: str, new: str, where: str) -> None:
    path = written(tmp_path, RUN_FILE.replace(old, new))
    with pytest.raises(RunFileError) as caught:
        read_run_file(path)
    assert caught.value.cause.startswith(f"{path}, {where}")
    assert caught.value.exit_status == 2


def test_toml_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="line 7"):
        read_run_file(written(tmp_path, RUN_FILE.replace("steps = 10", "steps = = 10")))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="`name`"):
        read_run_file(written(tmp_path, RUN_FILE.replace('name = "demo"', "")))


def test_a_missing_or_binary_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="No such file"):
        read_run_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFileError, match="UTF-8"):
        read_run_file(tmp_path / "binary.toml")


def test_the_tokenizer_travels_inside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text('{"version": "1.0"}', encoding="utf-8")
    manifest = read_run_file(written(tmp_path, RUN_FILE + '[data]\ntokenizer = "tokens.json"\n'))
    assert manifest.data.tokenizer == '{"version": "1.0"}'
    with pytest.raises(RunFileError, match=r"absent\.json"):
        read_run_file(written(tmp_path, RUN_FILE + '[data]\ntokenizer = "absent.json"\n'))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 1.5), (0.5, 2.0), (0.9, 0.5), (0.0, 2.0)])
def test_settings_that_diverge_are_refused_with_the_bound(tmp_path: Path, alpha: float, gamma: float) -> None:
    """Variance of a pair's difference contracts only for 0 < gamma < 2(1 - alpha^2)."""
    text = RUN_FILE.replace("alpha = 0.5", f"alpha = {alpha}").replace("gamma = 0.75", f"gamma = {gamma}")
    with pytest.raises(UnstableError, match=r"2\(1 - alpha\^2\) = " + f"{2 * (1 - alpha**2):.4g}") as caught:
        read_run_file(written(tmp_path, text))
    assert "line 11, key `outer.gamma`" in caught.value.cause


def test_gamma_just_inside_the_bound_is_allowed(tmp_path: Path) -> None:
    text = RUN_FILE.replace("gamma = 0.75", "gamma = 1.4999")
    assert read_run_file(written(tmp_path, text)).outer.gamma == 1.4999


@pytest.mark.parametrize(
    "value",
    [
        '"org/repo@rev"',
        '"org/repo"',
        '"https://evil.example"',
        '"a\\\\b"',
        '["silu", "../x"]',
        '{type = {name = "org/x"}}',
        '{"a/b" = 1}',
    ],
)
def test_a_model_that_names_what_could_be_fetched_is_refused(tmp_path: Path, value: str) -> None:
    """Where there is no transformers to ask, as in the network process."""
    with pytest.raises(RunFileError, match=r"`model\.hidden_act` holds '.+': a model is made of numbers and plain words"):
        read_run_file(written(tmp_path, RUN_FILE.replace("[inner]", f"hidden_act = {value}\n\n[inner]")))


def test_plain_words_in_a_model_are_allowed(tmp_path: Path) -> None:
    value = '{rope_type = "yarn", factor = 2.5}\nlayer_types = ["full_attention", "sliding_attention"]'
    run = read_run_file(written(tmp_path, RUN_FILE.replace("[inner]", f"rope_parameters = {value}\n\n[inner]")))
    assert run.model["layer_types"] == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("key", ["path", "paths", "file", "files", "data_dir", "root", "url"])
def test_no_key_of_the_data_table_can_name_a_file(key: str) -> None:
    content = {"name": "demo", "model": MODEL, "owner": OWNER.peer_id, "format": 1}
    unseal(signed(content))
    with pytest.raises(ManifestError, match=key):
        unseal(signed({**content, "data": {"source": "text", key: "/etc/passwd"}}))


def test_a_run_in_turns_is_told_in_turns(tmp_path: Path) -> None:
    outer, inner = Outer(rounds=40, turns=5), Inner(steps=10, warmup_rounds=2.0)
    made = seal(Manifest(name="demo", model=MODEL, inner=inner, outer=outer), OWNER)
    for one in (made, unseal(made.to_bytes())):
        told = one.manifest
        assert (told.inner.steps, told.inner.warmup_rounds, told.evaluation.every) == (2, 10.0, 50)
        assert (told.outer.rounds, told.outer.staleness, told.outer.turns) == (200, 15, 5)
    said = json.loads(made.body)
    assert (said["inner"]["steps"], said["outer"]["rounds"], said["outer"]["turns"]) == (10, 40, 5), "as the owner wrote it"
    with pytest.raises(RunFileError, match=r"turns` = 3 does not divide `inner.steps` = 10"):
        seal(Manifest(name="demo", model=MODEL, inner=inner, outer=Outer(turns=3)), OWNER)
    with pytest.raises(RunFileError, match=r"line 11, key `outer.turns`: .*does not divide"):
        read_run_file(written(tmp_path, RUN_FILE.replace("gamma = 0.75", "turns = 3")))


# --- defences that were removed --------------------------------------------------------------------


OF_RELEASE_0_1 = (
    b'{"name":"demo","model":{"hidden_size":64,"model_type":"llama"},'
    b'"owner":"12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB",'
    b'"format":1,"protocol":1,"seed":0,'
    b'"data":{"source":"stdlib","dataset":null,"subset":null,"split":"train","field":"text","tokenizer":"bytes","held_out":0.01},'
    b'"inner":{"steps":25,"batch":8,"accumulation":1,"sequence":128,"learning_rate":0.001,'
    b'"warmup_rounds":1.0,"weight_decay":0.1,"beta1":0.9,"beta2":0.95,"clip":1.0},'
    b'"outer":{"alpha":0.5,"beta":0.7,"gamma":0.7,"rounds":0,"staleness":3,"blocking":false,"patience":60.0,"fragments":1,"refresh":8},'
    b'"evaluation":{"every":10,"batches":16},'
    b'"trust":{"clip":1.5,"direction":0.0,"accept":0.0,"reputation":true,"probation":3,"draws":0,"donors":2},"codec":"modulo8","access":"open"}'
)
RUN_ID_OF_RELEASE_0_1 = "7e6902163fa92ccbdf177a8f4eb066fd059406abe20b787470bf0f2c6f39308b"


def test_a_manifest_of_the_release_before_opens_and_new_ones_keep_its_run_id() -> None:
    before = OWNER.sign(b"nolocod manifest 1\0" + OF_RELEASE_0_1) + OF_RELEASE_0_1
    opened = unseal(before)
    assert (opened.body, opened.run_id) == (OF_RELEASE_0_1, RUN_ID_OF_RELEASE_0_1)
    inner = opened.manifest.inner
    assert (inner.optimizer, inner.schedule) == ("adamw", "cosine"), "what its trainer did"
    assert opened.manifest.data.documents == "joined"
    named = {"data": Data(documents="joined"), "inner": Inner(steps=25, optimizer="adamw", schedule="cosine")}
    again = seal(Manifest(name="demo", model=MODEL, weights="float32", **named), OWNER)
    assert again == replace(opened, signature=again.signature)


def test_what_the_release_before_does_not_know_is_said() -> None:
    """It refuses the key; a manifest that did not say would be trained in two ways."""
    for changes in ({"optimizer": "adamw"}, {"schedule": "cosine"}, {}):
        before = seal(Manifest(name="demo", model=MODEL, inner=Inner(**changes)), OWNER)
        assert unseal(before.to_bytes()) == before
        said = json.loads(before.body)["inner"]
        assert {"optimizer", "schedule"} - said.keys() == changes.keys()
    for weights, says in (("bfloat16", True), ("float32", False)):
        sealed = seal(Manifest(name="demo", model=MODEL, weights=weights), OWNER)
        assert unseal(sealed.to_bytes()) == sealed
        assert ("weights" in json.loads(sealed.body)) == says


@pytest.mark.parametrize(
    ("section", "key", "value", "off", "what"),
    [
        ("trust", "draws", 8, 0, "partner draws were"),
        ("trust", "direction", 0.2, 0, "the direction check was"),
        ("trust", "accept", 0.02, 0, "the accept test was"),
        ("outer", "blocking", True, False, "waiting for the partner was"),
        ("outer", "fragments", 4, 1, "parts of whole tensors were"),
    ],
)
def test_retired_keys_switched_on_are_refused_with_a_way_out(
    tmp_path: Path, section: str, key: str, value: float, off: float, what: str
) -> None:
    with pytest.raises(ManifestError, match=f"{what} removed") as altered:
        unseal(signed({"name": "demo", "model": MODEL, "owner": OWNER.peer_id, "format": 1, section: {key: value}}))
    before, _, _ = RUN_FILE.partition("\n[outer]")
    written_out = {switch: before + f"\n[{section}]\n{key} = {json.dumps(switch)}\n" for switch in (value, off)}
    line = written_out[value].count("\n")
    with pytest.raises(RunFileError, match=rf"line {line}, key `{section}.{key}`: .*{what} removed") as caught:
        read_run_file(written(tmp_path, written_out[value]))
    assert "release 0.1" in caught.value.remedy == altered.value.remedy
    assert read_run_file(written(tmp_path, written_out[off])) == read_run_file(written(tmp_path, before))


def test_the_codec_that_was_removed_is_refused_with_what_to_use(tmp_path: Path) -> None:
    content = {"name": "demo", "model": MODEL, "owner": OWNER.peer_id, "format": 1, "codec": "delta4"}
    with pytest.raises(ManifestError, match="delta4, and that codec was removed") as altered:
        unseal(signed(content))
    with pytest.raises(RunFileError, match=r"line 2, key `codec`: .*delta4, and that codec was removed") as caught:
        read_run_file(written(tmp_path, RUN_FILE.replace('name = "demo"', 'name = "demo"\ncodec = "delta4"')))
    assert 'codec = "modulo8"' in caught.value.remedy == altered.value.remedy


def test_how_often_its_slow_weights_travelled_has_no_effect_and_stays_in_the_run_id(tmp_path: Path) -> None:
    """With the other codecs it never had one: runs that name it go on."""
    text = RUN_FILE.replace("gamma = 0.75", "gamma = 0.75\nrefresh = 5")
    manifest = read_run_file(written(tmp_path, text))
    assert unseal(seal(manifest, OWNER).to_bytes()).manifest.outer.refresh == 5
    assert "refresh" not in to_toml(manifest)


def test_a_run_file_is_written_with_tables_within_the_model(tmp_path: Path) -> None:
    """As published configurations have them; what is none is each class's default."""
    model = {**MODEL, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low": None}, "sliding_window": None}
    again = read_run_file(written(tmp_path, to_toml(Manifest(name="x", model=model))))
    assert again.model == {**MODEL, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    "file",
    [
        {"name": "../config.json", "size": 1, "root": "00" * 32},
        {"name": "modeling_evil.py", "size": 1, "root": "00" * 32},
        {"name": "pytorch_model.bin", "size": 1, "root": "00" * 32},
        {"name": "config.json", "size": 0, "root": "00" * 32},
        {"name": "config.json", "size": 1, "root": "00"},
    ],
)
def test_what_a_manifest_pins_has_a_plain_name_and_holds_no_code(file: dict[str, object]) -> None:
    content = {"name": "demo", "model": MODEL, "owner": str(OWNER.peer_id), "format": 1}
    good = {"name": "model.safetensors", "size": 1, "root": "00" * 32}
    assert unseal(signed({**content, "base": {"files": [good]}})).manifest.base is not None
    for base in (
        {"files": [good, file]},
        {"files": []},
        {"files": [good], "source": "/etc/x"},
        {"files": [good], "revision": "main"},
    ):
        with pytest.raises(ManifestError):
            unseal(signed({**content, "base": base}))


# --- signed manifests ------------------------------------------------------------------------------


def test_what_was_sealed_is_what_is_unsealed() -> None:
    before = sealed(seed=7)
    after = unseal(before.to_bytes())
    assert after == before
    assert after.manifest.seed == 7
    assert after.manifest.owner == OWNER.peer_id


def test_the_same_manifest_has_the_same_run_id_and_any_change_another() -> None:
    assert sealed().run_id == sealed().run_id
    assert len({sealed().run_id, sealed(seed=1).run_id, seal(sealed().manifest, Identity.generate()).run_id}) == 3


RAW = sealed().to_bytes()


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_an_altered_byte_anywhere_is_refused(position: int, flip: int) -> None:
    altered = bytearray(RAW)
    altered[position] ^= flip
    with pytest.raises(ManifestError):
        unseal(bytes(altered))


def test_an_altered_byte_at_every_position_is_refused() -> None:
    for position in range(len(RAW)):
        with pytest.raises(ManifestError):
            unseal(RAW[:position] + bytes([RAW[position] ^ 1]) + RAW[position + 1 :])


@given(st.binary(max_size=300))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        unseal(raw)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"owner": 3}', b'{"owner": ""}', b'"x"', b"null", b"\xff" * 9, b"[" * 100_000]
)
def test_a_body_without_an_owner_is_refused(body: bytes) -> None:
    with pytest.raises(ManifestError):
        unseal(bytes(64) + body)


def test_a_truncated_manifest_is_refused() -> None:
    for length in range(len(RAW)):
        with pytest.raises(ManifestError):
            unseal(RAW[:length])


def test_an_oversized_manifest_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ManifestError, match="cannot be a manifest"):
        unseal(bytes(MAX_MANIFEST_BYTES + 1))


def test_a_stranger_cannot_sign_for_the_owner() -> None:
    body = sealed().body
    forged = Identity.generate().sign(b"nolocod manifest 1\0" + body) + body
    with pytest.raises(ManifestError, match="not the owner's"):
        unseal(forged)


def test_a_newer_format_asks_for_a_newer_release() -> None:
    content = msgspec.json.decode(sealed().body)
    with pytest.raises(VersionError, match="format 2"):
        unseal(signed({**content, "format": 2, "from_the_future": True}))


@pytest.mark.parametrize(
    "change",
    [{"inner": {"steps": 0}}, {"outer": {"alpha": 0.5, "gamma": 1.9}}, {"model": {}}, {"codec": "pickle"}, {"unknown": 1}],
)
def test_a_signature_does_not_make_a_bad_manifest_good(change: dict[str, Any]) -> None:
    content = msgspec.json.decode(sealed().body)
    with pytest.raises(ManifestError):
        unseal(signed({**content, **change}))


@pytest.mark.parametrize(
    "changes",
    [
        '"name":"demo\\n"',
        f'"seed":{1 << 53}',
        f'"protocol":1{"0" * 5000}',
        f'"format":1{"0" * 5000}',
        '"format":[1]',
        f'"inner":{{"steps":{1 << 31}}}',
        f'"inner":{{"sequence":{1 << 31}}}',
        f'"outer":{{"rounds":{1 << 60}}}',
    ],
)
def test_names_and_numbers_that_would_break_us_later_are_refused(changes: str) -> None:
    body = b'{"name":"demo","model":{"model_type":"llama"},"format":1,"owner":"%s",' % OWNER.peer_id.encode()
    body += changes.encode() + b"}"
    with pytest.raises((ManifestError, VersionError)):
        unseal(OWNER.sign(b"nolocod manifest 1\0" + body) + body)
