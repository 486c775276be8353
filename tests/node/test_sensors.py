"""What a machine's sensors say: this machine's own where it has them, and stand-ins for what it lacks."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nolocod.node import sensors
from nolocod.node.sensors import Readings, read_machine
from nolocod.node.settings import AS_IT_IS, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = Settings(
    pause_on_battery=True,
    pause_on_metered=True,
    pause_when_used=600.0,
    pause_when_gpu_used=1,
    max_temperature=80.0,
    max_power=9.0,
)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No tools, no terminals, no GPU: a folder for tools, and below it "dev" for terminals."""
    (tmp_path / "dev" / "pts").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sensors, "_DEVICES", tmp_path / "dev")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sensors._nvml.cache_clear()
    yield tmp_path
    sensors._nvml.cache_clear()


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_machine_that_tells_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sensors_battery", "sensors_temperatures"):
        monkeypatch.setattr(psutil, name, dict if name == "sensors_temperatures" else lambda: None, raising=False)
    assert read_machine(ALL) == Readings()


def test_only_what_is_wanted_is_read(nowhere: Path) -> None:
    for name in ("busctl", "xprintidle"):
        tool(nowhere, name, f": > {nowhere}/asked")
    assert read_machine(AS_IT_IS) == Readings()
    assert not (nowhere / "asked").exists()
    read_machine(ALL)
    assert (nowhere / "asked").exists()


@pytest.mark.parametrize("error", [AttributeError, FileNotFoundError, ValueError])
def test_sensors_that_cannot_be_read_are_unknown(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    for name in ("sensors_battery", "sensors_temperatures"):
        monkeypatch.setattr(psutil, name, fail, raising=False)
    assert (read_machine(ALL).plugged, read_machine(ALL).temperature) == (None, None)


def test_the_processors_hottest_sensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(*degrees: float) -> list[SimpleNamespace]:
        return [SimpleNamespace(current=one) for one in degrees]

    chips = {"nvme": at(85.0), "coretemp": at(61.0, 64.0, 0.0, 3000.0)}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    assert read_machine(Settings(max_temperature=80)).temperature == 64
    del chips["coretemp"]
    assert read_machine(Settings(max_temperature=80)).temperature == 85, "where none says that it is the processor's"


@pytest.mark.parametrize(
    ("said", "metered"), [("u 1", True), ("u 3", True), ("u 2", False), ("u 4", False), ("u 0", None), ("", None)]
)
def test_what_networkmanager_says_of_the_network(nowhere: Path, said: str, metered: bool | None) -> None:
    tool(nowhere, "busctl", f"""[ "$2 $6" = "get-property Metered" ] && echo {said}""")
    assert read_machine(Settings(pause_on_metered=True)).metered is metered


def test_a_tool_that_fails_or_hangs_says_nothing(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Settings(pause_on_metered=True)
    tool(nowhere, "busctl", "echo u 1; exit 1")
    assert read_machine(wanted).metered is None
    monkeypatch.setattr(sensors, "_ANSWER_SECONDS", 0.05)
    tool(nowhere, "busctl", "while :; do :; done")
    assert read_machine(wanted).metered is None


def test_the_last_input_at_any_terminal_counts(nowhere: Path) -> None:
    wanted, now = Settings(pause_when_used=600.0), time.time()
    for name, ago in (("pts/0", 500), ("pts/7", 40), ("tty1", 9000), ("tty", 0), ("pts/ptmx", 0)):
        path = nowhere / "dev" / name
        path.touch()
        os.utime(path, (now - ago, now))
    assert read_machine(wanted).idle == pytest.approx(40, abs=5)


def test_a_real_terminal_tells_when_somebody_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    try:
        name = os.ttyname(theirs)
        monkeypatch.setattr(sensors, "_DEVICES", type(sensors._DEVICES)("/dev"))
        os.utime(name, (time.time() - 3600,) * 2)  # as if nobody had touched it since
        before = sensors._terminals_idle()
        os.write(theirs, b"printed")
        printed = sensors._terminals_idle()
        os.write(ours, b"typed\n")
        os.read(theirs, 100)
        typed = sensors._terminals_idle()
    finally:
        os.close(ours)
        os.close(theirs)
    assert before is not None
    assert printed is not None
    assert typed is not None
    assert printed >= before, "what a program prints is no input"
    assert typed <= 16, "to eight seconds"


DESKTOPS = [
    ("""[ "$6" = GetIdletime ] && echo "t 90000" """, "echo 5000", 90.0),
    ("exit 1", "echo 5000", 5.0),
    ("""case "$6" in IdleHint) echo "b false"; echo "t 0";; *) exit 1;; esac""", "exit 1", 0.0),
    ("""case "$6" in IdleHint) echo "b true"; echo "t SINCE";; *) exit 1;; esac""", "exit 1", 120.0),
    ("exit 1", "echo nonsense", None),
]


@pytest.mark.parametrize(
    ("busctl", "xprintidle", "idle"), DESKTOPS, ids=["gnome", "x11", "logind in use", "logind idle", "none"]
)
def test_the_desktop_that_tells_most_is_asked_first(nowhere: Path, busctl: str, xprintidle: str, idle: float | None) -> None:
    tool(nowhere, "busctl", busctl.replace("SINCE", str(int((time.time() - 120) * 1e6))))
    tool(nowhere, "xprintidle", xprintidle)
    found = read_machine(Settings(pause_when_used=600.0)).idle
    assert found == (None if idle is None else pytest.approx(idle, abs=10))


class Nvml:
    """A stand-in for NVIDIA's library with two cards."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.asked: list[object] = []
        self.tells = True

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTemperature(self, card: object, _: int) -> int:
        if not self.tells:
            raise self.NVMLError
        self.asked.append(card)
        return 71

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetPowerUsage(self, card: object) -> int:
        return 90_000 if card == 1 else 215_500

    def nvmlDeviceGetMemoryInfo(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(used=6_000_000_000)

    def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[Any]:
        return self.running


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    sensors._nvml.cache_clear()
    return library


def test_a_gpu_tells_its_heat_its_power_and_what_others_hold(nvml: Nvml) -> None:
    wanted = Settings(max_temperature=80, max_power=200, pause_when_gpu_used=1)
    nvml.running = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=4_000_000_000), SimpleNamespace(pid=1, usedGpuMemory=None)]
    assert read_machine(wanted) == Readings(temperature=71.0, power=215.5, gpu_taken=2_000_000_000)
    nvml.running.append(SimpleNamespace(pid=1 << 30, usedGpuMemory=1))
    assert read_machine(wanted).gpu_taken is None, "numbers of another container: ours cannot be told from others'"
    nvml.tells = False
    assert read_machine(wanted).temperature is None
    assert read_machine(Settings(max_power=200, devices="cpu")).power is None


def test_the_card_is_the_one_that_torch_uses(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, visible in (("auto", ""), ("cuda:1", ""), ("cuda:0", "1"), ("cuda:1", "0,GPU-abc"), ("cuda:7", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        read_machine(Settings(max_temperature=80, devices=device))
    assert nvml.asked == [0, 1, 1, "GPU-abc"]


def test_of_several_cards_the_worst_counts(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, visible, asked, power in (
        ("0,1", "", [0, 1], 215.5), ("all", "", [0, 1], 215.5), ("cuda:1,cuda:0", "", [1, 0], 215.5), ("all", "1", [1], 90.0),
    ):  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        nvml.asked.clear()
        found = read_machine(Settings(max_temperature=80, max_power=200, devices=devices))
        assert (nvml.asked, found.power) == (asked, power)
    assert read_machine(Settings(max_power=200, devices="0,7")).power is None, "one that does not tell might be the hottest"
    assert read_machine(Settings(max_power=200, devices="cpu:2")).power is None


def test_a_library_without_a_driver_is_no_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Nvml) -> None:
        raise self.NVMLError

    monkeypatch.setattr(Nvml, "nvmlInit", fail)
    assert read_machine(Settings(max_power=200)).power is None
