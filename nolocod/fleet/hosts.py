"""Reads the file that names a fleet's hosts, and what their nodes join.

The rule: all of it is checked before the first connection; nothing in it can become an option of ssh, and no text in it has
control characters. What a shell would read is quoted where the script is made (remote.py).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from nolocod.errors import FleetFileError, NoSuchRunError, UsageError
from nolocod.node.settings import read_settings
from nolocod.run.announcements import read_link

if TYPE_CHECKING:
    from pathlib import Path

_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]+\Z", max_length=4096)]
_Word = Annotated[str, Meta(pattern=r"^(?!-)[^\x00-\x1f\x7f]+\Z", max_length=4096)]
"""Not an option of the program that gets it."""
_Destination = Annotated[str, Meta(pattern=r"^(?!-)(?!.*@-)[A-Za-z0-9_.:@/\[\]-]{1,255}\Z")]
"""A host, USER@HOST, an alias of ssh's own configuration, or ssh://USER@HOST:PORT."""
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]


class _Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ssh: _Destination = ""
    data_dir: _Word = "~/.nolocod"
    data: _Word = ""
    flags: tuple[_Text, ...] = ()
    limits: dict[_Name, _Text] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: Annotated[dict[_Name, dict[str, Any]], Meta(min_length=1, max_length=1000)]
    join: _Word = ""
    run: _Word = ""
    bootstrap: tuple[_Word, ...] = ()
    invite: _Word = ""
    nolocod: _Word = "nolocod"
    ssh_config: _Text = ""
    data: _Word = ""
    flags: tuple[_Text, ...] = ()
    limits: dict[_Name, _Text] = {}


@dataclass(frozen=True)
class Host:
    """One machine. Paths are those of the machine; "~/" begins its user's home."""

    name: str
    ssh: str
    data_dir: str
    data: str
    join: tuple[str, ...]
    """What `nolocod join` is told: the run, and flags for all hosts and for this one."""
    limits: dict[str, str]
    """As `nolocod set` takes them."""


@dataclass(frozen=True)
class Fleet:
    hosts: tuple[Host, ...]
    program: str
    """nolocod, as the hosts know it."""
    ssh_config: Path | None


def read_fleet(path: Path) -> Fleet:
    """Raises FleetFileError, which names the key, and the host if it is one's own."""
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except OSError as error:
        raise FleetFileError(f"{path} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FleetFileError(f"{path} is not TOML: {error}.") from error
    except msgspec.ValidationError as error:
        raise FleetFileError(f"{path}: {error}") from error
    target = _target(file, path)
    hosts = tuple(_host(name, table, file, target, path) for name, table in file.hosts.items())
    for index, host in enumerate(hosts):
        for other in hosts[:index]:
            if (host.ssh, host.data_dir) == (other.ssh, other.data_dir):
                raise FleetFileError(f"{path}: {other.name} and {host.name} are one host with one data directory.")
    return Fleet(hosts, file.nolocod, path.parent / file.ssh_config if file.ssh_config else None)


def _target(file: _File, path: Path) -> tuple[str, ...]:
    """What `nolocod join` is told of the run."""
    if not (file.join or file.bootstrap or file.invite) or (file.join and file.run):
        remedy = "Write `join` (the run's link or name), or `bootstrap` and perhaps `run`, or `invite`."
        raise FleetFileError(f"{path} does not say once which run the hosts join.", remedy=remedy)
    if file.join.startswith("nolocod:"):
        try:
            read_link(file.join)
        except NoSuchRunError as error:
            raise FleetFileError(f"{path}: `join`: {error.cause}") from error
    given = {"run": (file.run,), "bootstrap": file.bootstrap, "invite": (file.invite,)}
    return (*filter(None, [file.join]), *(f"--{key}={text}" for key, texts in given.items() for text in texts if text))


def _host(name: str, table: dict[str, Any], file: _File, target: tuple[str, ...], path: Path) -> Host:
    where = f"{path}: host {name}"
    try:
        own = msgspec.convert(table, _Host)
        ssh = own.ssh or msgspec.convert(name, _Destination)
        limits = {**file.limits, **own.limits}
        read_settings(limits, flag="limits.")
    except msgspec.ValidationError as error:
        raise FleetFileError(f"{where}: {error}") from error
    except UsageError as error:
        raise FleetFileError(f"{where}: {error.cause}") from error
    flags = (*file.flags, *own.flags)
    if taken := [flag for flag in flags if flag.startswith("--data")]:
        raise FleetFileError(f"{where}: {taken[0]} is a key of its own here.", remedy="Write `data` or `data_dir`.")
    return Host(name, ssh, own.data_dir, own.data or file.data, (*target, *flags), limits)
