"""What an owner lets a node use: read from text, shown as text, kept over restarts."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import DiskFullError, SettingError, UsageError
from nolocod.node.settings import AS_IT_IS, KEYS, LiveSettings, Settings, read_settings, shown
from nolocod.units import Hours

if TYPE_CHECKING:
    from pathlib import Path

TOLD = {
    "hours": "22:00-07:00,12:00-13:00",
    "pause": "yes",
    "pause-on-battery": "yes",
    "pause-on-metered": "yes",
    "pause-when-used": "10m",
    "pause-when-gpu-used": "1.5GB",
    "max-temperature": "80",
    "max-power": "200",
    "duty": "12.5%",
    "devices": "cuda:1",
    "threads": "3",
    "nice": "19",
}
READ = Settings(
    (Hours(1320, 420), Hours(720, 780)), True, True, True, 600.0, 1_500_000_000, 80.0, 200.0, 0.125, "cuda:1", 3, 19
)  # fmt: skip


def test_each_setting_is_read_and_shown() -> None:
    assert TOLD.keys() == set(KEYS)
    assert read_settings(TOLD) == READ
    assert shown(READ) == TOLD | {
        "hours": "22:00-07:00, 12:00-13:00",
        "pause-when-used": "10 min",
        "pause-when-gpu-used": "1.5 GB",
        "max-temperature": "80 °C",
        "max-power": "200 W",
    }
    assert shown(AS_IT_IS) == {}
    assert read_settings({"pause": "no"}, READ).pause is False
    assert read_settings({"max-temperature": "75.5 °C", "max-power": "90W"}) == Settings(max_temperature=75.5, max_power=90)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *[(key, "") for key in KEYS],
        *[
            ("pause", "maybe"),
            ("duty", "50"),
            ("duty", "0%"),
            ("duty", "101%"),
            ("duty", "nan%"),
            ("max-power", "0"),
            ("devices", "0,0"),
        ],
        *[("max-power", "0"), ("devices", "0,0")],
        *[("max-temperature", "-5"), ("max-temperature", "inf"), ("max-temperature", "500"), ("max-temperature", "80F")],
        *[("threads", "-1"), ("threads", "1.5"), ("nice", "20"), ("pause-when-used", "10"), ("pause-when-gpu-used", "1")],
    ],
)
def test_what_makes_no_sense_is_named(key: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{key} "):
        read_settings({key: text})


def test_what_was_set_goes_before_the_flag_and_holds_over_restarts(tmp_path: Path) -> None:
    given, path = Settings(duty=0.5, nice=10), tmp_path / "settings.json"
    limits = LiveSettings(given, path)
    assert limits.now == given
    limits.change({"duty": "80%", "pause": "yes"})
    limits.change({"pause": "", "threads": "2"})
    assert limits.now == Settings(duty=0.8, nice=10, threads=2)
    assert LiveSettings(given, path).now == limits.now
    limits.change({"duty": "", "threads": ""})
    assert LiveSettings(given, path).now == limits.now == given


def test_what_cannot_be_set_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    limits = LiveSettings(AS_IT_IS, path)
    limits.change({"duty": "80%"})
    before = path.read_bytes()
    wrong = [({"duty": "50%", "nice": "x"}, "nice cannot"), ({"dutty": "50%"}, "no setting 'dutty'"), ({"x": ""}, "no setting")]
    for told, says in wrong:
        with pytest.raises(SettingError, match=says) as raised:
            limits.change(told)
        assert raised.value.code == "NLC-171"
    assert "pause-when-used" in raised.value.remedy, "which there are"

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError):
            limits.change({"duty": "10%"})
    assert (limits.now, path.read_bytes()) == (Settings(duty=0.8), before)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"duty": 5}', b'{"duty": "5"}', b'{"of-a-later-release": "1"}', b"\xff"])
def test_a_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path, content: bytes) -> None:
    """It may say when not to train."""
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=r"settings\.json") as raised:
        LiveSettings(AS_IT_IS, path)
    assert "remove it" in raised.value.remedy
