"""Commands that use what a node has learned: its last checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import NothingToUseError, UsageError
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands
    from nolocod.run.manifest import Sealed


def add_to(commands: Commands) -> None:
    """export, eval, generate."""
    export = commands.add_here("export", _export, "Write the last checkpoint as a Hugging Face model directory.")
    export.add_argument("into", type=Path, metavar="DIR", help="the folder to write")
    evaluate = commands.add_here("eval", _eval, "Print the held-out loss of the last checkpoint.")
    evaluate.add_argument("--data", type=Path, metavar="PATH", help="text on this machine, as for join")
    generate = commands.add_here("generate", _generate, "Write text with the last checkpoint.")
    generate.add_argument("prompt", nargs="?", default="\n", help="the text to begin with")
    generate.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to write (%(default)s)")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed writes the same text (%(default)s)")


def _export(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    offline.export(DataDir(options.data_dir), _run_of(options), options.into)
    print(f'AutoModelForCausalLM.from_pretrained("{options.into}")')


def _eval(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    print(f"{offline.evaluate(DataDir(options.data_dir), _run_of(options), options.data):.4f}")


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
