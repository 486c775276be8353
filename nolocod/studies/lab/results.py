"""Results of long computations: each is done once, and kept as one JSON line.

The rule: a result follows from its settings alone, all of which are its key; so a command that was broken off goes on
where it was, and one that was finished prints its table at once. Half a line, as a kill leaves it, is done again.
"""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from nolocod.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Settings = TypeVar("Settings")
Result = TypeVar("Result")


class Results(dict[Settings, Result]):
    """Those in the file `path`, and in memory. `kinds`: the types of settings, which can be hashed, and of results."""

    def __init__(self, path: Path, kinds: tuple[type[Settings], type[Result]]) -> None:
        """UsageError for a file that cannot be read, or that holds something else."""
        super().__init__()
        self._path = path
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
        self._whole = sum(len(line) for line in lines if line.endswith(b"\n"))
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                try:
                    settings, result = msgspec.json.decode(line, type=tuple[kinds])  # type: ignore[valid-type]
                except msgspec.DecodeError as error:
                    raise UsageError(f"{path}, line {number}, is no result of this command: {error}.") from error
                self[settings] = result

    def perform(
        self,
        wanted: Iterable[Settings],
        work: Callable[[Settings], Result],
        workers: int,
        tell: Callable[[int, int, Settings, Result], None],
    ) -> None:
        """Do those that were not done yet, `workers` at a time and in their order; `tell` how many of how many are done. One
        at a time is done in this process."""
        left = [settings for settings in dict.fromkeys(wanted) if settings not in self]
        if not left:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _mapping(workers) as each, self._path.open("ab") as handle:
            handle.truncate(self._whole)
            for number, (settings, result) in enumerate(each(partial(_done, work), left), 1):
                self[settings] = result
                self._whole += handle.write(msgspec.json.encode((settings, result)) + b"\n")
                handle.flush()
                tell(number, len(left), settings, result)


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """What does a function for each of many, in so many processes."""
    if workers == 1:
        yield map
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            yield pool.imap_unordered


def _done(work: Callable[[Settings], Result], settings: Settings) -> tuple[Settings, Result]:
    return settings, work(settings)
