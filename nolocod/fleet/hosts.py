"""Reads the file that names a fleet's hosts, and what their nodes join.

The rule: all of it is checked before the first connection; nothing in it can become an option of ssh, and no text in it has
control characters. What a shell would read is quoted where the script is made (remote.py).
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, structs

from nolocod.errors import FleetFileError, NolocodError
from nolocod.node.settings import read_settings
from nolocod.run.announcements import read_link

if TYPE_CHECKING:
    from pathlib import Path

_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]+\Z", max_length=4096)]
_Word = Annotated[str, Meta(pattern=r"^(?!-)[^\x00-\x1f\x7f]+\Z", max_length=4096)]
"""Not an option of the program that gets it."""
_Folder = Annotated[str, Meta(pattern=r"^~?/[^\x00-\x1f\x7f]*\Z", max_length=4096)]
_Destination = Annotated[str, Meta(pattern=r"^(?!-)(?!.*@-)[A-Za-z0-9_.:@/\[\]-]{1,255}\Z")]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine. Paths are those of the machine; "~/" begins its user's home."""

    ssh: _Destination = ""
    """A host, USER@HOST, ssh://USER@HOST:PORT, or an alias of ssh's own configuration; empty for the host's name here."""
    data_dir: _Folder = "~/.nolocod"
    data: _Word = ""
    flags: tuple[_Text, ...] = ()
    limits: dict[_Name, _Text] = {}
    """As `nolocod set` takes them."""


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data`, `flags` and `limits` are for all hosts, unless a host has its own; flags and limits add up."""

    hosts: Annotated[dict[_Name, Host], Meta(min_length=1, max_length=1000)]
    join: _Word = ""
    """The run's link or name ..."""
    run: _Word = ""
    bootstrap: tuple[_Word, ...] = ()
    invite: _Word = ""
    """... or what the flags of these names say."""
    nolocod: _Word = "nolocod"
    """The program, as the hosts know it."""
    ssh_config: _Text = ""
    """A file for `ssh -F`, beside the fleet's."""
    data: _Word = ""
    flags: tuple[_Text, ...] = ()
    limits: dict[_Name, _Text] = {}


def read_fleet(path: Path) -> Fleet:
    """What the file says, with each host whole: its `flags` are all words after `nolocod join`. FleetFileError names the key,
    and the host."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        fleet = msgspec.convert(table, Fleet)
        if fleet.join.startswith("nolocod:"):
            read_link(fleet.join)
        hosts = {name: _whole(name, host, fleet) for name, host in fleet.hosts.items()}
    except OSError as error:
        raise FleetFileError(f"{path} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FleetFileError(f"{path} is not TOML: {error}.") from error
    except msgspec.ValidationError as error:
        raise FleetFileError(f"{path}{_host_of(table)}: {error}") from error
    except NolocodError as error:
        raise FleetFileError(f"{path}: {error.cause}") from error
    if not (fleet.join or fleet.bootstrap or fleet.invite) or (fleet.join and fleet.run):
        remedy = "Write `join` (the run's link or name), or `bootstrap` and perhaps `run`, or `invite`."
        raise FleetFileError(f"{path} does not say once which run the hosts join.", remedy=remedy)
    places = [(host.ssh, host.data_dir) for host in hosts.values()]
    if twice := [name for name, host in hosts.items() if places.count((host.ssh, host.data_dir)) > 1]:
        raise FleetFileError(f"{path}: {' and '.join(twice)} are one host with one data directory.")
    return structs.replace(fleet, hosts=hosts, ssh_config=str(path.parent / fleet.ssh_config) if fleet.ssh_config else "")


def _whole(name: str, host: Host, fleet: Fleet) -> Host:
    given = {"run": (fleet.run,), "bootstrap": fleet.bootstrap, "invite": (fleet.invite,)}
    words = [f"--{key}={text}" for key, texts in given.items() for text in texts if text]
    flags, limits = (*fleet.flags, *host.flags), {**fleet.limits, **host.limits}
    read_settings(limits, flag=f"host {name}: limits.")
    if taken := [flag for flag in flags if flag.startswith("--data")]:
        raise FleetFileError(f"host {name}: {taken[0]} is a key of its own here: `data` or `data_dir`.")
    joined = (*filter(None, [fleet.join]), *words, *flags)
    return Host(msgspec.convert(host.ssh or name, _Destination), host.data_dir, host.data or fleet.data, joined, limits)


def _host_of(table: dict[str, Any]) -> str:
    """The first host with a table that is not one of a host, for msgspec names keys alone."""
    for name, host in table["hosts"].items() if isinstance(table.get("hosts"), dict) else ():
        try:
            msgspec.convert(host, Host)
        except msgspec.ValidationError:
            return f": host {name!r}"
    return ""
