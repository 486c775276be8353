"""The checks that need torch, in a process of their own: `python -m nolocod.doctor.training`.

The rule: one line of JSON per result, written as soon as it is known, so that a torch that hangs or kills its process
costs only the checks that come after it. The job comes on standard input.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.doctor.findings import CHECKS, Finding, failed, ok, skipped, warn
from nolocod.errors import DataError, NolocodError, TrainerError
from nolocod.run.base import TOKENIZER
from nolocod.run.manifest import Manifest, unseal

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.run.data import Data
    from nolocod.trainer.data import Tokenizer

_SAMPLE = 200_000
"""Characters of the training text that are encoded."""
_NO_BASE = "the model that the run starts from is not here: it comes with the first start."
_RECORDS = 20
"""Documents that are read from a streamed data set."""


class Job(msgspec.Struct, frozen=True):
    """What to check. `manifest` is a sealed one, empty where no run is known."""

    devices: str = "auto"
    data: str = ""
    manifest: bytes = b""
    loaded: bool = False
    """Whether a node that runs here holds the model in memory already."""
    base: str = ""
    """The folder for the model that the run starts from."""

    def lacks_tokenizer(self, manifest: Manifest) -> bool:
        """Whether the run's tokenizer comes with the first start only."""
        return manifest.data.tokenizer == "base" and not Path(self.base, TOKENIZER).exists()


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of output: a finding, or the model's size in parameters."""

    finding: Finding | None = None
    parameters: int | None = None


def look(job: Callable[[], Job], tell: Callable[[Line], None]) -> None:
    """Make all checks: D02 before `job` is asked for, and D10 before those that need torch to compute."""
    has_torch = _make("D02", tell, torch_works)
    asked = job()
    if (manifest := unseal(asked.manifest).manifest if asked.manifest else None) is None:
        tell(Line(skipped("D10", "no run is known, so no source of text is.")))
    else:
        _make("D10", tell, lambda: training_data(manifest, asked))
    if not has_torch:
        for code in ("D03", "D04"):
            tell(Line(skipped(code, "torch cannot be imported (D02).")))
        return
    _make("D03", tell, lambda: devices(asked.devices))
    if manifest is None:
        tell(Line(skipped("D04", "no run is known, so no model is.")))
        return
    _make("D04", tell, lambda: memory(manifest, asked, tell))


def _make(code: str, tell: Callable[[Line], None], check: Callable[[], Finding]) -> bool:
    """Make one check; whether it came to its end."""
    try:
        tell(Line(check()))
        return True
    except NolocodError as error:
        tell(Line(failed(code, error)))
    except Exception as error:  # noqa: BLE001 - what torch and data sets raise has no end; it is the check's result
        tell(Line(failed(code, TrainerError(f"{type(error).__name__}: {_first_line(error)}", remedy=CHECKS[code].remedy))))
    return False


def torch_works() -> Finding:
    """D02."""
    torch = importlib.import_module("torch")
    return ok("D02", f"torch {torch.__version__} on {platform.machine()}, {torch.get_num_threads()} threads.")


def devices(names: str) -> Finding:
    """D03. Raises DeviceError."""
    from nolocod.trainer.devices import find_devices

    found = find_devices(names)
    if found[0].type != "cuda":
        return ok("D03", f"{found[0]} works" + (f", and {len(found)} processes are to share it." if found[1:] else "."))
    import torch

    def told(card: torch.device) -> str:
        free, total = torch.cuda.mem_get_info(card)
        return f"{card} works: {torch.cuda.get_device_name(card)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free."

    return ok("D03", " ".join(map(told, found)))


def memory(manifest: Manifest, job: Job, tell: Callable[[Line], None]) -> Finding:
    """D04; tells the model's size as soon as it is known. Raises ModelTooLargeError, RunFileError or DeviceError."""
    if job.lacks_tokenizer(manifest):
        return skipped("D04", _NO_BASE)
    from nolocod.trainer.capture import Plan
    from nolocod.trainer.data import make_tokenizer
    from nolocod.trainer.devices import check_count, find_devices
    from nolocod.trainer.memory import free as free_memory
    from nolocod.trainer.model import Place, check_memory, layout_of, pinned, read_config
    from nolocod.trainer.shards import in_shards

    config = read_config(manifest, make_tokenizer(manifest.data, Path(job.base)).vocabulary)
    layout = layout_of(config, manifest.adapter)
    tell(Line(parameters=layout.size))
    if job.loaded:
        return skipped("D04", f"the node that runs here holds the model's {layout.size + layout.frozen:,} parameters already.")
    found = find_devices(job.devices)
    check_count(len(found), manifest)
    shards = len(found) if in_shards(job.devices, found, layout, config.vocab_size, manifest) else 1
    places = [Place(device, processes=found.count(device), shards=shards) for device in dict.fromkeys(found)]
    # without boxes first, as the trainer does: the list of a huge model's blocks would take a gigabyte itself
    for place in places:
        check_memory(layout, config.vocab_size, manifest, 0, place)
    plan = Plan(manifest.codec, manifest.outer, layout.fragments(manifest.outer.turns))
    check_memory(layout, config.vocab_size, manifest, plan.exchange_size, places[0])
    told = f"{layout.size + layout.frozen:,} parameters fit; {free_memory() / 1e9:.1f} GB of main memory are free."
    locked = pinned(layout, found[0], shards)
    return ok("D04", f"{told} {f'Up to {locked / 1e9:.1f} GB of it' if locked else 'None of it'} is locked.")


def training_data(manifest: Manifest, job: Job) -> Finding:
    """D10. Raises DataError or RunFileError."""
    from nolocod.trainer.data import make_tokenizer, some_text

    settings = manifest.data
    if job.loaded and not job.data and settings.from_node:
        return skipped("D10", "the node that runs here has its own text; --data checks another one.")
    if job.lacks_tokenizer(manifest):
        return skipped("D10", _NO_BASE)
    tokenizer = make_tokenizer(settings, Path(job.base))
    if settings.kind != "text":
        return _samples(manifest, tokenizer, Path(job.data) if job.data else None)
    if settings.source == "hub":
        text, whole = "\n".join(_streamed(manifest)), False
    else:
        text, whole = some_text(settings, Path(job.data) if job.data else None, _SAMPLE)
    tokens = tokenizer.encode(text)
    where = job.data or "the standard library"
    if settings.source == "hub":
        where = " and ".join(str(part.dataset) for part, _ in settings.parts)
    if not len(tokens):
        return warn("D10", f"the part of {where} that was read has no text.")
    if whole:
        from nolocod.trainer.windows import Windows

        Windows(tokens, manifest.inner.sequence, settings.held_out)  # raises if that is too little
    share = "all of it, " if whole else ""
    return ok("D10", f"{where}: {share}{len(text):,} characters give {len(tokens):,} tokens.")


def _samples(manifest: Manifest, tokenizer: Tokenizer, data: Path | None) -> Finding:
    from nolocod.trainer.data import local_files, local_records
    from nolocod.trainer.samples import LEARNT, Samples

    samples, settings = Samples(manifest, tokenizer), manifest.data
    if settings.source == "hub":
        texts = _streamed(manifest)
    else:
        texts = [text for _, text in islice(local_records(settings, local_files(settings, data)), _RECORDS)]
    found = [tokens for text in texts if (tokens := samples.read(text)) is not None]
    if not found:
        return warn("D10", f"none of the first {len(texts)} records fits into a window of {manifest.inner.sequence} tokens.")
    learnt = sum(int((tokens & LEARNT != 0).sum()) for tokens in found)
    return ok("D10", f"the first {len(texts)} records give {len(found)} samples: {learnt:,} tokens to learn.")


def _streamed(manifest: Manifest) -> list[str]:
    return [text for settings, _ in manifest.data.parts for text in _texts(settings)]


def _texts(settings: Data) -> list[str]:
    from nolocod.trainer.data import missing_packages
    from nolocod.trainer.hub import cause_of, failures, open_hub

    name = f"data set {settings.dataset!r}"
    try:
        known = failures()
    except ImportError as error:
        raise missing_packages(name) from error
    try:
        return list(islice(open_hub(settings).texts(), _RECORDS))
    except known as error:
        raise DataError(f"{name}: {cause_of(error)}.", remedy="Check the network, or ask the run's owner.") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else "no reason given"


def main() -> None:
    """Read a job, write lines. What libraries print goes to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(line: Line) -> None:
        out.write(msgspec.json.encode(line) + b"\n")

    look(lambda: msgspec.json.decode(sys.stdin.buffer.read(), type=Job), tell)


if __name__ == "__main__":
    main()
