"""What each command does, by subject: a module's `add_to` declares its commands, and they print.

Not here: the work itself.

The rule: a command reads its options, calls what does the work, and says what came of it; whatever takes long to
import is imported where it is needed, so that `--help` and every mistake answer at once.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


EXAMPLE = "Example: "


class _Help(argparse.HelpFormatter):
    """argparse's, but for an example, which stays on one line: so it can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLE) else super()._fill_text(text, width, indent)


@dataclass(frozen=True)
class Commands:
    """Where commands are declared: those of `nolocod`, or those below one command."""

    parsers: argparse._SubParsersAction[argparse.ArgumentParser]
    here: bool = False
    """Whether they are below a command that has --data-dir itself, and keep what was said there."""

    @classmethod
    def of(cls, parser: argparse.ArgumentParser, *, here: bool = False) -> Commands:
        """The commands below `parser`."""
        return cls(parser.add_subparsers(metavar="COMMAND"), here)

    def add(self, name: str, run: Callable[[argparse.Namespace], None], text: str, example: str) -> argparse.ArgumentParser:
        """Declare a command that needs no data directory."""
        command = self.parsers.add_parser(name, help=text, description=text, epilog=EXAMPLE + example, formatter_class=_Help)
        command.set_defaults(command=run)
        return command

    def add_here(
        self, name: str, run: Callable[[argparse.Namespace], None], text: str, example: str
    ) -> argparse.ArgumentParser:
        """Declare a command that works on a data directory."""
        command = self.add(name, run, text, example)
        command.add_argument(
            "--data-dir",
            type=Path,
            default=argparse.SUPPRESS if self.here else Path(os.environ.get("NOLOCOD_HOME", "~/.nolocod")).expanduser(),
            metavar="DIR",
            help="the node's identity, run and checkpoints ($NOLOCOD_HOME, or ~/.nolocod)",
        )
        return command


def bootstrap_option(
    parser: argparse.ArgumentParser, text: str = "address of a node of the run: /ip4/…/tcp/…/p2p/…; repeatable"
) -> None:
    parser.add_argument("--bootstrap", action="append", default=[], metavar="MULTIADDR", help=text)
