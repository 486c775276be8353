"""Three questions and their flags; which version a run needs, and what installs it."""

from __future__ import annotations

import io
import json
import shlex
import sys
from importlib.metadata import PathDistribution
from typing import TYPE_CHECKING

import pytest

from nolocod import cli
from nolocod.commands import installation, node, registry, up
from nolocod.errors import NoBootstrapError, ServiceError, UsageError
from nolocod.identity import Identity
from nolocod.node import data_directory
from nolocod.paths import DataDir
from nolocod.run.announcements import Announcement
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.watch.runs import Found
from tests.support.service_managers import tool, words_of_unit

if TYPE_CHECKING:
    from pathlib import Path

OWNER = Identity.generate()
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{OWNER.peer_id}"
SEALED = seal(Manifest(name="verse", model={"model_type": "llama"}), OWNER)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user without a service manager, for whom all addresses lead to one run, and nobody sits at the terminal."""
    home = tmp_path / "a home"
    home.mkdir()
    for name in ("NOLOCOD_HOME", "XDG_CONFIG_HOME", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(up, "_found", lambda *_: SEALED)
    return home


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = 0
    try:
        cli.main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, *capsys.readouterr()


def unit(home: Path) -> Path:
    return home / ".config/systemd/user/nolocod.service"


def left(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "NAME or LINK is missing, and nobody can be asked here"),
        ([ADDRESS], "--use is missing"),
        ([ADDRESS, "--use", "half"], "--autostart is missing"),
        ([ADDRESS, "--use", "most", "--autostart", "no"], "--use 'most' is none of all, half, idle"),
        ([ADDRESS, "--use", "", "--autostart", "no"], "--use '' is none of"),
        ([ADDRESS, "--use", "dutty=5%", "--autostart", "no"], "there is no setting 'dutty'"),
        ([ADDRESS, "--use", "half duty=500%", "--autostart", "no"], "--use duty cannot be 500%"),
        ([ADDRESS, "--use", "half", "--autostart", "maybe"], "--autostart 'maybe' is neither yes nor no"),
        ([ADDRESS, "--use", "half", "--autostart", "no", "--listen", "x"], "--listen 'x' is not HOST:PORT"),
        ([ADDRESS, "--use", "half", "--autostart", "no", "--run", "ab"], "exclude each other"),
        ([ADDRESS, "--use", "half", "--autostart", "no", "--name", "a\nb"], "--name"),
        ([ADDRESS, "--use", "half", "--autostart", "no", "--data-dir", "a\nb"], "has a sign that cannot be written"),
    ],
)
def test_a_missing_or_bad_answer_is_one_error_and_leaves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    status, out, err = run(capsys, "up", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 3)
    assert says in err
    assert left(home) == []


def test_flags_answer_all_and_the_entry_has_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "my texts").mkdir()
    told = ["--data", "my texts", "--max-upload", "20Mbit", "--pause-on-battery", "--listen", "[::]:1", "--listen", "0.0.0.0:2"]
    status, out, _ = run(capsys, "up", ADDRESS, "--use", "half", "--autostart", "yes", *told)
    assert status == 0
    assert "systemctl is not here" in out
    words = words_of_unit(unit(home).read_text())
    assert words == shlex.split(out.splitlines()[-1]), "the line that is printed is the one that is written"
    assert words[:4] == [sys.executable, "-P", "-m", "nolocod"]
    options = cli._parser().parse_args(words[4:])
    config = node.node_config(options)
    assert (config.mesh.data_dir, config.mesh.bootstrap, config.mesh.run) == (home / ".nolocod", (ADDRESS,), SEALED.run_id)
    assert (config.data, config.settings.pause_on_battery, len(config.mesh.listen)) == (home / "my texts", True, 2)
    assert json.loads((home / ".nolocod/settings.json").read_text()) == {"duty": "50%", "nice": "19"}
    assert (home / ".nolocod").stat().st_mode & 0o777 == 0o700


def test_another_answer_takes_back_the_one_before_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "up", ADDRESS, "--use", "half", "--autostart", "no")
    kept = home / ".nolocod/settings.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"max-temperature": "70"}))
    run(capsys, "up", ADDRESS, "--use", "idle", "--autostart", "no")
    assert json.loads(kept.read_text()) == {"max-temperature": "70", "pause-when-used": "10m", "nice": "19"}


def test_at_a_terminal_it_asks_until_it_has_an_answer(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Announcement(run_id=SEALED.run_id, owner=OWNER.peer_id, version=1, expires=2, addresses=(ADDRESS,), name="verse")
    (home / ".nolocod").mkdir()
    (home / ".nolocod/bootstraps").write_text(ADDRESS)
    monkeypatch.setattr(registry, "listed", lambda addresses: [Found(said)] if addresses == (ADDRESS,) else [])
    monkeypatch.setattr(sys, "stdin", Terminal("\n1\nplenty\nduty=30% threads=2\nperhaps\ny\n"))
    status, _, err = run(capsys, "up")
    assert status == 0, err
    assert "1. verse" in err
    for complaint in ("that names no run", "--use 'plenty' is none of", "--autostart 'perhaps' is neither"):
        assert complaint in err
    assert f"--run={SEALED.run_id}" in words_of_unit(unit(home).read_text())
    assert json.loads((home / ".nolocod/settings.json").read_text()) == {"duty": "30%", "threads": "2"}


def test_who_ends_the_questions_is_told_what_is_missing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{ADDRESS}\n"))
    status, _, err = run(capsys, "up")
    assert (status, "--use is missing" in err) == (2, True)
    assert left(home) == []


def test_a_node_that_was_started_by_hand_is_not_run_twice(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = DataDir(home / ".nolocod")
    data_directory.make(paths)
    data_directory.announce(paths, data_directory.Running(1, "127.0.0.1:1", OWNER.peer_id, SEALED.run_id, ()))
    status, _, err = run(capsys, "up", ADDRESS, "--use", "all", "--autostart", "no")
    assert (status, "NLC-107" in err, unit(home).exists()) == (1, True, False)


def test_the_owner_starts_its_own_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "run.toml").write_text('name = "own"\n[model]\nmodel_type = "llama"\n')
    data_directory.found(DataDir(home / ".nolocod"), home / "run.toml")
    assert run(capsys, "up", "--use", "all", "--autostart", "yes")[0] == 0
    assert words_of_unit(unit(home).read_text())[4:] == ["start", f"--data-dir={home / '.nolocod'}"]


def test_a_node_that_does_not_come_up_is_told_with_its_log(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_UP_WITHIN", 0.1)
    for name in ("systemctl", "loginctl"):
        tool(home.parent / "bin", name, "exit 0")
    status, _, err = run(capsys, "up", ADDRESS, "--use", "all", "--autostart", "no")
    assert (status, ServiceError.entry.code in err, "journalctl --user -u nolocod" in err) == (1, True, True)
    assert unit(home).exists(), "its manager tries again"


# --- update


@pytest.mark.parametrize(
    ("protocol", "releases", "needed", "newer"),
    [
        (1, (), False, ""),
        (1, ("0.1.0", "0.1.0"), False, ""),
        (1, ("0.1.0", "0.2.0", "0.3.0rc1"), False, "0.2.0"),
        (1, ("0.0.9", "0.10.0", "0.10.0"), False, "0.10.0"),
        (1, ("0.1.0", "0.1.0", "99.0", "99.0"), False, ""),  # as many liars as others are not believed
        (1, ("nonsense", "", "9" * 32), False, ""),
        (2, ("0.1.0",), True, ""),
    ],
)
def test_what_the_run_needs_follows_its_manifest_and_half_of_its_members(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    protocol: int, releases: tuple[str, ...], needed: bool, newer: str,
) -> None:  # fmt: skip
    sealed = seal(Manifest(name="verse", model={"model_type": "llama"}, protocol=protocol), OWNER)
    monkeypatch.setattr(installation, "_asked", lambda *_: (sealed, releases))
    status, out, _ = run(capsys, "update", "--json")
    told = json.loads(out)
    assert (status, told["needed"], told["newer"]) == (0, needed, newer)
    _, text, _ = run(capsys, "update")
    assert (told["command"] in text) == bool(needed or newer)


def test_a_manifest_of_a_later_format_is_a_version_to_install(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nolocod.run import manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 2)
        later: Sealed = seal(Manifest(name="verse", model={"model_type": "llama"}, format=2), OWNER)
    data_directory.make(DataDir(home / ".nolocod"))
    (home / ".nolocod/manifest").write_bytes(later.to_bytes())
    _, out, _ = run(capsys, "update", "--json")
    assert json.loads(out)["needed"]
    assert "format 2" in json.loads(out)["reason"]


def test_a_run_whose_nodes_are_silent_is_judged_by_its_manifest(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_directory.make(DataDir(home / ".nolocod"))
    (home / ".nolocod/manifest").write_bytes(SEALED.to_bytes())
    assert "no member answered" in run(capsys, "update")[1]
    monkeypatch.setattr("nolocod.watch.runs.as_stranger", _nobody)
    assert NoBootstrapError.entry.code in run(capsys, "update", ADDRESS)[2], "one that was named must answer"


async def _nobody(*_: object) -> None:
    raise NoBootstrapError("nobody.")


def test_no_run_at_all_is_an_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "belongs to no run" in run(capsys, "update")[2]


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, installer: str, origin: str = "") -> list[str]:
    """The command for an installation by `installer`."""
    (folder / "nolocod.dist-info").mkdir(exist_ok=True)
    (folder / "nolocod.dist-info/INSTALLER").write_text(f"{installer}\n")
    if origin:
        (folder / "nolocod.dist-info/direct_url.json").write_text(origin)
    package = PathDistribution(folder / "nolocod.dist-info")
    monkeypatch.setattr(installation, "distribution", lambda _: package)
    return installation.updating(folder)


def test_each_way_of_installing_has_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed(tmp_path, monkeypatch, "pip") == [sys.executable, "-m", "pip", "install", "--upgrade", "nolocod"]
    assert installed(tmp_path, monkeypatch, "uv")[:3] == ["uv", "pip", "install"]
    checkout = json.dumps({"url": "file:///home/ann/my%20clone", "dir_info": {"editable": True}})
    assert installed(tmp_path, monkeypatch, "pip", checkout) == ["git", "-C", "/home/ann/my clone", "pull", "--ff-only"]
    (tmp_path / "pipx_metadata.json").touch()
    assert installed(tmp_path, monkeypatch, "pip") == ["pipx", "upgrade", "nolocod"]
    (tmp_path / "uv-receipt.toml").touch()
    assert installed(tmp_path, monkeypatch, "uv") == ["uv", "tool", "upgrade", "nolocod"]


def test_an_answer_is_read_as_settings() -> None:
    assert up._use("idle duty=20%") == {"pause-when-used": "10m", "nice": "19", "duty": "20%"}
    with pytest.raises(UsageError):
        up._use("idle half=1")


def test_without_torch_the_right_build_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(cli, "_parser", _needs_torch)
    status, _, err = run(capsys)
    assert (status, "NLC-183" in err, "pytorch.org/get-started" in err) == (1, True, True)


def _needs_torch() -> None:
    import torch  # noqa: F401
