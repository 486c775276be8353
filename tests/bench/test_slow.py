"""The benches of slow machines and home lines: what they count as wrong, and that a slow machine is slow."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nolocod.p2p.membership.peer_scoring import Conduct
from tests.bench.slow import SLOWED
from tests.lab.homes import Watched, wrong
from tests.support.told import Seen

if TYPE_CHECKING:
    from pathlib import Path

PAIRED = ("outer_step", {"kind": "paired", "exchange_seconds": 7.0})
SOLO = ("outer_step", {"kind": "solo"})
FETCHED = ("weights_fetched", {"seconds": 9.0})
SILENT: tuple[str, dict[str, Any]] = ("peer_lost", {})


def seen(folder: Path, *events: tuple[str, dict[str, Any]]) -> Seen:
    told = {"time": "2026-01-01T00:00:10.000Z", "message": "it was silent"}
    lines = [json.dumps(told | {"event": event, "fields": fields}) for event, fields in events]
    (folder / "log").write_text("\n".join(lines), encoding="utf-8")
    return Seen.of(folder / "log")


def test_what_went_well_is_counted(tmp_path: Path) -> None:
    committed = ("peer_judged", {"peer_id": "p", "reputation": 0.4, "why": Conduct.COMMITTED.words})
    found = seen(tmp_path, SOLO, PAIRED, PAIRED, committed, FETCHED, ("exchange_ended", {"outcome": "busy"}))
    assert found.wrong == []
    assert found.order == "spp"
    assert "2 paired, 1 solo" in str(found)
    stopping = ("state_changed", {"state": "stopping"})
    assert seen(tmp_path, PAIRED, stopping, ("exchange_ended", {"outcome": "aborted"})).wrong == [], "given up for a stop"
    at = seen(tmp_path, SILENT).lost[0][0]
    seen(tmp_path, ("exchange_ended", {"outcome": "aborted"}))
    assert Seen.of(tmp_path / "log", at).wrong == [], "given up for its partner's stop"
    assert Seen.of(tmp_path / "log", at + 1).wrong


@pytest.mark.parametrize(
    "events",
    [
        [("exchange_ended", {"outcome": "aborted"})],
        [("exchange_ended", {"outcome": "in_doubt"})],
        [("peer_judged", {"peer_id": "p", "reputation": 0.6, "why": Conduct.WITHHELD.words})],
        [("peer_banned", {"peer_id": "p"})],
        [("troubled", {"code": "NLC-130"})],
        [FETCHED, FETCHED],
    ],
    ids=lambda events: events[0][0],
)
def test_what_went_wrong_is_told(tmp_path: Path, events: list[tuple[str, dict[str, Any]]]) -> None:
    assert seen(tmp_path, PAIRED, *events).wrong


def test_a_traceback_in_a_log_is_told(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback (most recent call last):", encoding="utf-8")
    assert Seen.of(tmp_path / "log").wrong == ["Traceback (most recent call last):"]


def test_home_lines_are_judged_by_what_cuts_excuse(tmp_path: Path) -> None:
    well, newcomer = seen(tmp_path, SOLO, PAIRED, PAIRED), seen(tmp_path, FETCHED, PAIRED)
    at = seen(tmp_path, SILENT).lost[0][0]
    watched = Watched(stops={"node-0": (9.0, 0, "")})
    assert wrong({"first": well, "newcomer": newcomer}, watched) == []
    assert len(wrong({"first": seen(tmp_path, PAIRED, SILENT), "newcomer": newcomer}, watched)) == 1
    cut = Watched(cuts=[(20.0, 1.0, at + 5)])
    assert wrong({"first": seen(tmp_path, PAIRED, SILENT), "newcomer": newcomer}, cut) == []
    stopped = Watched(first_stop=at - 1)
    assert wrong({"first": seen(tmp_path, PAIRED, SILENT), "newcomer": newcomer}, stopped) == []
    assert wrong({"first": well, "newcomer": newcomer}, Watched(alone=1)) == ["1 steps alone after the first pair"]
    assert len(wrong({"first": well, "newcomer": seen(tmp_path, PAIRED)}, watched)) == 1
    for stop in ((10.5, 0, ""), (1.0, 1, ""), (1.0, 0, "there is none")):
        assert len(wrong({"first": well, "newcomer": newcomer}, Watched(stops={"node-0": stop}))) == 1


WRITES = """
import sys, time
from pathlib import Path
import slowed
slowed.slow_disk(1e6)
from nolocod.disk import write_whole
began = time.perf_counter()
write_whole(Path(sys.argv[1]), bytes(200_000))
print(time.perf_counter() - began)
"""


def test_a_slow_disk_is_slow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path / "file")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SLOWED.parent)
    assert float(told.stdout) >= 0.2
    assert (tmp_path / "file").stat().st_size == 200_000


CLOCK = """
import sys, time
from pathlib import Path
import slowed
right, file = time.time, Path(sys.argv[1])
slowed.wrong_clock(file)
print(round(time.time() - right()))
file.write_text("-3600")
print(round(time.time() - right()))
"""


def test_a_wrong_clock_is_wrong_by_what_the_file_says(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOCK, str(tmp_path / "file")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SLOWED.parent)
    assert told.stdout.split() == ["0", "-3600"]


def test_a_slow_trainer_lives_as_long_as_its_parent(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs, (tmp_path / "memory").open("w+b") as memory:
        inherited = (theirs.fileno(), memory.fileno())
        command = [str(SLOWED), "0.1", "1e9", "right", "nolocod.trainer.worker", *map(str, inherited)]
        trainer = subprocess.Popen([sys.executable, *command], pass_fds=inherited)
    ours.close()
    assert trainer.wait(60) == 0
