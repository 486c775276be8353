"""The catalogue of errors, and the pages that are made from the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nolocod import errors
from nolocod.errors import (
    CATALOGUE,
    LocalError,
    NolocodError,
    OtherRunError,
    PeerBusyError,
    PeerInvitationOverError,
    PeerNotInvitedError,
    RemoteError,
)
from nolocod.run import manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
DOCS = runpy.run_path(str(ROOT / "tools" / "docs.py"))

SHARED = {errors.OtherTensorsError, OtherRunError, PeerInvitationOverError, PeerNotInvitedError}
"""Classes that have another's entry on purpose: the peer's code is the one that its user knows."""


def classes(base: type[NolocodError] = NolocodError) -> Iterator[type[NolocodError]]:
    for child in base.__subclasses__():
        if child.__module__.startswith(errors.__name__):
            yield child
            yield from classes(child)


def test_every_code_has_the_format() -> None:
    assert all(re.fullmatch(r"NLC-\d{3}", code) for code in CATALOGUE)
    assert all(code == entry.code for code, entry in CATALOGUE.items())


@pytest.mark.parametrize("code", ["NLC-100", *errors.RETIRED])
def test_no_code_is_given_twice_not_even_a_retired_one(code: str) -> None:
    with pytest.raises(AssertionError, match=f"{code} is given twice"):
        errors.listed(code, "again", "Never.")


@pytest.mark.parametrize("error", sorted(set(classes()) - SHARED, key=lambda one: one.__name__))
def test_every_error_has_an_entry_of_its_own(error: type[NolocodError]) -> None:
    assert "entry" in vars(error), f"{error.__name__} has its parent's code"
    assert CATALOGUE[error.entry.code] is error.entry
    assert error.__name__.endswith("Error")


def test_every_entry_belongs_to_an_error() -> None:
    assert {error.entry.code for error in (NolocodError, *classes())} == set(CATALOGUE)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)
def test_every_entry_can_be_read_by_a_person(entry: errors.Entry) -> None:
    assert entry.remedy.endswith(".")
    assert not entry.title.endswith(".")
    assert entry.title[0].islower()


def test_codes_tell_whose_fault_it_is() -> None:
    for error in set(classes()) - SHARED:
        number = int(error.entry.code[4:])
        assert issubclass(error, RemoteError) == (number >= 200), error
        assert issubclass(error, LocalError) == (0 < number < 200), error
        assert issubclass(error, RemoteError) or error.entry.exit_status > 0, error


def test_an_error_tells_code_cause_and_remedy() -> None:
    error = errors.PortTakenError("--http 127.0.0.1:80 is in use.")
    assert str(error) == (
        "NLC-109 port taken: --http 127.0.0.1:80 is in use. Choose another port with --listen or --http, or 0 for any free one."
    )
    assert errors.IdentityError("x.", remedy="Run: chmod 600 x").remedy == "Run: chmod 600 x"
    assert PeerBusyError("later.", retry_after=2.0).retry_after == 2.0


@pytest.mark.parametrize("name", ["errors.md", "run-file.md", "doctor.md", "limits.md", "metrics.md", "fuzzing.md"])
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == DOCS["PAGES"][name](), f"docs/{name} is out of date. Run: python tools/docs.py"


def test_the_run_file_page_names_every_key() -> None:
    page = DOCS["run_file_page"]()
    for section in (manifest.Data, manifest.Inner, manifest.Outer, manifest.Evaluation):
        assert {key for key in section.__struct_fields__ if f"| `{key}` |" not in page} <= manifest.RETIRED, section
    assert "`owner`" not in page, "seal sets the owner, not the run file"
