"""What a fleet's hosts are asked for: values stay values, an update keeps the run's nodes, and a bad host costs the others
nothing. ssh is a stand-in here, which runs what it is told as sshd would; tests/e2e/test_fleet.py has the real one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from nolocod import cli
from nolocod.fleet import remote
from nolocod.fleet.hosts import Fleet, Host
from nolocod.observe.status.report import StatusReport

HOSTILE = ["$(touch pwned)", "`touch pwned`", "; touch pwned #", "a'b\"c d\\", "&& touch pwned", "| touch pwned", "*", "%h%i$$"]
_NODE = r"""#!/bin/sh
# stands in for nolocod: notes its arguments, and trains while "up" is there
home=$(dirname "$0")
case $1 in
    join) printf '%s\n' "$@" >"$home/joined"; echo join >>"$home/order"; touch "$home/up" ;;
    stop) echo stop >>"$home/order"; rm -f "$home/up" ;;
    set) printf '%s\n' "$@" >"$home/set" ;;
    status)
        [ -e "$home/up" ] || { echo "error NLC-130: no daemon runs here" >&2; exit 1; }
        cat "$home/report.json" ;;
esac
"""
_SSH = """#!/bin/sh
# stands in for ssh: the host is a folder, which is its home
while [ "$1" != -- ]; do shift; done
[ "$2" != gone ] || { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }
[ "$2" != slow ] || exec /bin/sleep 60
mkdir -p "$FLEET_HOSTS/$2" && cd "$FLEET_HOSTS/$2" && HOME=$PWD exec sh -c "echo Welcome; $3"
"""
REPORT = StatusReport(
    version="1", peer_id="12D3KooWabcdefgh", run_id="", run_name="", addresses=(), http="", pid=1, state="training", round=7
)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hosts' homes are; the stand-in for ssh is found before the system's, and no host has systemd."""
    executable(tmp_path / "bin/ssh", _SSH)
    executable(tmp_path / "bin/systemctl", "#!/bin/sh\nexit 1\n")
    others = [
        one for one in os.environ["PATH"].split(os.pathsep) if not Path(one, "nolocod").exists()
    ]  # a venv's, if one is active
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), *others]))
    executable(tmp_path / "bin/sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")
    monkeypatch.setenv("FLEET_HOSTS", str(tmp_path / "homes"))
    return tmp_path / "homes"


def with_nolocod(home: Path) -> Path:
    executable(home / ".local/bin/nolocod", _NODE)
    (home / ".local/bin/report.json").write_bytes(msgspec.json.format(msgspec.json.encode(REPORT), indent=2))
    return home / ".local/bin"


def fleet(*names: str, data_dir: str = "~/.nolocod", data: str = "", flags: tuple[str, ...] = (), **limits: str) -> Fleet:
    return Fleet({name: Host(name, data_dir, data, flags, limits) for name in names})


def done(action: remote.Action, those: Fleet, install: str = "", *, at_once: int = 4, seconds: float = 30) -> list[remote.Row]:
    return trio.run(partial(remote.on_each, those, action, install, at_once=at_once, seconds=seconds))


def states(rows: list[remote.Row]) -> list[str]:
    return [row.report.state if row.report else "" for row in rows]


@pytest.mark.parametrize("bad", HOSTILE)
def test_hostile_values_stay_values(homes: Path, bad: str) -> None:
    there = with_nolocod(homes / "a")
    (row,) = done("up", fleet("a", data_dir=f"~/{bad}/d", data=bad, flags=(bad, f"--run={bad}"), hours=bad))
    assert row.reason == ""
    home = homes / "a"
    assert (there / "joined").read_text().splitlines() == [
        *("join", f"--data-dir={home}/{bad}/d", f"--data={bad}", bad, f"--run={bad}"),
    ]
    assert (there / "set").read_text().splitlines() == ["set", "--data-dir", f"{home}/{bad}/d", f"hours={bad}"]
    assert stat.S_IMODE((home / bad / "d" / "fleet.sh").stat().st_mode) == 0o600, "it may hold an invitation"
    assert not list(homes.rglob("pwned"))


@pytest.mark.parametrize("bad", HOSTILE)
def test_a_hostile_program_is_a_name_that_is_not_there(homes: Path, bad: str) -> None:
    (row,) = done("up", msgspec.structs.replace(fleet("a"), nolocod=bad))
    assert f"{' '.join(bad.split())} is not there" in row.reason
    assert not list(homes.rglob("pwned"))


def test_up_comes_to_the_same_when_it_is_said_again_and_down_too(homes: Path) -> None:
    there = with_nolocod(homes / "a")
    for _ in range(2):
        (row,) = done("up", fleet("a"))
        assert row == remote.Row(host="a", report=REPORT)
    assert (there / "order").read_text().split() == ["join"]
    for _ in range(2):
        assert done("down", fleet("a")) == [remote.Row(host="a")]
    assert not (there / "up").exists()


_SYSTEMD_RUN = """#!/bin/sh
# stands in for systemd-run: notes what it is asked for, and does it
printf '%s\n' "$@" >"$HOME/systemd-run"
for word in "$@"; do case $word in --working-directory=*) cd "${word#*=}" ;; esac; done
while [ "$1" != /bin/sh ]; do shift; done
"$@" &
"""


@pytest.mark.parametrize("lingers", ["yes", "no"])
def test_a_daemon_is_systemds_only_where_it_would_stay(homes: Path, lingers: str) -> None:
    tools = homes.parent / "bin"
    executable(tools / "systemctl", "#!/bin/sh\ncase $* in *is-active*) exit 3 ;; esac\n")
    executable(tools / "loginctl", f'#!/bin/sh\n[ "$1" = enable-linger ] || echo {lingers}\n')
    executable(tools / "systemd-run", _SYSTEMD_RUN)
    there = with_nolocod(homes / "a")
    (row,) = done("up", fleet("a", data_dir=f"~/{HOSTILE[0]}"))
    assert row == remote.Row(host="a", report=REPORT)
    assert (there / "order").read_text().split() == ["join"]
    asked = homes / "a/systemd-run"
    assert asked.exists() == (lingers == "yes")
    if lingers == "yes":
        words = asked.read_text().splitlines()
        assert {"--user", "--unit=nolocod-a", "Type=notify", f"--working-directory={homes}/a/{HOSTILE[0]}"} <= set(words)
        assert words[-2:] == ["/bin/sh", "fleet.sh"]


def test_a_host_that_fails_is_one_row_with_the_reason(homes: Path) -> None:
    for name in ("well", "down"):
        with_nolocod(homes / name)
    done("up", fleet("well"))
    rows = done("status", fleet("gone", "down", "bare", "slow", "well"), at_once=5, seconds=2)
    assert [row.host for row in rows] == ["gone", "down", "bare", "slow", "well"]
    assert states(rows) == ["", "", "", "", "training"]
    says = ["No route to host", "NLC-130", "nolocod is not there. Install it", "no answer within 2 s", ""]
    for row, text in zip(rows, says, strict=True):
        assert text in row.reason
        assert bool(text) == bool(row.reason)


def test_nothing_is_installed_but_by_a_command(homes: Path) -> None:
    source = with_nolocod(homes / "source")
    install = f"mkdir -p .local && cp -r {source} .local/bin"
    (row,) = done("up", fleet("a"), install=install)
    assert row.report == REPORT
    done("up", fleet("a"), install="touch again")
    assert not (homes / "a/again").exists(), "it is there"
    (row,) = done("up", fleet("b"), install="echo no network >&2; false")
    assert "no network the command of --install failed." in row.reason


def test_an_update_restarts_in_turn_and_ends_at_the_first_failure(homes: Path) -> None:
    names = ["a", "b", "c"]
    for name in names:
        with_nolocod(homes / name)
    done("up", fleet(*names))
    rows = done("update", fleet(*names), install="true", at_once=1)
    assert states(rows) == ["training"] * 3
    orders = [(homes / name / ".local/bin/order").read_text().split() for name in names]
    assert orders == [["join", "stop", "join"]] * 3
    rows = done("update", fleet(*names), install='[ "$(basename "$PWD")" != b ]', at_once=1)
    assert [bool(row.reason) for row in rows] == [False, True, True]
    assert "left as it was" in rows[2].reason
    assert [(homes / name / ".local/bin/up").exists() for name in names] == [True] * 3, "no node was lost"
    assert (homes / "c/.local/bin/order").read_text().split() == ["join", "stop", "join"]


def test_an_update_waits_until_the_node_trains(homes: Path) -> None:
    there = with_nolocod(homes / "a")
    text = (there / "report.json").read_text()
    (there / "report.json").write_text(text.replace('"training"', '"discovering"'))
    (row,) = done("update", fleet("a"), install="true", seconds=7)
    assert "it does not train again yet" in row.reason


def test_all_hosts_are_one_table_and_the_exit_status_says_whether_all_is_well(
    homes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_nolocod(homes / "well")
    file = tmp_path / "hosts.toml"
    file.write_text('join = "verse"\n[hosts.well]\n')
    cli.main(["fleet", str(file), "up"])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["host", "state", "round", "tokens/s", "loss", "partner", "errors"]
    assert line.split() == ["well", "training", "7", "0", "-", "-", "-"]
    file.write_text('join = "verse"\n[hosts.gone]\n[hosts.well]\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["fleet", str(file), "status", "--json"])
    assert ended.value.code == 1
    said = capsys.readouterr()
    gone, well = map(json.loads, said.out.splitlines())
    assert (gone["host"], gone["report"], well["reason"], well["report"]["round"]) == ("gone", None, "", 7)
    assert "No route to host" in gone["reason"]
    assert "NLC-191" in said.err
    assert "1 of 2 hosts: gone." in said.err


def test_no_more_hosts_at_once_than_was_said(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def ask(*_: object) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await trio.sleep(0.01)
        now -= 1
        return ""

    monkeypatch.setattr(remote, "ask", ask)
    rows = done("down", fleet(*(f"h{number}" for number in range(40))), at_once=3)
    assert (len(rows), most, {row.reason for row in rows}) == (40, 3, {""})


def test_the_user_is_asked_for_nothing_and_a_host_is_no_option(homes: Path) -> None:
    executable(homes.parent / "bin/ssh", f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{homes.parent}/said; cat >/dev/null; echo {{}}\n")
    those = msgspec.structs.replace(fleet("a"), ssh_config="/x/ssh_config")
    trio.run(remote.ask, those, those.hosts["a"], "", 5)
    said = (homes.parent / "said").read_text().splitlines()
    assert said[-3:] == ["--", "a", "sh -s"]
    assert said[said.index("-F") + 1] == "/x/ssh_config"
    assert "BatchMode=yes" in said


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_the_script_is_one_for_every_sh(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = remote.script(fleet("a"), "a", "status", "", 9)
    told = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def test_the_script_has_no_complaint_of_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("Debian's package shellcheck is not installed")
    told = subprocess.run(
        ["shellcheck", "-f", "json", Path(remote.__file__).with_name("host.sh")], capture_output=True, check=False
    )
    assert json.loads(told.stdout) == []
