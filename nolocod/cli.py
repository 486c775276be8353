"""The command line: what commands there are (`commands` does them), and how errors become exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from nolocod import __version__
from nolocod.commands import (
    Commands,
    amend,
    contributions,
    fleet,
    identity,
    installation,
    model,
    node,
    receipts,
    registry,
    run,
    simulate,
    study,
    up,
    watch,
)
from nolocod.errors import NolocodError, NoTorchError, UsageError, first_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Parser(argparse.ArgumentParser):
    """argparse with our one way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy=f"See `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 0, or with the status of the error."""
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            sys.exit(UsageError.entry.exit_status)
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
    except NolocodError as error:
        _fail(error)
    except BaseExceptionGroup as group:
        if (leaf := _find(group)) is None:
            raise
        _fail(leaf)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail(NoTorchError("this command needs it."))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `nolocod status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: NolocodError) -> NoReturn:
    print(f"error {error.code}: {error.entry.title}", file=sys.stderr)
    print(f"  cause:      {error.cause}", file=sys.stderr)
    print(f"  what to do: {error.remedy}", file=sys.stderr)
    sys.exit(error.exit_status)


def _find(group: BaseExceptionGroup[BaseException]) -> NolocodError | None:
    """The first error of ours in a group that holds nothing else but what it caused."""
    ours, others = group.split(NolocodError)
    if ours is None or (others is not None and others.subgroup(Exception) is not None):
        return None
    return first_error(ours)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nolocod", description="Train one model on the machines of many volunteers, without a coordinator.")
    parser.add_argument("--version", action="version", version=f"nolocod {__version__}")
    parser.set_defaults(command=None)
    commands = Commands.of(parser)
    subjects = (up, run, amend, node, watch, fleet, registry, identity, receipts, contributions, model, study, simulate)
    for subject in subjects:
        subject.add_to(commands)
    installation.add_to(commands, parser)
    return parser
