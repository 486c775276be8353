"""Entries for service managers: each holds the command line as its manager reads it, and is there whole or not at all."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from nolocod.errors import ServiceError, UsageError
from nolocod.node import autostart
from nolocod.node.autostart import Service, service
from nolocod.paths import DataDir
from tests.support.service_managers import tool, windows_words, words_of_unit

if TYPE_CHECKING:
    from pathlib import Path

ODD = [
    "plain", "two words", "tab-less 'single'", 'say "hi"', "back\\slash", 'end\\"', "trailing\\", "100%", "%h", "$HOME", "${X}",
    "semi;colon", "a&b<c>", "ünï 日本", "--x=y z", "*", "#hash", "~", "@at", "-", "+", "!",
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user whose system has no service manager's tools, and a name with a space in it."""
    home = tmp_path / "Ann Other's 100% $HOME"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return home


def entry(home: Path, kind: str, *words: str, start: bool = True) -> Service:
    command = ["/opt/my python/bin/python3", *words]
    tool(home.parent / "bin", "whoami.exe", r"echo 'PC\Ann & Bob'")
    env = {"WSL_DISTRO_NAME": "Ubuntu 24", "USER": "ann"} if kind == "task" else {}
    platform = "darwin" if kind == "launchd" else "linux"
    return service(DataDir(home / ".nolocod"), command, env, platform, start=start)


def words(made: Service, kind: str) -> list[str]:
    """The command as the manager would run it."""
    if kind == "launchd":
        told = plistlib.loads(made.content)["ProgramArguments"]
        return [str(word) for word in told]
    if kind == "task":
        arguments = ElementTree.fromstring(made.content).findtext(".//{*}Arguments")
        assert arguments is not None
        head, rest = windows_words(arguments)[:5], windows_words(arguments)[5:]
        assert head == ["-d", "Ubuntu 24", "-u", "ann", "--exec"]
        return rest
    return words_of_unit(made.content.decode())


@pytest.mark.parametrize("kind", ["systemd", "launchd", "task"])
def test_odd_words_arrive_as_they_are(home: Path, kind: str) -> None:
    told = [*ODD, str(home)]
    assert words(entry(home, kind, *told), kind) == ["/opt/my python/bin/python3", *told]


@pytest.mark.parametrize("word", ["two\nlines", "nul\0", "\x1b[0m", "not-utf8-\udcff", "\x7f"])
@pytest.mark.parametrize("kind", ["systemd", "launchd", "task"])
def test_what_no_file_can_hold_is_refused(home: Path, kind: str, word: str) -> None:
    with pytest.raises(UsageError, match="cannot be written into a service's file"):
        entry(home, kind, word)
    with pytest.raises(UsageError, match="cannot be written into a service's file"):
        service(DataDir(home / word), [], {}, "linux")


def test_systemd_itself_reads_the_unit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    python = tmp_path / "a python's 100% $HOME"
    python.symlink_to(sys.executable)
    made = service(DataDir(home), [str(python), *ODD], {"XDG_CONFIG_HOME": str(tmp_path)}, "linux")
    for content, good in ((made.content, True), (made.content.replace(rb"trailing\\", b"trailing\\"), False)):
        (tmp_path / "nolocod.service").write_bytes(content)
        line = ["systemd-analyze", "--user", "--man=no", "verify", str(tmp_path / "nolocod.service")]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert "Failed to initialize" not in done.stderr
        ours = [line for line in done.stderr.splitlines() if "nolocod.service" in line]
        assert (not ours) == good, done.stderr


@pytest.mark.parametrize("kind", ["systemd", "launchd", "task"])
def test_starting_with_the_machine_is_the_owners_word(home: Path, kind: str) -> None:
    with_it, alone = entry(home, kind, "x"), entry(home, kind, "x", start=False)
    if kind == "launchd":
        agents = [plistlib.loads(one.content) for one in (with_it, alone)]
        assert [agent["RunAtLoad"] for agent in agents] == [True, False]
        assert "KeepAlive" not in agents[1], "it starts what it keeps alive"
    elif kind == "task":
        users = [ElementTree.fromstring(one.content).findtext(".//{*}LogonTrigger/{*}UserId") for one in (with_it, alone)]
        assert users == [r"PC\Ann & Bob", None]
        assert ElementTree.fromstring(with_it.content).tag == "{http://schemas.microsoft.com/windows/2004/02/mit/task}Task"
    else:
        assert ("systemctl", "--user", "enable", "nolocod.service") in with_it.take
        assert ("systemctl", "--user", "disable", "nolocod.service") in alone.take
        assert any("enable-linger" in command for command in with_it.take)
        assert not any("enable-linger" in command for command in alone.take)


def test_the_unit_is_told_when_the_node_is_up(home: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign] # systemd's keys have capitals
    unit.read_string(entry(home, "systemd", "x").content.decode())
    assert (unit["Service"]["Type"], unit["Service"]["RestartPreventExitStatus"]) == ("notify", "2")
    assert unit["Install"]["WantedBy"] == "default.target"


def test_each_data_directory_has_an_entry_of_its_own(home: Path) -> None:
    files = [service(DataDir(home / name), [], {}, "linux").file for name in (".nolocod", "one", "two", "one")]
    assert files[0] == home / ".config/systemd/user/nolocod.service"
    assert len(set(files)) == 3
    assert files[1] == files[3]


@pytest.mark.parametrize("kind", ["systemd", "launchd", "task"])
def test_it_is_written_handed_over_and_taken_away(home: Path, tmp_path: Path, kind: str) -> None:
    made = entry(home, kind, "x")
    assert autostart.remove(made) is None
    assert autostart.install(made) == [], "no manager is there: the file alone is written"
    assert made.file.read_bytes() == made.content
    assert made.file.stat().st_mode & 0o777 == 0o600
    assert autostart.remove(made) == []
    assert list(made.file.parent.iterdir()) == []
    said = tmp_path / "said"
    for name in ("systemctl", "loginctl", "launchctl", "schtasks.exe"):
        tool(tmp_path / "bin", name, f'echo {name} "$@" >>"{said}"')
    tool(tmp_path / "bin", "wslpath", "echo C:/x")
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    assert autostart.install(made) == []
    told = said.read_text().splitlines()
    assert len(told) == {"systemd": 4, "launchd": 3, "task": 2}[kind], told
    assert made.manager in told[-1]
    assert autostart.remove(made) == []
    assert len(said.read_text().splitlines()) > len(told)
    assert not made.file.exists()


@pytest.mark.parametrize("kind", ["systemd", "launchd", "task"])
def test_what_the_manager_refuses_leaves_nothing_behind(home: Path, tmp_path: Path, kind: str) -> None:
    made = entry(home, kind, "x")
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    tool(tmp_path / "bin", made.manager, "echo first >&2; echo no bus >&2; exit 1")
    with pytest.raises(ServiceError, match="failed: no bus"):
        autostart.install(made)
    assert list(made.file.parent.iterdir()) == []


def test_a_refused_linger_is_told_and_no_fault(home: Path, tmp_path: Path) -> None:
    tool(tmp_path / "bin", "systemctl", "exit 0")
    tool(tmp_path / "bin", "loginctl", "exit 1")
    made = entry(home, "systemd", "x")
    assert autostart.install(made) == ["loginctl --no-ask-password enable-linger"]
    assert made.file.exists()


def test_windows_that_cannot_be_called_is_an_error(home: Path) -> None:
    with pytest.raises(ServiceError, match="Windows does not tell who you are"):
        service(DataDir(home), [], {"WSL_DISTRO_NAME": "Ubuntu"}, "linux")
    service(DataDir(home), [], {"WSL_DISTRO_NAME": "Ubuntu"}, "linux", start=False)
