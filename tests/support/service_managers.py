"""Stand-ins for service managers: tools that say what they were told, and how systemd and Windows read a command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


_SYSTEMCTL = """\
#!{python}
import os, signal, subprocess, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.service_managers import words_of_unit

word, *rest = sys.argv[2:]  # behind --user
unit, pid = Path(os.environ["XDG_CONFIG_HOME"]) / "systemd/user" / (rest or [""])[-1], Path({folder!r}) / "pid"
if pid.exists() and (word == "restart" or "--now" in rest):
    os.kill(int(pid.read_text()), signal.SIGTERM)
    while Path("/proc/" + pid.read_text()).exists():
        signal.sigtimedwait([], 0.1)
    pid.unlink()
if word == "restart":
    with open(Path({folder!r}) / "journal", "ab") as journal:
        line = ["setsid", "--fork", "sh", "-c", 'echo $$ >"$0"; exec "$@"', pid, *words_of_unit(unit.read_text())]
        subprocess.run(line, stdin=subprocess.DEVNULL, stdout=journal, stderr=journal, check=True)
    while not (pid.exists() and pid.read_text().strip()):
        signal.sigtimedwait([], 0.05)
    pid.write_text(pid.read_text().strip())
"""
"""Starts and stops one unit's command, as systemd would: tests run where no systemd does."""


def systemctl(folder: Path) -> Path:
    """A stand-in for it in `folder`; a file `pid` there tells what it started, `journal` what that said."""
    path = folder / "systemctl"
    path.write_text(_SYSTEMCTL.format(python=sys.executable, root=str(ROOT), folder=str(folder)))
    path.chmod(0o755)
    return path
