"""The command line: every mistake ends in one error with a code, a cause and a remedy, and a status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nolocod import cli
from nolocod.commands import node
from nolocod.errors import NolocodError, TrainerError, UnstableError, UsageError
from nolocod.identity import Identity, PeerId, load
from nolocod.node.settings import AS_IT_IS, Settings
from nolocod.observe.events import Started
from nolocod.p2p.settings import Allowance
from nolocod.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OTHER = Identity.generate().peer_id
RUN = 'name = "one"\n[model]\nmodel_type = "llama"\n'


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command."""
    status: int = 0
    try:
        cli.main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one and holds the default data directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOLOCOD_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["frobnicate"], "NLC-100", "frobnicate"),
        (["join"], "NLC-100", "needs --bootstrap"),
        (["join", "--bootstrap", "x", "--run", "abcdef12345"], "NLC-100", "--run 'abcdef12345' is no run id"),
        (["join", "--bootstrap", "x", "--run", "ab" * 33], "NLC-100", "is no run id"),
        (["join", "--bootstrap", "x", "--run", "of-the-family"], "NLC-100", "is no run id"),
        (["watch"], "NLC-100", "needs --bootstrap or --invite"),
        (["watch", "of-the-family", "--bootstrap", "x"], "NLC-100", "--bootstrap 'x' is not a TCP multiaddr"),
        (["watch", "nolocod:nonsense"], "NLC-160", "is no link to a run"),
        (["join", "nolocod:nonsense"], "NLC-160", "is no link to a run"),
        (["join", "verse"], "NLC-100", "no node is known that could be asked"),
        (["join", "verse", "--run", "ab" * 32], "NLC-100", "exclude each other"),
        (["runs"], "NLC-100", "no node is known that could be asked"),
        (["announce"], "NLC-100", "belongs to no run"),
        (["watch", "--bootstrap", "x"], "NLC-100", "x"),
        (["watch", "--bootstrap", "x", "--http", "127.0.0.1:99999"], "NLC-100", "--http"),
        (["watch", "--invite", "x"], "NLC-115", "does not begin with"),
        (["start"], "NLC-100", "belongs to no run"),
        (["generate", "--temperature", "nan"], "NLC-100", "--temperature"),
        (["generate", "--temperature", "inf"], "NLC-100", "--temperature"),
        (["generate", "--seed", str(1 << 63)], "NLC-100", "--seed"),
        (["generate", "--seed", "-1"], "NLC-100", "--seed"),
        (["start", "--listen", "nowhere"], "NLC-100", "belongs to no run"),
        (["join", "--bootstrap", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWx", "--listen", "nowhere"], "NLC-100", "--listen 'nowhere'"),
        (["join", "--bootstrap", "x", "--threads", "-1"], "NLC-100", "--threads cannot be -1"),
        (["join", "--bootstrap", "x", "--nice", "20"], "NLC-100", "--nice cannot be 20"),
        (["join", "--bootstrap", "x", "--clip-change", "0"], "NLC-100", "--clip-change cannot be 0"),
        (["join", "--bootstrap", "x", "--clip-change", "nan"], "NLC-100", "--clip-change cannot be nan"),
        (["join", "--bootstrap", "x", "--duty", "50"], "NLC-100", "--duty '50' is no share"),
        (["join", "--bootstrap", "x", "--duty", "0%"], "NLC-100", "--duty cannot be 0%"),
        (["join", "--bootstrap", "x", "--max-temperature", "nan"], "NLC-100", "--max-temperature cannot be nan"),
        (["join", "--bootstrap", "x", "--pause-when-used", "10"], "NLC-100", "--pause-when-used '10' is not a span"),
        (["set", "duty"], "NLC-171", "'duty' is not KEY=VALUE"),
        (["set", "duty=50%"], "NLC-130", "no running daemon"),
        (["join", "--bootstrap", "x", "--linger", "nan"], "NLC-100", "--linger cannot be nan"),
        (["join", "--bootstrap", "x", "--http", "127.0.0.1:99999"], "NLC-100", "--http"),
        (["join", "--bootstrap", "x", "--max-upload", "20Mb"], "NLC-100", "--max-upload '20Mb' has an unknown unit"),
        (["join", "--bootstrap", "x", "--max-download", "1kbit"], "NLC-100", "--max-download '1kbit' is too slow"),
        (["join", "--bootstrap", "x", "--monthly-budget", "200"], "NLC-100", "--monthly-budget '200'"),
        (["join", "--bootstrap", "x", "--hours", "22:00-07:00,13"], "NLC-100", "--hours '13'"),
        (["join", "--bootstrap", "x", "--name", "<b>"], "NLC-100", "--name '<b>' is no name"),
        (["contributions"], "NLC-100", "belongs to no run"),
        (["contributions", "--export", "x"], "NLC-100", "belongs to no run"),
        (["contributions", "--verify", "missing"], "NLC-161", "missing is not a file"),
        (["contributions", "--verify", "x", "--export", "y"], "NLC-100", "not allowed with"),
        (["status"], "NLC-130", "no running daemon"),
        (["fleet", "missing.toml", "status"], "NLC-190", "missing.toml cannot be read"),
        (["fleet", "x", "update"], "NLC-100", "needed for update"),
        (["fleet", "x", "down", "--install", "y"], "NLC-100", "is for up"),
        (["fleet", "x", "up", "--within", "nan"], "NLC-100", "--within"),
        (["fleet", "x", "up", "--at-once", "0"], "NLC-100", "--at-once"),
        (["fleet", "x", "reboot"], "NLC-100", "reboot"),
        (["eval"], "NLC-131", "belongs to no run"),
        (["export", "out"], "NLC-131", "belongs to no run"),
        (["generate"], "NLC-131", "belongs to no run"),
        (["generate", "--tokens", "0"], "NLC-100", "--tokens"),
        (["create", "missing.toml"], "NLC-101", "missing.toml"),
        (["invite", "--bootstrap", "203.0.113.7:4001"], "NLC-100", "203.0.113.7:4001"),
        (["testnet", "--nodes", "0"], "NLC-100", "--nodes 0"),
        (["testnet", "--outer-steps", "0"], "NLC-100", "--outer-steps 0"),
        (["testnet", "--model", "enormous"], "NLC-101", "enormous"),
        (["lab", "attacks", "--workers", "-1"], "NLC-100", "--workers cannot be negative"),
        (["lab", "attacks", "--reduced", "--into", "docs"], "NLC-100", "--into is for the whole study"),
        (["lab", "attacks", "--into", "nowhere"], "NLC-100", "nowhere/attacks.md cannot be read"),
    ],
)
def test_a_mistake_has_a_code_a_cause_and_a_remedy(
    arguments: Sequence[str],
    code: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOLOCOD_HOME", str(tmp_path / "home"))
    status, out, err = run(capsys, *arguments)
    assert status in (1, 2)
    assert not out
    first, cause, remedy = err.splitlines()
    assert first.startswith(f"error {code}: ")
    assert says in cause
    assert remedy.startswith("  what to do: ")
    assert len(remedy) > len("  what to do: ")


def test_create_prints_the_run_id_and_id_the_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    home = str(tmp_path / "home")
    status, out, _ = run(capsys, "create", str(tmp_path / "run.toml"), "--data-dir", home)
    assert status == 0
    owner = next(line for line in out.splitlines() if "signed by" in line).split()[-1]
    assert any(line.startswith("run id ") and len(line.split()[-1]) == 64 for line in out.splitlines())
    status, out, _ = run(capsys, "id", "--data-dir", home)
    assert (status, out.strip()) == (0, owner)


@pytest.mark.parametrize(
    ("more", "create", "lines"),
    [
        ("", "", ["others join with:", f"  nolocod join --bootstrap /ip4/192.0.2.1/tcp/1 --run {'ab' * 32}"]),
        (
            '[data]\nsource = "text"',
            " --data PATH",
            ["others join with:", f"  nolocod join --bootstrap /ip4/192.0.2.1/tcp/1 --run {'ab' * 32} --data PATH"],
        ),
    ],
)
def test_a_line_to_paste_has_what_its_run_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, create: str, lines: list[str]
) -> None:
    home = tmp_path / "home"
    assert founded(capsys, home, RUN + more).endswith(f"nolocod start --data-dir {home}{create}")
    assert welcome(capsys, home, OTHER)[2:] == lines


def test_a_key_and_an_invitation_are_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keyed, home = tmp_path / "keyed", tmp_path / "home"
    founded(capsys, keyed, RUN)
    (keyed / "network.key").write_text("0" * 64)
    assert (
        welcome(capsys, keyed, OTHER)[-1]
        == f"  nolocod join --bootstrap /ip4/192.0.2.1/tcp/1 --run {'ab' * 32} --network-key FILE"
    )
    _, _, err = run(capsys, "invite", "--bootstrap", f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER}", "--data-dir", str(keyed))
    assert "needs no invitation" in err
    founded(capsys, home, 'access = "invited"\n' + RUN)
    owner = load(DataDir(home).identity).peer_id
    token = "  nolocod join --invite TOKEN"
    assert welcome(capsys, home, owner)[2:] == [f"others join with a token from `nolocod invite --data-dir {home}`:", token]
    assert welcome(capsys, home, OTHER)[2:] == ["others join with a token from the run's owner (`nolocod invite`):", token]
    _, _, err = run(capsys, "invite", "--bootstrap", f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER}", "--data-dir", str(home))
    assert "needs no invitation" not in err


def founded(capsys: pytest.CaptureFixture[str], home: Path, run_file: str) -> str:
    """Found a run; the last line of what the command says."""
    path = home.with_suffix(".toml")
    path.write_text(run_file)
    status, out, _ = run(capsys, "create", str(path), "--data-dir", str(home))
    assert status == 0
    return out.splitlines()[-1]


def welcome(capsys: pytest.CaptureFixture[str], home: Path, peer: PeerId) -> list[str]:
    """What a node with this peer id says as it starts."""
    node.welcome(DataDir(home), Started(peer, "ab" * 32, "one", ("/ip4/192.0.2.1/tcp/1",), "127.0.0.1:2"))
    return capsys.readouterr().out.splitlines()


def test_an_unstable_run_is_refused_with_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN + "[outer]\nalpha = 0.9\ngamma = 0.7\n")
    status, _, err = run(capsys, "create", str(tmp_path / "run.toml"), "--data-dir", str(tmp_path / "home"))
    assert status == 2
    assert UnstableError.entry.code in err
    assert "2(1 - alpha^2) = 0.38" in err


def test_keep_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("x")
    status, _, err = run(capsys, "testnet", "--keep", str(tmp_path))
    assert status == 2
    assert "is not empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 2
    assert "testnet" in out
    assert "join" in out


def test_our_error_is_found_in_groups_and_foreign_ones_are_not_hidden() -> None:
    ours = TrainerError("it died.")
    group = BaseExceptionGroup("tasks", [BaseExceptionGroup("more", [ours, KeyboardInterrupt()])])
    assert cli._find(group) is ours
    assert cli._find(BaseExceptionGroup("tasks", [ours, RuntimeError("a bug")])) is None
    assert isinstance(cli._find(BaseExceptionGroup("tasks", [ours])), NolocodError)


def test_a_report_is_json_with_the_promised_keys() -> None:
    from nolocod.studies.testnet import NodeSummary, Summary

    node = NodeSummary("peer", 1, 2, 3, 4, 5.0, 4.0, 6, 7)
    report = json.loads(Summary([node], 1.0, 2.0, 0.1, 9.0).to_json())
    assert set(report["nodes"][0]) == {
        "peer_id",
        "inner_steps",
        "outer_paired",
        "outer_solo",
        "tokens",
        "val_loss_first",
        "val_loss_last",
        "bytes_sent",
        "bytes_received",
    }
    assert set(report) >= {"nodes", "averaged_val_loss", "alone_val_loss", "weight_std", "seconds"}


def test_an_allowance_is_read_from_its_flags() -> None:
    line = "join --max-upload 20Mbit --max-download 5MB --monthly-budget 200GB --hours 22:00-07:00,12:00-13:00"
    config = node.node_config(cli._parser().parse_args([*line.split(), "--hours", "15:00-16:00", "--pause-on-battery"]))
    allowance = config.allowance
    assert (allowance.up, allowance.down, allowance.monthly) == (2_500_000, 5_000_000, 200_000_000_000)
    assert [str(span) for span in config.settings.hours] == ["22:00-07:00", "12:00-13:00", "15:00-16:00"]
    assert config.settings.pause_on_battery
    plain = node.node_config(cli._parser().parse_args(["join"]))
    assert (plain.allowance, plain.settings) == (Allowance(), AS_IT_IS)


def test_limits_of_the_machine_are_read_from_their_flags() -> None:
    line = "join --duty 50% --max-temperature 80 --max-power 200W --pause-on-metered --pause-when-used 10m"
    line += " --pause-when-gpu-used 1GB --device cpu --threads 3 --nice 19"
    assert node.node_config(cli._parser().parse_args(line.split())).settings == Settings(
        duty=0.5,
        max_temperature=80,
        max_power=200,
        pause_on_metered=True,
        pause_when_used=600,
        pause_when_gpu_used=10**9,
        devices="cpu",
        threads=3,
        nice=19,
    )


@pytest.mark.parametrize("flag", ["--device", "--devices"])
def test_devices_are_read_before_anything_starts(flag: str) -> None:
    def read(*line: str) -> str:
        return node.node_config(cli._parser().parse_args(["join", *line])).settings.devices

    assert read(flag, "0, 1") == "0,1"
    assert read() == "auto"
    with pytest.raises(UsageError, match="--devices '0,0' names cuda:0 twice"):
        read(flag, "0,0")
    assert read(flag, "cuda:1", "--loop", "3,4") == "cuda:1"
    for several in ("cpu:2", "0,1", "all"):
        with pytest.raises(UsageError, match="a loop of your own trains on the device of its parameters"):
            read(flag, several, "--loop", "3,4")


def test_pages_are_for_this_machine_alone_unless_told() -> None:
    assert node.node_config(cli._parser().parse_args(["join"])).http.host == "127.0.0.1"


def test_runs_are_asked_of_the_nodes_in_the_file(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = nowhere / "home"
    home.mkdir()
    (home / "bootstraps").write_text(f"# mine\n\n/ip4/127.0.0.1/tcp/1/p2p/{OTHER}  # down\n")
    status, out, err = run(capsys, "runs", "--json")
    assert (status, out) == (1, "")
    assert "NLC-110" in err
    assert "/ip4/127.0.0.1/tcp/1" in err


@pytest.mark.parametrize("command", ["watch", "announce", "runs"])
def test_a_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"Example: nolocod {command} " in " ".join(out.split())
    assert "--json" in out


def test_who_may_announce_and_what_must_be_there(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = nowhere / "home"
    (nowhere / "run.toml").write_text(RUN)
    assert run(capsys, "create", "run.toml")[0] == 0
    for arguments, code, says in (
        (["announce"], "NLC-100", "no node of this run can be named"),
        (["announce", "--expires", "60d"], "NLC-100", "longer than 30d"),
        (["announce", "--address", "nowhere"], "NLC-100", "nowhere"),
    ):
        status, _, err = run(capsys, *arguments)
        assert (status, code in err, says in err) == (2, True, True), err
    DataDir(home).identity.unlink()
    assert run(capsys, "id")[0] == 0
    status, _, err = run(capsys, "announce", "--address", f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER}")
    assert (status, "NLC-104" in err) == (1, True), err
    assert not DataDir(home).announcement.exists(), "nothing half-written"
