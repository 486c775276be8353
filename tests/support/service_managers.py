"""Stand-ins for service managers: tools that say what they were told, and how systemd and Windows read a command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\s+|$)')


def tool(folder: Path, name: str, script: str) -> Path:
    """A program of this name that runs `script` of a shell."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def words_of_unit(unit: str) -> list[str]:
    """The command of ExecStart=: as systemd reads it: quoted words with C escapes and % specifiers, no variables."""
    (line,) = re.findall(r"^ExecStart=:/bin/sh -c (.*)$", unit, re.M)
    line = line.removeprefix(r'"exec \"$@\"" sh ')
    found, at = [], 0
    while at < len(line):
        word = _WORD.match(line, at)
        assert word is not None, f"systemd cannot read {line[at:]!r}"
        text = re.sub(r"\\(.)", r"\1", word[1])
        assert re.fullmatch(r"(?:[^%]|%%)*", text), f"a specifier is in {text!r}"
        found.append(text.replace("%%", "%"))
        at = word.end()
    return found


def windows_words(line: str) -> list[str]:
    """As the C runtime splits a command line: 2n backslashes and a quote are n and the quote's end, 2n+1 are n and a quote."""
    found, word, quoted, started, at = [], "", False, False, 0
    while at < len(line):
        slashes = len(line[at:]) - len(line[at:].lstrip("\\"))
        at += slashes
        if line[at : at + 1] == '"':
            word += "\\" * (slashes // 2)
            if slashes % 2:
                word += '"'
            else:
                quoted = not quoted
            started, at = True, at + 1
        elif slashes:
            word, started = word + "\\" * slashes, True
        elif line[at] in " \t" and not quoted:
            if started:
                found.append(word)
            word, started, at = "", False, at + 1
        else:
            word, started, at = word + line[at], True, at + 1
    return [*found, word] if started else found
