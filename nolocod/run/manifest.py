"""The manifest: everything that the nodes of one run must agree on, signed by the run's owner.

The rule: a run file (TOML) is checked into a `Manifest`, which `seal` signs. The run id is the BLAKE3 hash of the signed
bytes, so that whoever knows the id can tell an altered manifest without knowing the owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType

import blake3
import msgspec
from msgspec import Meta

from nolocod.errors import DataDirError, ManifestError, RunFileError, SignatureError, UnstableError, VersionError
from nolocod.identity import Identity, verify
from nolocod.run.base import Base  # noqa: TC001 - msgspec reads the annotation at run time
from nolocod.run.data import Data, Section
from nolocod.run.own import OWN, own_parameters
from nolocod.run.owners import Change, Owners  # noqa: TC001 - msgspec reads the annotation at run time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.paths import DataDir

RunId = NewType("RunId", str)
Codec = Literal["float32", "bfloat16", "modulo8", "modulo4"]

FORMAT = 1
"""The manifest format that this release reads."""
RUN_ID_DIGITS = 64
MAX_MANIFEST_BYTES = 16 << 20
"""A sealed manifest above this size is refused before it is parsed (a tokenizer file is the large part)."""

_DOMAIN = b"nolocod manifest 1\0"
_PLAIN_WORD = re.compile(r"[\w.-]{0,64}", re.ASCII)
"""What text in a model's configuration may be: no path, no address, no repository."""

Positive = Annotated[int, Meta(gt=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Rate = Annotated[float, Meta(gt=0, lt=10)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]

_CODEC_VERSIONS: dict[Codec, int] = {"float32": 1, "bfloat16": 1, "modulo8": 1, "modulo4": 1}

CODEC_BYTES: dict[Codec, float] = {"float32": 4.0, "bfloat16": 2.0, "modulo8": 1.0, "modulo4": 0.5}
"""Per parameter on the wire, about (docs/codecs.md)."""


def wire_name(codec: Codec) -> str:
    """The codec and its version, as partners name it to each other: both must mean the same bytes."""
    return f"{codec}/{_CODEC_VERSIONS[codec]}"


class Inner(Section, frozen=True):
    """The inner optimizer, and its learning rate: a linear warm-up, then the schedule."""

    steps: Positive = 24
    """Inner steps between outer steps. The fewer, the better the run learns, as long as the slowest line can hide an exchange
    behind them (`nolocod create --plan`; docs/evidence.md)."""
    batch: Positive = 8
    """Sequences per micro-batch; a node whose memory takes fewer computes these in parts, a GPU with more does more at once."""
    accumulation: Positive = 1
    sequence: Annotated[int, Meta(ge=8, lt=1 << 31)] = 128
    """Tokens per sequence."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """"muon": the layers' matrices by NorMuon, all else by AdamW, at the same learning rate. "adamw": all by AdamW."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """"wsd": constant, then linearly to zero. "cosine": to a tenth. Without a goal each is constant."""
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """The last part of the rounds, in which "wsd" goes to zero."""
    learning_rate: Rate = 1e-3
    warmup_rounds: Annotated[float, Meta(ge=0)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    clip: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulation * self.sequence


_UNSAID: dict[str, dict[str, Any]] = {
    "data": {"documents": "joined", "kind": "text", "beta": 0.1, "mixture": ()},
    "inner": {"optimizer": "adamw", "schedule": "cosine", "decay": 0.5},
    "outer": {"turns": 1},
}
"""What a manifest means that lacks these keys, as all of release 0.1: who means it lacks them, and keeps its run id. ..."""
_KEYS_UNSAID: dict[str, Any] = {"base": None, "adapter": None, "owners": None, "weights": "float32"}
"""... And these, which are in no table."""


class Outer(Section, frozen=True):
    """The outer step (NoLoCo Eq. 2 with the signs of its Eq. 32) and when it is taken."""

    alpha: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    """Outer momentum. Alpha, beta and gamma are the paper's; docs/evidence.md tells what others did."""
    beta: Annotated[float, Meta(gt=0, le=4)] = 0.7
    """How much of the pair's mean change is taken."""
    gamma: Annotated[float, Meta(gt=0, le=4)] = 0.7
    """How much of the way to the pair's mean slow weights is gone. Replicas are closest at 1 - alpha^2."""
    rounds: Count = 0
    """The run's goal; 0 means without end (constant learning rate)."""
    staleness: Positive = 3
    """A partner more rounds away than this is refused."""
    blocking: bool = False  # retired, see RETIRED
    patience: Seconds = 60.0
    """How long to look for a partner before a solo step; two phases at most where an exchange failed within the last hour,
    one where partners wasted much time lately, a quarter of one where a partner failed meanwhile."""
    fragments: Annotated[int, Meta(ge=1, le=64)] = 1  # retired, see RETIRED
    turns: Annotated[int, Meta(ge=1, le=64)] = 1
    """Parts of the model, all of one size, that are exchanged one after another within `inner.steps` inner steps, of which this
    must be a divisor; as many at once as are due. A run file that does not say has turns of at least three inner steps.
    Every turn is a round in what nodes tell, but `rounds`, `staleness`, `inner.warmup_rounds` and `evaluation.every` count
    those of the whole model."""
    refresh: Positive = 8  # retired, see RETIRED

    def __post_init__(self) -> None:
        bound = 2 * (1 - self.alpha**2)
        if not 0 < self.gamma < bound:
            raise UnstableError(
                f"gamma = {self.gamma:g} with alpha = {self.alpha:g} lets the replicas drift apart: "
                f"0 < gamma < 2(1 - alpha^2) = {bound:.4g} must hold."
            )
        if self.blocking:
            raise _removed("outer.blocking", "true", "waiting for the partner was")
        if self.fragments > 1:
            raise _removed("outer.fragments", f"{self.fragments}", "parts of whole tensors were", "with `outer.turns`")


class Adapter(Section, frozen=True):
    """What is trained beside the layers of the model in `model.base`, which stays as it is (docs/adapters.md). Without this
    table the whole model is trained."""

    kind: Literal["lora"]
    """LoRA (arXiv 2106.09685), through `peft`, which every node needs."""
    rank: Annotated[int, Meta(ge=1, le=1024)] = 16
    alpha: Annotated[float, Meta(gt=0, le=1e4)] = 32.0
    """What the two matrices make counts for alpha / rank."""
    targets: Annotated[tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.]{1,64}\Z")], ...], Meta(max_length=64)] = ()
    """Ends of layers' names: `["q_proj", "v_proj"]`. All layers, but not the head, if none is named."""


class Evaluation(Section, frozen=True):
    every: Positive = 10
    """Outer steps between evaluations."""
    batches: Positive = 16


def _removed(key: str, value: str, what: str, instead: str = "") -> RunFileError:
    """A retired key is switched on."""
    remedy = f"Found the run {instead or f'without `{key}`'}, or use release 0.1."
    return RunFileError(f"`{key}` is {value}, and {what} removed.", remedy=remedy)


_OFF = {"direction": "the direction check was", "accept": "the accept test was", "draws": "partner draws were"}
"""Keys of `[trust]` that must be 0."""
RETIRED = frozenset(_OFF) | {"refresh", "blocking", "fragments"}
"""Keys without an effect. They stay in what is signed, so that equal run files keep their run ids."""


class Trust(Section, frozen=True):
    """What nodes believe of their partners, and how they bound what one can do to them (docs/security.md).

    With pairs there is no majority to ask, so a partner's influence is bounded first and verified then. A number of
    0, or `false`, switches a defence off.
    """

    clip: Annotated[float, Meta(ge=0, le=100)] = 1.5
    """The partner's difference from us counts in full up to this times the median of the last 16 that were accepted (after
    ClippedGossip, arXiv 2202.01545), and beyond it the less, the further away it is."""
    direction: Annotated[float, Meta(ge=0, le=1)] = 0.0  # retired, see RETIRED
    accept: Annotated[float, Meta(ge=0, le=10)] = 0.0  # retired, see RETIRED
    reputation: bool = True
    """Peers whose messages were refused or broken too often are avoided and turned away for a growing while."""
    probation: Count = 3
    """Accepted exchanges with a peer before its difference counts as much as that of others; half as much until then."""
    draws: Count = 0  # retired, see RETIRED
    donors: Annotated[int, Meta(ge=1, le=8)] = 2
    """Members whose weights a newcomer tries on its own held-out text, as long as they are much worse than members tell, or
    far from samples of as many other donors' weights, before it takes the best of them; 1 switches both looks off."""

    def __post_init__(self) -> None:
        for key, what in _OFF.items():
            if value := getattr(self, key):
                raise _removed(f"trust.{key}", f"{value:g}", what)


class Manifest(Section, frozen=True):
    """One run. See docs/run-file.md for every key."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    model: dict[str, Any]
    """A `transformers` configuration: `model_type` and its keys, or `config`, the path of a published config.json
    (docs/architectures.md), or `base`, the model to start from (docs/base-model.md); or `own`, the parameters of a model that
    comes from the owner's program (docs/your-own-loop.md). Remote code is never run."""
    owner: str = ""
    """Peer id of the owner; set by `seal`."""
    format: int = FORMAT
    protocol: Count = 1
    """Major protocol version that the run needs."""
    seed: Count = 0
    """Makes the same initial weights everywhere."""
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    evaluation: Evaluation = Evaluation()
    trust: Trust = Trust()
    codec: Codec = "modulo8"
    """How weights become bytes for a partner, see docs/codecs.md: 4, 2, 1 or half a byte per parameter."""
    weights: Literal["bfloat16", "float32"] = "bfloat16"
    """What newcomers get weights in: 2 or 4 bytes per parameter. Norms and biases are float32 in either."""
    base: Base | None = None  # made of `model.base` (run_file.py)
    adapter: Adapter | None = None  # a table of its own
    access: Literal["open", "invited"] = "open"
    """Who may be a member: anybody, or whoever the owner invites (docs/private.md)."""
    owners: Owners | None = None  # a table of its own

    def __post_init__(self) -> None:
        if self.is_own:
            own_parameters(self.model)
            return
        if not isinstance(self.model.get("model_type"), str):
            raise ValueError('`model.model_type` must name a transformers architecture, for example "llama"')
        if self.data.tokenizer == "base" and self.base is None:
            raise ValueError('`data.tokenizer = "base"` needs `model.base`')
        if self.adapter is not None and self.base is None:
            raise ValueError("`adapter` needs `model.base`, the model that it stands beside")
        for key, value in self.model.items():
            if named := next((text for text in _texts(value) if not _PLAIN_WORD.fullmatch(text)), None):
                raise ValueError(f"`model.{key}` holds {named[:60]!r}: a model is made of numbers and plain words")

    @property
    def is_own(self) -> bool:
        """Whether its model comes from its owner's program, and its nodes train from theirs."""
        return OWN in self.model

    def in_turns(self) -> Manifest:
        """The same run, where an outer step is one turn. RunFileError if they do not divide the inner steps."""
        inner, outer, every, change = self.inner, self.outer, self.evaluation.every, msgspec.structs.replace
        if inner.steps % (turns := outer.turns):
            raise RunFileError(f"`outer.turns` = {turns} does not divide `inner.steps` = {inner.steps}.")
        inner = change(inner, steps=inner.steps // turns, warmup_rounds=inner.warmup_rounds * turns)
        outer = change(outer, rounds=outer.rounds * turns, staleness=outer.staleness * turns)
        return change(self, inner=inner, outer=outer, evaluation=change(self.evaluation, every=every * turns))


def _texts(value: object) -> Iterator[str]:
    """All text in a value of JSON, keys of tables too."""
    left = [value]
    while left:
        match left.pop():
            case str(text):
                yield text
            case dict(table):
                left += [*table, *table.values()]
            case list(items):
                left += items


@dataclass(frozen=True)
class Sealed:
    """A manifest, one turn to an outer step, with its signature. `body` is what was signed: canonical JSON."""

    manifest: Manifest
    body: bytes
    signature: bytes
    changes: tuple[Change, ...] = ()
    """What its owners changed since, turns counted (run/amendments.py)."""

    @cached_property
    def run_id(self) -> RunId:
        return RunId(blake3.blake3(_DOMAIN + self.body).hexdigest())

    def to_bytes(self) -> bytes:
        return self.signature + self.body


def _without(unsaid: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """What of `table` has to be said."""
    return {key: value for key, value in table.items() if unsaid.get(key, ...) != value}


def seal(manifest: Manifest, owner: Identity) -> Sealed:
    """Sign `manifest` as its owner."""
    inner, replace = manifest.inner, msgspec.structs.replace
    if inner.schedule != "wsd":  # it has no last part: that is not said to releases that do not know the key
        inner = replace(inner, decay=_UNSAID["inner"]["decay"])
    owned = replace(manifest, owner=str(owner.peer_id), inner=inner)
    said = msgspec.to_builtins(owned, order="deterministic")
    said = _without(_KEYS_UNSAID, said)
    for section, unsaid in _UNSAID.items():
        said[section] = _without(unsaid, said[section])
    body = msgspec.json.encode(said)
    return Sealed(owned.in_turns(), body, owner.sign(_DOMAIN + body))


def unseal(raw: bytes) -> Sealed:
    """Check signature and content of a sealed manifest.

    Raises ManifestError (altered, unsigned, not valid), or VersionError when it needs a newer release.
    """
    if not 64 < len(raw) <= MAX_MANIFEST_BYTES:
        raise ManifestError(f"{len(raw)} bytes cannot be a manifest.")
    signature, body = raw[:64], raw[64:]
    try:
        head = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"its body is not JSON ({error}).") from error
    owner = head.get("owner")
    if not isinstance(owner, str):
        raise ManifestError("it names no owner.")
    try:
        verify(owner, _DOMAIN + body, signature)
    except SignatureError as error:
        raise ManifestError("its signature is not the owner's.") from error
    if head.get("format") != FORMAT:
        told = head.get("format")
        format = told if isinstance(told, int) and 0 <= told < 1 << 31 else "unknown"
        raise VersionError(f"the manifest has format {format}, this release reads {FORMAT}.")
    for section, unsaid in _UNSAID.items():
        if isinstance(said := head.get(section, {}), dict):
            head[section] = unsaid | said
    try:
        manifest = checked(_KEYS_UNSAID | head).in_turns()
    except msgspec.ValidationError as error:
        raise ManifestError(f"{error}") from error
    except RunFileError as error:
        raise ManifestError(error.cause, remedy=error.remedy) from error
    return Sealed(manifest, body, signature)


def checked(table: dict[str, Any]) -> Manifest:
    """Raises msgspec.ValidationError or RunFileError."""
    if table.get("codec") == "delta4":
        raise _removed("codec", "delta4", "that codec was", 'with `codec = "modulo8"`')
    return msgspec.convert(table, Manifest)


def stored_manifest(paths: DataDir) -> Sealed | None:
    """The manifest of the run that this directory belongs to, checked again; None before it has one."""
    try:
        raw = paths.manifest.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataDirError(f"{paths.manifest}: {error.strerror}.") from error
    return unseal(raw)
