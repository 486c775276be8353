"""What the sensors of this machine say: power supply, network, whether somebody uses it, heat, power, and others on its GPU.

The rule: a sensor that is not there, or makes no sense, says None and is no error. Only what the owner's limits need is read.
Reading takes up to seconds, so it belongs in a thread.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from nolocod.trainer.devices import is_all, named_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.node.settings import Settings

T = TypeVar("T", int, float)

_DEVICES = Path("/dev")
_CPUS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Linux' names of the sensors within processors."""
_ANSWER_SECONDS = 2.0
_MANAGER = ("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager", "org.freedesktop.NetworkManager", "Metered")
_LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "IdleHint", "IdleSinceHint")
_MUTTER = ("org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core", "org.gnome.Mutter.IdleMonitor", "GetIdletime")


@dataclass(frozen=True)
class Readings:
    """None where the machine does not tell, or nobody wants to know."""

    plugged: bool | None = None
    """Whether it has mains power."""
    metered: bool | None = None
    """Whether its network costs by the byte."""
    idle: float | None = None
    """Seconds since somebody touched it."""
    gpu_taken: int | None = None
    """Bytes of a GPU's memory that other programs hold; of several GPUs all this is of the one that has most."""
    temperature: float | None = None
    """Of the GPU, or of the processor where that trains, in °C."""
    power: float | None = None
    """Of the GPU, in watts."""


def read_machine(limits: Settings) -> Readings:
    """What `limits` need."""
    gpus = _Gpus(limits.devices)
    heats = limits.max_temperature is not None
    return Readings(
        plugged=plugged_in() if limits.pause_on_battery else None,
        metered=_metered() if limits.pause_on_metered else None,
        idle=_idle() if limits.pause_when_used is not None else None,
        gpu_taken=gpus.taken() if limits.pause_when_gpu_used is not None else None,
        temperature=(gpus.temperature() if gpus.cards else _processor_temperature()) if heats else None,
        power=gpus.power() if limits.max_power is not None else None,
    )


def plugged_in() -> bool | None:
    """Whether the machine has mains power; None where there is no battery, or the system does not tell."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, ValueError):  # not on this platform, or a power supply that tells nonsense
        return None
    return None if battery is None else battery.power_plugged


def _processor_temperature() -> float | None:
    """Of the hottest sensor in the processors; of the hottest one at all, where none says what it is."""
    try:
        chips = psutil.sensors_temperatures()
    except (AttributeError, OSError, ValueError):
        return None
    known = [name for name in _CPUS if name in chips] or list(chips)
    return max((one.current for name in known for one in chips[name] if 0 < one.current < 150), default=None)


# --- others' words, by their own tools


def _said(*command: str) -> list[str]:
    """The words that a command prints; none if it is not there, or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _metered() -> bool | None:
    """By NetworkManager, which guesses where nobody told it (NMMetered: 1 yes, 2 no, 3 and 4 as it guesses)."""
    match _said("busctl", "--system", "get-property", *_MANAGER):
        case ["u", "1" | "3"]:
            return True
        case ["u", "2" | "4"]:
            return False
    return None


def _idle() -> float | None:
    """Seconds since the last input at any terminal, or at the desktop."""
    return min((found for found in (_terminals_idle(), _desktop_idle()) if found is not None), default=None)


def _terminals_idle() -> float | None:
    """Linux notes the time of input as a terminal's access time, to eight seconds; what is printed there does not count."""
    now, found = time.time(), []
    for path in [*_DEVICES.glob("pts/[0-9]*"), *_DEVICES.glob("tty[1-9]*")]:
        try:
            found.append(max(0.0, now - path.stat().st_atime))
        except OSError:  # closed meanwhile
            continue
    return min(found, default=None)


def _desktop_idle() -> float | None:
    """By GNOME; else by what xprintidle finds under X11; else by logind, which most desktops tell after some minutes only."""
    match _said("busctl", "--user", "call", *_MUTTER):
        case ["t", milliseconds]:
            return int(milliseconds) / 1000
    match _said("xprintidle"):
        case [milliseconds] if milliseconds.isdecimal():
            return int(milliseconds) / 1000
    match _said("busctl", "--system", "get-property", *_LOGIND):
        case ["b", "true", "t", since]:
            return max(0.0, time.time() - int(since) / 1e6)
        case ["b", "false", *_]:
            return 0.0
    return None


# --- the GPU


@functools.cache
def _nvml() -> Any:  # noqa: ANN401  # a module without types, that is not there mostly
    """NVIDIA's management library; None where it, or its driver, is not."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class _Gpus:
    """The cards that the trainer computes on: of several the worst counts. `cards` are those that are there and tell."""

    def __init__(self, devices: str) -> None:
        self._nvml = None if named_devices(devices)[:1] == ("cpu",) else _nvml()
        self.cards: tuple[Any, ...] = self._asked(lambda nvml: _cards(nvml, devices)) or ()

    def taken(self) -> int | None:
        """Bytes of their memory that are held, but by this node's processes: on the card where it is most."""
        return self._most(self._taken)

    def temperature(self) -> float | None:
        return self._most(lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))

    def power(self) -> float | None:
        return self._most(lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000)

    def _most(self, of: Callable[[Any, Any], T]) -> T | None:
        """None if one of them does not tell: it might be the one."""
        found: T | None = self._asked(lambda nvml: max((of(nvml, card) for card in self.cards), default=None))
        return found

    @staticmethod
    def _taken(nvml: Any, card: Any) -> int:  # noqa: ANN401  # as above
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        running = nvml.nvmlDeviceGetComputeRunningProcesses(card)
        if not all(psutil.pid_exists(one.pid) for one in running):
            raise ValueError("numbers of another container's processes: ours cannot be told from others'")
        own = sum(one.usedGpuMemory or 0 for one in running if one.pid in ours)
        return max(0, int(nvml.nvmlDeviceGetMemoryInfo(card).used) - own)

    def _asked(self, ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # as above
        if self._nvml is None:
            return None
        try:
            return ask(self._nvml)
        except (self._nvml.NVMLError, ValueError):  # a card that does not tell, or is gone
            return None


def _cards(nvml: Any, devices: str) -> tuple[Any, ...]:  # noqa: ANN401  # as above
    """NVML counts all cards, torch those that CUDA_VISIBLE_DEVICES names."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if is_all(devices):
        names = named or list(map(str, range(nvml.nvmlDeviceGetCount())))
    else:
        numbers = [int(device.partition(":")[2] or 0) for device in named_devices(devices)]
        names = [named[number] if number < len(named) else str(number) for number in numbers]
    by_number, by_name = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return tuple(by_number(int(name)) if name.isdecimal() else by_name(name) for name in names)
