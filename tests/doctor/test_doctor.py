"""The doctor's checks of this machine: each one's good end and its bad ones, on real files, sockets and processes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import trio
from msgspec.structs import replace
from rich.console import Console

from nolocod.doctor import examine, local, reach, training
from nolocod.doctor.findings import CHECKS, Finding, Findings, Report, fail, failed, ok, skipped, warn
from nolocod.doctor.show import counts, row
from nolocod.errors import (
    DataError,
    DeviceError,
    IdentityError,
    InvitationError,
    InvitationOverError,
    ManifestError,
    ModelTooLargeError,
    NotInvitedError,
    PeerNotAllowedError,
    PeerUnavailableError,
    PortTakenError,
    RecordError,
    UsageError,
)
from nolocod.identity import Identity, load_or_create
from nolocod.node import data_directory
from nolocod.observe.status.report import ReachReport, RelayRow
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.settings import Access, MeshSettings
from nolocod.paths import DataDir
from nolocod.run import invitations
from nolocod.run.base import Base, BaseFile
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, Sealed, seal
from nolocod.units import Address
from tests.support.wires import own_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

OWNER = Identity.generate()
NOW = 1_700_000_000.0


def a_manifest(**changes: object) -> Manifest:
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    inner = Inner(steps=10, batch=2, sequence=32)
    return msgspec.structs.replace(Manifest(name="one", model=model, data=Data(source="text"), inner=inner), **changes)


@pytest.fixture
def paths(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path / "node")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("what is to be learned by heart. " * 4000)
    return path


# --- the catalogue ------------------------------------------------------------------------------------


def test_every_check_can_be_read_by_a_person() -> None:
    assert list(CHECKS) == sorted(CHECKS), "the order of their codes is the order in which they are shown"
    for check in CHECKS.values():
        assert check.asks.endswith(".")
        assert check.remedy.endswith((".", "get-started."))
        assert 0 < check.seconds <= examine.TOTAL


def test_a_finding_that_is_not_all_right_says_what_to_do() -> None:
    assert ok("D01", "fine.").remedy == skipped("D01", "no need.").remedy == ""
    assert warn("D01", "hm.").remedy == fail("D01", "no.").remedy == CHECKS["D01"].remedy
    assert warn("D01", "hm.", "Do that.").remedy == "Do that."
    error = IdentityError("it is short.")
    assert failed("D07", error) == fail("D07", "it is short.", error.remedy, "NLC-106")
    assert failed("D22", PeerUnavailableError("gone.")).remedy == CHECKS["D22"].remedy, "not that none is needed"
    assert "nolocod id" in failed("D22", PeerNotAllowedError("no.")).remedy, "the remedy of the one who is kept out"


def test_a_report_fails_with_any_failure_and_only_then() -> None:
    assert Report.of([warn("D21", "hm."), ok("D01", "fine."), skipped("D25", "why.")]).ok
    report = Report.of([fail("D21", "no."), ok("D01", "fine.")])
    assert not report.ok
    assert [one.code for one in report.findings] == ["D01", "D21"]


def test_findings_are_told_in_order_once_all_before_them_are_there() -> None:
    told: list[Finding] = []
    findings = Findings(told.append)
    codes = list(CHECKS)
    findings.put(codes[1], ok(codes[1], "second."))
    assert told == []
    findings.put(codes[0], ok(codes[0], "first."), warn(codes[0], "and more."))
    findings.put(codes[0], fail(codes[0], "too late."))
    assert [one.found for one in told] == ["first.", "and more.", "second."]
    assert findings.missing() == codes[2:]


def test_the_screen_has_no_colours_where_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=100)
    console.print(row(replace(fail("D11", "[::]:1 is in use.", "Choose another."), about="/ip4/1.2.3.4")))
    console.print(counts(Report.of([fail("D11", "x."), ok("D01", "y.")])))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for part in ("fail", "D11", "port", "[::]:1 is in use.", "→ Choose another.", "/ip4/1.2.3.4", "1 ok, 1 fail."):
        assert part in out


# --- this machine -------------------------------------------------------------------------------------


def test_python() -> None:
    assert local.python_version().status == "ok"
    assert local.python_version((3, 10, 9)) == fail("D01", "Python 3.10.9 is older than 3.11.")


def test_the_disk_against_the_models_checkpoints(paths: DataDir) -> None:
    assert local.disk(paths, 100_000).status in ("ok", "warn")
    assert local.disk(paths, None).status in ("ok", "warn")
    too_large = local.disk(paths, 10**12)
    assert too_large.status == "fail"
    assert "68 TB needed" in too_large.found
    assert "takes a disk of 200 MB/s 27.8 h: SIGTERM leaves it 10 s" in too_large.found
    paths.checkpoints.mkdir(parents=True)
    with (paths.checkpoints / "one").open("wb") as file:
        file.truncate(40_000_000)
    assert "28 MB needed" in local.disk(paths, 1_000_000).found, "of 60 MB of checkpoints 40 are there; and 8 to serve"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_data_directory_that_is_closed(paths: DataDir) -> None:
    paths.root.mkdir(mode=0o500)
    assert local.data_directory(paths).status == "fail"
    assert local.data_directory(DataDir(paths.root / "below")).status == "fail"


def test_data_directory(paths: DataDir) -> None:
    assert "can be created" in local.data_directory(paths).found
    assert not paths.root.exists()
    paths.root.mkdir(mode=0o700)
    assert local.data_directory(paths).status == "ok"
    paths.root.chmod(0o777)
    assert local.data_directory(paths).remedy == f"Run: chmod go-w {paths.root}"
    paths.root.rmdir()
    paths.root.touch()
    assert local.data_directory(paths).status == "fail"


def test_identity(paths: DataDir) -> None:
    assert local.identity_file(paths)[1] is None
    assert not paths.root.exists()
    data_directory.make(paths)
    made = load_or_create(paths.identity)
    assert local.identity_file(paths) == (ok("D07", f"{made.peer_id}."), made)
    paths.identity.chmod(0o644)
    with pytest.raises(IdentityError, match="read by others"):
        local.identity_file(paths)


@pytest.fixture
def held(paths: DataDir) -> Iterator[None]:
    with data_directory.hold(paths):
        yield


def test_nobody_runs_here(paths: DataDir) -> None:
    assert local.node_here(paths) == (ok("D08", "no node runs here."), local.Here())
    data_directory.make(paths)
    paths.lock.touch()
    data_directory.announce(paths, data_directory.Running(os.getpid(), "127.0.0.1:1", OWNER.peer_id, "", ()))
    finding, here = local.node_here(paths)
    assert finding.status == "ok", "what a killed node left behind, and a process that has its number by chance"
    assert not here.held


@pytest.mark.usefixtures("held")
def test_one_that_does_not_answer(paths: DataDir) -> None:
    finding, here = local.node_here(paths)
    assert (finding.status, here.pid, here.report) == ("warn", str(os.getpid()), None)
    assert "not up yet" in finding.found
    data_directory.announce(paths, data_directory.Running(os.getpid(), "127.0.0.1:1", OWNER.peer_id, "", ()))
    assert "does not answer" in local.node_here(paths)[0].found


def test_looking_whether_one_runs_is_in_no_ones_way(paths: DataDir) -> None:
    data_directory.make(paths)
    paths.lock.touch()
    local.node_here(paths)
    with data_directory.hold(paths):
        assert local.node_here(paths)[1].held
        with paths.lock.open("rb") as other, pytest.raises(OSError, match="temporarily unavailable"):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_stored_run(paths: DataDir) -> None:
    assert local.stored_run(paths)[1] is None
    data_directory.make(paths)
    sealed = seal(a_manifest(), OWNER)
    paths.manifest.write_bytes(sealed.to_bytes())
    assert local.stored_run(paths) == (ok("D09", f"one ({sealed.run_id[:12]})."), sealed)
    newer = seal(a_manifest(protocol=2), OWNER)
    paths.manifest.write_bytes(newer.to_bytes())
    assert (local.stored_run(paths)[0].status, local.stored_run(paths)[0].error) == ("fail", "NLC-105")
    paths.manifest.write_bytes(sealed.to_bytes()[:-1] + b"x")
    with pytest.raises(ManifestError):
        local.stored_run(paths)


def test_the_port() -> None:
    number = own_port()
    with closing(socket.create_server(("127.0.0.1", number))):
        finding = local.port([Address("127.0.0.1", number)], local.Here())
        assert (finding.status, finding.error) == ("fail", "NLC-109")
        ours = data_directory.Running(1, "", "", "", (f"/ip4/127.0.0.1/tcp/{number}/p2p/{OWNER.peer_id}",))
        assert local.port([Address("127.0.0.1", number)], local.Here(ours, pid="1")) == ok(
            "D11", f"127.0.0.1:{number} belongs to this directory's own node."
        )
        starting = local.port([Address("127.0.0.1", number)], local.Here(pid="77"))
        assert (starting.status, "process 77" in starting.found) == ("warn", True), "this directory's node, just restarted"
    assert local.port([Address("127.0.0.1", number)], local.Here()) == ok("D11", f"127.0.0.1:{number} is free.")
    assert local.port([Address("127.0.0.1", 0)], local.Here()).status == "ok"
    assert local.port([Address("203.0.113.7", 0)], local.Here(pid="77")).error == UsageError.entry.code


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = Address("127.0.0.1", 0)
    assert local.own_addresses([loopback], (), None).status == "warn"
    assert (
        local.own_addresses([loopback], ("/ip4/203.0.113.7/tcp/4001",), None).found
        == "peers are told /ip4/203.0.113.7/tcp/4001."
    )
    assert "cannot be dialled" in local.own_addresses([loopback], ("203.0.113.7:4001",), None).found
    lan = Address("192.168.1.7", 4001)
    assert local.own_addresses([lan], (), None) == ok("D12", "peers are told 192.168.1.7.")
    entry = next(entry for entries in psutil.net_if_addrs().values() for entry in entries)
    entry = entry._replace(family=socket.AF_INET, address="192.168.1.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"docker0": [entry]})
    assert "bridges of containers" in local.own_addresses([lan], (), None).found
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert local.own_addresses([Address("0.0.0.0", 0)], (), None).status == "fail"


# --- access -------------------------------------------------------------------------------------------


def a_token(sealed: Sealed, *, lasts: float = 3600.0, peer: Identity | None = None) -> str:
    guest = Identity.generate()
    key = guest.public
    grant = invitations.Invitation(sealed.run_id, bytes(16), NOW + lasts, key, peer.peer_id if peer else None)
    raw = invitations.seal_invitation(grant, OWNER)
    return invitations.print_token(
        invitations.Token(raw, guest.secret, ("/ip4/203.0.113.7/tcp/1/p2p/" + OWNER.peer_id,), bytes(32))
    )


def test_an_open_network(paths: DataDir) -> None:
    config = MeshSettings(paths.root)
    finding, found = local.credentials_in_order(config, None, None, NOW)
    assert finding == ok("D13", "anybody may connect.")
    assert (found.gater.prologue, found.gater.allowed, found.bootstrap) == (None, None, ())


def test_an_invitation(paths: DataDir) -> None:
    sealed, own, other = seal(a_manifest(access="invited"), OWNER), Identity.generate(), Identity.generate()

    def asked(token: str, run: Sealed | None = sealed) -> tuple[Finding, local.Credentials]:
        return local.credentials_in_order(MeshSettings(paths.root, access=Access(invite=token)), own.peer_id, run, NOW)

    finding, found = asked(a_token(sealed, peer=own))
    assert finding == ok("D13", "a network key, an invitation for 1 hours.")
    assert found.gater.prologue is not None
    assert found.bootstrap[0].endswith(OWNER.peer_id)
    with pytest.raises(InvitationOverError, match="2 hours ago"):
        asked(a_token(sealed, lasts=-7200))
    with pytest.raises(InvitationError, match="made for"):
        asked(a_token(sealed, peer=other))
    with pytest.raises(InvitationError, match="for run"):
        asked(a_token(sealed), seal(a_manifest(), OWNER))
    with pytest.raises(InvitationError, match="checksum"):
        asked(a_token(sealed)[:-8])


def test_an_admission_that_is_stored(paths: DataDir) -> None:
    sealed, own = seal(a_manifest(access="invited"), OWNER), Identity.generate()
    config = MeshSettings(paths.root)
    with pytest.raises(NotInvitedError, match="not"):
        local.credentials_in_order(config, own.peer_id, sealed, NOW)
    assert "owns" in local.credentials_in_order(config, OWNER.peer_id, sealed, NOW)[0].found
    data_directory.make(paths)
    paths.admission.write_bytes(invitations.sign_admission(invitations.read_token(a_token(sealed)), own.peer_id))
    assert local.credentials_in_order(config, own.peer_id, sealed, NOW)[0].found == "an admission for 1 hours."
    with pytest.raises(InvitationOverError):
        local.credentials_in_order(config, own.peer_id, sealed, NOW + 3600)


def test_an_allow_list(paths: DataDir, tmp_path: Path) -> None:
    allowed = tmp_path / "allow"
    allowed.write_text(f"{OWNER.peer_id} # the owner\n")
    config = MeshSettings(paths.root, access=Access(allow=allowed))
    finding, found = local.credentials_in_order(config, None, None, NOW)
    assert finding.found == "an allow list of 1."
    assert found.gater.allows(OWNER.peer_id)
    assert not found.gater.allows(Identity.generate().peer_id)
    allowed.write_text("nobody\n")
    with pytest.raises(UsageError, match="line 1"):
        local.credentials_in_order(config, None, None, NOW)


# --- what the child does ------------------------------------------------------------------------------


def looked_at(job: training.Job) -> tuple[dict[str, Finding], int | None]:
    lines: list[training.Line] = []
    training.look(lambda: job, lines.append)
    found = [line.finding for line in lines if line.finding is not None]
    sizes = [line.parameters for line in lines if line.parameters is not None]
    assert sorted(one.code for one in found) == ["D02", "D03", "D04", "D10"]
    return {one.code: one for one in found}, sizes[0] if sizes else None


def test_training_in_order(text: Path) -> None:
    found, parameters = looked_at(training.Job("cpu", str(text), seal(a_manifest(), OWNER).to_bytes()))
    assert {one.status for one in found.values()} == {"ok"}, found
    assert f"{parameters:,} parameters fit" in found["D04"].found
    assert "all of it, 128,000 characters give 128,000 tokens" in found["D10"].found


def test_records_to_answer(text: Path, tmp_path: Path) -> None:
    run = a_manifest()
    run = replace(run, data=replace(run.data, source="jsonl", kind="instruction"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "tide?", "completion": "no"}\n' * 30)
    found, _ = looked_at(training.Job("cpu", str(path), seal(run, OWNER).to_bytes()))
    assert (found["D10"].status, found["D10"].found) == ("ok", "the first 20 records give 20 samples: 60 tokens to learn.")
    path.write_text('{"prompt": "' + "tide" * 100 + '", "completion": "no"}\n')
    assert looked_at(training.Job("cpu", str(path), seal(run, OWNER).to_bytes()))[0]["D10"].status == "warn"
    path.write_text('{"prompt": "tide?"}\n')
    assert looked_at(training.Job("cpu", str(path), seal(run, OWNER).to_bytes()))[0]["D10"].error == RecordError.entry.code


def test_before_the_first_start_a_base_model_is_not_here(text: Path, tmp_path: Path) -> None:
    pinned = Base((BaseFile("tokenizer.json", 1, "00" * 32),))
    run = replace(a_manifest(), base=pinned)
    run = replace(run, data=replace(run.data, tokenizer="base"))
    found, _ = looked_at(training.Job("cpu", str(text), seal(run, OWNER).to_bytes(), base=str(tmp_path)))
    assert {code: one.status for code, one in found.items()} == {"D02": "ok", "D03": "ok", "D04": "skipped", "D10": "skipped"}
    assert "comes with the first start" in found["D10"].found


def test_without_a_run(text: Path) -> None:
    found, parameters = looked_at(training.Job("cpu", str(text)))
    assert (found["D04"].status, found["D10"].status, parameters) == ("skipped", "skipped", None)


def test_beside_a_node_that_holds_the_model(text: Path) -> None:
    found, parameters = looked_at(training.Job("cpu", str(text), seal(a_manifest(), OWNER).to_bytes(), loaded=True))
    assert found["D04"].status == "skipped"
    assert parameters


def test_a_node_that_trains_has_its_text() -> None:
    sealed = seal(a_manifest(), OWNER).to_bytes()
    assert looked_at(training.Job("cpu", "", sealed))[0]["D10"].status == "fail"
    assert looked_at(training.Job("cpu", "", sealed, loaded=True))[0]["D10"].status == "skipped"


def test_a_device_that_is_not_there_and_data_that_is_not_there(tmp_path: Path) -> None:
    found, _ = looked_at(training.Job("cuda:77", str(tmp_path / "nowhere"), seal(a_manifest(), OWNER).to_bytes()))
    assert (found["D03"].error, found["D10"].error) == (DeviceError.entry.code, DataError.entry.code)
    assert "does not exist" in found["D10"].found


def test_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    found, _ = looked_at(training.Job("cpu", str(tmp_path / "short.txt"), seal(a_manifest(), OWNER).to_bytes()))
    assert found["D10"].status == "fail"
    assert "too few" in found["D10"].found


def test_a_model_that_does_not_fit(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1_000_000))
    found, parameters = looked_at(training.Job("cpu", str(text), seal(a_manifest(), OWNER).to_bytes()))
    assert (found["D04"].status, found["D04"].error) == ("fail", ModelTooLargeError.entry.code)
    assert parameters, "told before, for the disk"


def test_a_torch_that_cannot_be_imported(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr(training.importlib, "import_module", broken)
    found, _ = looked_at(training.Job("cpu", str(text), seal(a_manifest(), OWNER).to_bytes()))
    assert found["D02"].status == "fail"
    assert "libtorch.so: cannot open" in found["D02"].found
    assert (found["D03"].status, found["D10"].status) == ("skipped", "ok"), "text needs no torch"


# --- all together -------------------------------------------------------------------------------------


@pytest.fixture
def quick_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the child be a Python one-liner."""
    real = trio.lowlevel.open_process

    def become(source: str) -> None:
        monkeypatch.setattr(
            trio.lowlevel, "open_process", lambda command, **options: real([command[0], "-c", source], **options)
        )

    return become


def listed(report: Report) -> dict[str, Finding]:
    return {one.code: one for one in report.findings}


async def test_a_child_that_is_killed_costs_its_own_checks(paths: DataDir, quick_child: Callable[[str], None]) -> None:
    line = json.dumps({"finding": {"code": "D02", "name": "torch", "status": "ok", "found": "torch 0."}})
    quick_child(f"import os; print({line!r}, flush=True); os.kill(os.getpid(), 4)")
    config = MeshSettings(paths.root, listen=(Address("127.0.0.1", 0),), upnp=False)
    told: list[Finding] = []
    report = await examine.examine(config, told.append)
    found = listed(report)
    assert told == list(report.findings), "told in order, each once"
    assert set(found) == set(CHECKS)
    assert found["D02"].found == "torch 0."
    assert (found["D10"].status, found["D10"].found) == ("fail", "torch's process: it was killed by SIGILL.")
    assert (found["D03"].status, found["D04"].status) == ("skipped", "skipped")
    assert found["D20"].status == "ok", found["D20"].found
    assert not report.ok
    assert not paths.root.exists(), "nothing was written"


async def test_a_check_that_raises_fails_alone(
    paths: DataDir, quick_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_child("pass")

    def broken(_: DataDir) -> Finding:
        raise ZeroDivisionError("nobody thought of that")

    monkeypatch.setattr(local, "data_directory", broken)
    config = MeshSettings(paths.root, listen=(Address("127.0.0.1", 0),), upnp=False)
    found = listed(await examine.examine(config, lambda _: None))
    assert "ZeroDivisionError: nobody thought of that" in found["D06"].found
    assert (found["D06"].status, found["D06"].error, found["D07"].status) == ("fail", "NLC-000", "ok")


async def test_a_child_that_hangs_and_a_time_that_ends(
    paths: DataDir, quick_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_child("import time; time.sleep(600)")
    monkeypatch.setattr(examine, "_CHILD", 0.2)
    config = MeshSettings(paths.root, listen=(Address("127.0.0.1", 0),), upnp=False)
    found = listed(await examine.examine(config, lambda _: None))
    assert (found["D02"].status, found["D03"].status) == ("fail", "skipped")
    assert "no result" in found["D02"].found
    line = json.dumps({"finding": {"code": "D02", "name": "torch", "status": "ok", "found": "torch 0."}})
    quick_child(f"import time; print({line!r}, flush=True); time.sleep(600)")
    monkeypatch.setattr(examine, "_CHILD", 5.0)
    found = listed(await examine.examine(config, lambda _: None))
    assert (found["D10"].status, found["D03"].status) == ("warn", "skipped"), "a busy machine is no broken one"
    ended = await examine.examine(config, lambda _: None, seconds=0.0)
    assert {one.status for one in ended.findings} == {"skipped"}
    assert len(ended.findings) == len(CHECKS)


async def test_the_hosts_failure_is_told(paths: DataDir, quick_child: Callable[[str], None]) -> None:
    quick_child("pass")
    config = MeshSettings(paths.root, listen=(Address("203.0.113.7", 0),), upnp=False)
    found = listed(await examine.examine(config, lambda _: None))
    assert (found["D11"].status, found["D20"].status) == ("fail", "fail")
    assert {found[code].status for code in CHECKS if code > "D20"} == {"skipped"}


async def test_a_port_that_was_taken_a_moment_ago_is_no_failure(
    paths: DataDir, quick_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_child("pass")
    opened = 0

    @asynccontextmanager
    async def snatched(*arguments: Any) -> AsyncIterator[Host]:  # noqa: ANN401 - those of open_host
        nonlocal opened
        opened += 1
        async with trio.open_nursery(), open_host(*arguments) as host:
            if opened % 3:
                raise PortTakenError("it was taken a moment ago.")
            yield host

    monkeypatch.setattr(examine, "open_host", snatched)
    config = MeshSettings(paths.root, listen=(Address("127.0.0.1", 0),), upnp=False)
    found = listed(await examine.examine(config, lambda _: None))
    assert (found["D20"].status, opened) == ("ok", 3), found["D20"].found
    config = MeshSettings(paths.root, listen=(Address("127.0.0.1", own_port()),), upnp=False)
    found = listed(await examine.examine(config, lambda _: None))
    assert (found["D20"].status, opened) == ("fail", 4), "the owner named this port, and no other"


# --- a running node's word ----------------------------------------------------------------------------


def test_a_running_nodes_word() -> None:
    def said(report: ReachReport) -> dict[str, str]:
        return {one.code: one.status for one in reach.reported(report)}

    assert said(ReachReport()) == dict.fromkeys(("D26", "D27", "D28", "D29"), "skipped")
    assert said(ReachReport(kind="public", why="2 peers dialled us."))["D26"] == "ok"
    alone = said(ReachReport(kind="symmetric", why="x.", punches=3))
    assert (alone["D26"], alone["D28"], alone["D29"]) == ("warn", "warn", "warn")
    row = RelayRow(peer_id=OWNER.peer_id, seconds=60.0)
    kept = said(ReachReport(kind="cone", why="x.", relays=(row,), punches=3, punched=1))
    assert (kept["D28"], kept["D29"]) == ("ok", "ok")
