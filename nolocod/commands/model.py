"""Commands that use what a node has learned: its last checkpoint."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.commands import bootstrap_option
from nolocod.commands.registry import bootstraps
from nolocod.errors import BaseModelError, NothingToUseError, UsageError
from nolocod.identity import short
from nolocod.observe.events import Troubled, WeightsFetched
from nolocod.observe.words import amount
from nolocod.p2p.settings import Access, MeshSettings
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.observe.events import Event
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.tasks import Results


_WHOLE = "AutoModelForCausalLM.from_pretrained("


def add_to(commands: Commands) -> None:
    """export, eval, generate."""
    about = "Write the last checkpoint for `from_pretrained`, of transformers or of peft."
    export = commands.add_here("export", _export, about, "nolocod export model/")
    export.add_argument("into", type=Path, metavar="DIR", help="the folder to write")
    export.add_argument("--merged", action="store_true", help="write the whole model, with the run's adapter added to it")
    text = "write the mean of the weights of K members instead, two at least, fetched from them"
    export.add_argument("--swarm", type=int, metavar="K", help=text)
    bootstrap_option(export, "for --swarm: address of a node of the run (the node that runs here); repeatable")
    export.add_argument(
        "--data", type=Path, metavar="PATH", help="for --swarm: text on this machine, as for join, to tell losses"
    )
    export.add_argument("--network-key", type=Path, metavar="FILE", help="for --swarm: the key of a private network")
    export.add_argument(
        "--invite", default="", metavar="TOKEN", help="for --swarm: a token of the owner, in a run by invitation"
    )
    about = "Print the held-out loss of the last checkpoint, or what it does in tasks."
    evaluate = commands.add_here("eval", _eval, about, "nolocod eval --tasks hellaswag --limit 100")
    evaluate.add_argument("--data", type=Path, metavar="PATH", help="text on this machine, as for join")
    evaluate.add_argument("--tasks", default="", metavar="NAME,…", help="tasks of lm-eval, such as hellaswag,arc_easy")
    evaluate.add_argument(
        "--text", action="append", default=[], metavar="NAME=FILE", help="perplexity on a file; again for more"
    )
    evaluate.add_argument("--model", type=Path, metavar="DIR", help="an exported model, not the last checkpoint")
    evaluate.add_argument("--shots", type=int, metavar="N", help="examples before each question (the task's own number)")
    evaluate.add_argument("--limit", type=int, metavar="N", help="the first N questions of each task (all)")
    evaluate.add_argument("--more-tasks", type=Path, metavar="DIR", help="a folder of tasks of your own, in lm-eval's YAML")
    evaluate.add_argument("--device", default="cpu", metavar="NAME", help="for tasks and texts (%(default)s)")
    evaluate.add_argument("--into", type=Path, metavar="DIR", help="write eval.json and eval.md there")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    about = "Write text with the last checkpoint."
    generate = commands.add_here("generate", _generate, about, "nolocod generate 'def ' --tokens 50")
    generate.add_argument("prompt", nargs="?", default="\n", help="the text to begin with")
    generate.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to write (%(default)s)")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed writes the same text (%(default)s)")


def _export(options: argparse.Namespace) -> None:
    from nolocod.commands import card
    from nolocod.trainer import offline

    if options.swarm is not None:
        _export_mean(options)
        return
    paths, sealed = DataDir(options.data_dir), _run_of(options)
    _check_merged(options, sealed)
    state = offline.export(paths, sealed, options.into, merged=options.merged)
    card.write(sealed, card.of_checkpoint(paths, sealed, state), options.into)
    _tell_written(options, sealed)


def _export_mean(options: argparse.Namespace) -> None:
    if options.swarm < 2:
        raise UsageError("--swarm takes the number of members, two at least.", remedy="Leave it out for one node's weights.")
    import trio

    from nolocod.commands import card
    from nolocod.node.data_directory import hold, make
    from nolocod.trainer import offline
    from nolocod.trainer.average import Members
    from nolocod.watch.gather import gather

    paths, known = DataDir(options.data_dir), stored_manifest(DataDir(options.data_dir))
    where = bootstraps(options.bootstrap, paths)

    def of_run(sealed: Sealed) -> Members:
        _check_merged(options, sealed)
        if options.data is not None:  # without text losses are not told
            sealed.manifest.data.check_given(options.data)
        if sealed.manifest.base is not None and not paths.base.is_dir():
            remedy = "Give the --data-dir of a node of this run, which has them."
            raise BaseModelError("the run starts from a published model, whose files are not here.", remedy=remedy)
        return Members(sealed, options.data, settings.paths.cache, offline.base_of(paths, sealed))

    make(paths)
    key = options.network_key or (paths.network_key if paths.network_key.exists() else None)
    settings = MeshSettings(paths.swarm, where, known.run_id if known else "", access=Access(key, None, options.invite))
    with hold(settings.paths):
        judge, members = trio.run(gather, settings, options.swarm, of_run, _tell_gathered)
        mean = judge.mean([one.path for one in members])
        offline.write(paths, judge.sealed, mean, options.into, merged=options.merged)
        card.write(judge.sealed, card.of_members(judge.sealed, members), options.into)
        if losses := [judge.losses[one.peer] for one in members if one.peer in judge.losses]:
            alone = f"one alone {sum(losses) / len(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
            print(f"held-out loss of the mean of {len(members)}: {judge.loss(mean):.4f}; {alone}", file=sys.stderr)
        shutil.rmtree(members[0].path.parent, ignore_errors=True)
    _tell_written(options, judge.sealed)


def _tell_gathered(event: Event) -> None:
    if isinstance(event, WeightsFetched):
        print(f"weights of {short(event.donor)}, round {event.round}: {amount(event.size)}", file=sys.stderr, flush=True)
    elif isinstance(event, Troubled):
        print(f"{event.code} {event.message}", file=sys.stderr, flush=True)


def _check_merged(options: argparse.Namespace, sealed: Sealed) -> None:
    if options.merged and sealed.manifest.adapter is None:
        raise UsageError("the run has no adapter: its model is exported whole.", remedy="Leave --merged out.")


def _tell_written(options: argparse.Namespace, sealed: Sealed) -> None:
    model = "PeftModel.from_pretrained(base, " if sealed.manifest.adapter and not options.merged else _WHOLE
    print(f'{model}"{options.into}")')


def _eval(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    if not (options.tasks or options.text):
        if options.model or options.into:
            raise UsageError("--model and --into are for --tasks and --text.")
        loss = offline.evaluate(DataDir(options.data_dir), _run_of(options), options.data)
        print(json.dumps({"loss": loss}) if options.json else f"{loss:.4f}")
        return
    texts = dict(text.partition("=")[::2] for text in options.text)
    if not all(texts) or not all(texts.values()):
        raise UsageError("--text takes NAME=FILE.")
    tasks = [task for task in options.tasks.split(",") if task]
    with tempfile.TemporaryDirectory(prefix="nolocod-eval-") as folder:
        model = options.model or Path(folder)
        if options.model is None:
            offline.export(DataDir(options.data_dir), _run_of(options), model, merged=True)
        elif not (model / "config.json").exists():
            raise UsageError(f"{model} holds no exported model.", remedy="Write one with `nolocod export DIR`.")
        results = _in_tasks(model, tasks, {name: Path(file) for name, file in texts.items()}, options)
    print(msgspec.json.encode(results).decode() if options.json else results.to_text())
    if options.into is not None:
        results.write(options.into)


def _in_tasks(model: Path, tasks: list[str], texts: dict[str, Path], options: argparse.Namespace) -> Results:
    from nolocod.trainer.tasks import evaluate

    more = {"shots": options.shots, "limit": options.limit, "device": options.device, "more": options.more_tasks}
    return evaluate(model, tasks, texts, **more)


def _generate(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    if options.tokens < 1 or not 0 <= options.temperature < math.inf:  # NaN is not either
        raise UsageError("--tokens must be positive, and --temperature finite and not negative.")
    if not 0 <= options.seed < 1 << 63:
        raise UsageError("--seed must be from 0 to 2^63 - 1.")
    paths = DataDir(options.data_dir)
    text = offline.generate(paths, _run_of(options), options.prompt, options.tokens, options.temperature, options.seed)
    print(options.prompt + text)


def _run_of(options: argparse.Namespace) -> Sealed:
    """The run of the data directory whose checkpoint a command wants to use."""
    if (sealed := stored_manifest(DataDir(options.data_dir))) is None:
        raise NothingToUseError(f"{options.data_dir} belongs to no run.")
    return sealed
