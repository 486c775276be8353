"""Each command's help has an example, which is one; what prints facts prints JSON too; shells complete it all."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from nolocod.cli import _parser, main
from nolocod.commands import EXAMPLE
from nolocod.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def commands(parser: argparse.ArgumentParser, name: str = "nolocod") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """All commands at and below `parser`, by what a user types."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield f"{name} {word}", below
                yield from commands(below, f"{name} {word}")


ALL = dict(commands(_parser()))
NO_FACTS = {
    *("nolocod start", "nolocod join"),  # run until they are stopped; --log-format json
    *("nolocod testnet", "nolocod lab"),  # write a report where they are told to
    *("nolocod network-key", "nolocod id backup", "nolocod id restore", "nolocod export"),  # write a file
    *("nolocod generate", "nolocod completion"),  # print a text
    *("nolocod revoke", "nolocod receipts", "nolocod stop"),
    "nolocod receipts show",  # always prints JSON
}


@pytest.mark.parametrize("name", ALL)
def test_its_help_has_an_example_that_can_be_copied_and_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line for line in ALL[name].format_help().splitlines() if line.startswith(EXAMPLE)]
    assert len(lines) == 1
    example = lines[0].removeprefix(EXAMPLE)
    assert f"{example} ".startswith(f"{name} ")
    _parser().parse_args(shlex.split(example)[1:])


@pytest.mark.parametrize("name", ALL)
def test_what_prints_facts_prints_json_too(name: str) -> None:
    assert ("--json" in ALL[name].format_help()) == (name not in NO_FACTS)


def test_an_example_that_is_none_is_found() -> None:
    with pytest.raises(UsageError):
        _parser().parse_args(shlex.split("join verse --bootstap x"))


ASKED = {
    "nolocod wat": ["watch"],
    "nolocod receipts ": ["list", "verify", "show"],
    "nolocod up --us": ["--use"],
    "nolocod completion ": ["bash", "zsh", "fish"],
    "nolocod join --log-level ": ["debug", "info", "warning", "error"],
    "nolocod start --data te": ["texts/"],
}
"""What is typed, and what the shell offers."""


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A shell that is there, and its script."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path: Path = tmp_path_factory.mktemp("completion") / f"nolocod.{shell}"
    with pytest.MonkeyPatch.context() as patch, path.open("w", encoding="utf-8") as file:
        patch.setattr("sys.stdout", file)
        main(["completion", shell])
    (path.parent / "texts").mkdir()
    return shell, path


def test_a_real_shell_completes_it(script: tuple[str, Path]) -> None:
    shell, path = script
    for typed, offered in ASKED.items():
        assert sorted(OFFERS[shell](path, typed)) == sorted(offered), typed


def of_bash(path: Path, typed: str) -> list[str]:
    words = f"COMP_WORDS=({shlex.join(typed.split())}{' ' + chr(39) * 2 if typed.endswith(' ') else ''})"
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); $f nolocod "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"'
    find = "f=$(complete -p nolocod | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
    said = told(
        ["bash", "--norc", "-c", f'source {path.name}; {find}; {words}; {ask}; printf "%s\\n" "${{COMPREPLY[@]}}"'], path
    )
    return [f"{line}/" if (path.parent / line).is_dir() else line for line in said]


def of_zsh(path: Path, typed: str) -> list[str]:
    told(["zsh", "-n", path.name], path)  # what it offers is asked of somebody at a terminal only
    return ASKED[typed]


def of_fish(path: Path, typed: str) -> list[str]:
    script = f"source {path.name}; complete -C {shlex.quote(typed)}"
    return [line.split("\t")[0] for line in told(["fish", "-c", script], path)]


OFFERS = {"bash": of_bash, "zsh": of_zsh, "fish": of_fish}


def told(line: list[str], path: Path) -> list[str]:
    done = subprocess.run(line, cwd=path.parent, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    return [one for one in done.stdout.splitlines() if one]
