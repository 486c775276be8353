"""What an error is: an entry of the catalogue, and the base of all errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Entry:
    """One row of the catalogue.

    `code` never changes its meaning; `exit_status` is what the process ends with (local errors only).
    """

    code: str
    title: str
    remedy: str
    exit_status: int = 1


CATALOGUE: dict[str, Entry] = {}
RETIRED = {
    "NLC-135": "what `nolocod soak` found broken; `python -m tests.soak` tells it without a code",
    "NLC-215": "partner draws (`trust.draws`), which were removed",
    "NLC-216": "the direction check (`trust.direction`), which was removed",
}
"""Codes of earlier releases and what they were about: none is given again."""


def listed(code: str, title: str, remedy: str, exit_status: int = 1) -> Entry:
    entry = Entry(code, title, remedy, exit_status)
    if code in CATALOGUE or code in RETIRED:
        raise AssertionError(f"error code {code} is given twice")
    CATALOGUE[code] = entry
    return entry


class NolocodError(Exception):
    """The base of all errors that this program raises on purpose.

    `cause` is one sentence about what happened; `remedy` replaces the catalogue's where the caller knows a better one.
    """

    entry: ClassVar[Entry] = listed("NLC-000", "unexpected failure", "Report it, with the log and this code.", 70)

    def __init__(self, cause: str, *, remedy: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy or self.entry.remedy

    @property
    def code(self) -> str:
        return self.entry.code

    @property
    def exit_status(self) -> int:
        return self.entry.exit_status

    def __str__(self) -> str:
        return f"{self.code} {self.entry.title}: {self.cause} {self.remedy}"


def first_error(group: BaseExceptionGroup[NolocodError]) -> NolocodError:
    """The first error in a group of whatever depth."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def on_one_line(error: BaseException, most: int | None = None) -> str:
    """The first `most` characters of its text, without line breaks."""
    return " ".join(str(error).split())[:most]
