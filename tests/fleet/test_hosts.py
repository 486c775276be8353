"""The file of a fleet: what it says counts, and every mistake is told before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nolocod.errors import FleetFileError
from nolocod.fleet.hosts import Host, read_fleet
from nolocod.identity import Identity

if TYPE_CHECKING:
    from pathlib import Path

LINK = f"nolocod:{'ab' * 6}@192.0.2.1:4001/{Identity.generate().peer_id}"
WHOLE = f"""
join = "{LINK}"
nolocod = "/opt/nolocod/bin/nolocod"
ssh_config = "ssh_config"
data = "/srv/texts"
flags = ["--threads", "4"]
limits = {{ duty = "50%", hours = "22:00-07:00" }}

[hosts.gpu1]
[hosts.gpu2]
ssh = "ann@192.0.2.7"
data_dir = "/srv/node"
data = "~/texts"
flags = ["--device", "cuda:1"]
limits = {{ duty = "100%" }}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_said_once_is_for_all_hosts(tmp_path: Path) -> None:
    fleet = read_fleet(written(tmp_path, WHOLE))
    assert (fleet.nolocod, fleet.ssh_config) == ("/opt/nolocod/bin/nolocod", str(tmp_path / "ssh_config"))
    limits = {"duty": "50%", "hours": "22:00-07:00"}
    more = limits | {"duty": "100%"}
    assert fleet.hosts == {
        "gpu1": Host("gpu1", "~/.nolocod", "/srv/texts", (LINK, "--threads", "4"), limits),
        "gpu2": Host("ann@192.0.2.7", "/srv/node", "~/texts", (LINK, "--threads", "4", "--device", "cuda:1"), more),
    }


def test_a_run_is_named_by_its_nodes_too(tmp_path: Path) -> None:
    text = 'run = "abc"\nbootstrap = ["/ip4/192.0.2.1", "/ip4/192.0.2.2"]\n[hosts.a]'
    host = read_fleet(written(tmp_path, text)).hosts["a"]
    assert host.flags == ("--run=abc", "--bootstrap=/ip4/192.0.2.1", "--bootstrap=/ip4/192.0.2.2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[hosts.a]", "does not say once which run"),
        ('join = "x"\nrun = "y"\n[hosts.a]', "does not say once which run"),
        ('join = "nolocod:nonsense"\n[hosts.a]', "'nolocod:nonsense' is no link"),
        ('join = "--data-dir=/"\n[hosts.a]', r"at `$.join`"),
        ('join = "x"', "missing required field `hosts`"),
        ('join = "x"\nhosts = {}', "length >= 1"),
        ('join = "x"\nhost = 1\n[hosts.a]', "unknown field `host`"),
        ('join = "x"\n[hosts.a]\ndatadir = "/x"', "host 'a': Object contains unknown field `datadir`"),
        ('join = "x"\n[hosts.a]\nssh = "-oProxyCommand=touch pwned"', "host 'a': Expected `str` matching regex"),
        ('join = "x"\n[hosts.a]\nssh = "ann@-oProxyCommand=x"', "at `$.hosts[...].ssh`"),
        ('join = "x"\n[hosts.a]\nssh = "-v"', "at `$.hosts[...].ssh`"),
        ('join = "x"\n[hosts.a]\nssh = "ann@-v"', "at `$.hosts[...].ssh`"),
        ('join = "x"\n[hosts.a]\nssh = "a;b"', "at `$.hosts[...].ssh`"),
        ('join = "x"\n[hosts.a]\nssh = "a\\n"', "at `$.hosts[...].ssh`"),
        ('join = "x"\n[hosts."-a"]', "at `key` in `$.hosts`"),
        ('join = "x"\n[hosts."a b"]', "at `key` in `$.hosts`"),
        ('join = "x"\n[hosts.a]\ndata_dir = "/x\\ny"', "host 'a': Expected `str` matching"),
        ('join = "x"\n[hosts.a]\ndata_dir = "node"', "host 'a': Expected `str` matching"),
        ('join = "x"\n[hosts.a]\nflags = ["--data-dir", "/x"]', "host a: --data-dir is a key of its own"),
        ('join = "x"\n[hosts.a]\nlimits = { duty = "half" }', "host a: limits.duty 'half' is no share"),
        ('join = "x"\n[hosts.a]\nlimits = { duti = "50%" }', "there is no setting 'duti'"),
        ('join = "x"\n[hosts.a]\n[hosts.b]\nssh = "a"', "a and b are one host with one data directory"),
        ("join = ", "is not TOML"),
        ('join = "\\u0000"\n[hosts.a]', r"at `$.join`"),
    ],
)
def test_a_mistake_is_told_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(FleetFileError) as told:
        read_fleet(written(tmp_path, text))
    assert says in told.value.cause
    assert str(tmp_path / "hosts.toml") in told.value.cause


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match="cannot be read"):
        read_fleet(tmp_path / "missing.toml")
