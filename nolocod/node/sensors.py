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
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.node.settings import Settings

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
    """Bytes of the GPU's memory that other programs hold."""
    temperature: float | None = None
    """Of the GPU, or of the processor where that trains, in °C."""
    power: float | None = None
    """Of the GPU, in watts."""


def read_machine(limits: Settings) -> Readings:
    """What `limits` need."""
    gpu = _Gpu(limits.device)
    heats = limits.max_temperature is not None
    return Readings(
        plugged=plugged_in() if limits.pause_on_battery else None,
        metered=_metered() if limits.pause_on_metered else None,
        idle=_idle() if limits.pause_when_used is not None else None,
        gpu_taken=gpu.taken() if limits.pause_when_gpu_used is not None else None,
        temperature=(gpu.temperature() if gpu.card is not None else _processor_temperature()) if heats else None,
        power=gpu.power() if limits.max_power is not None else None,
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


class _Gpu:
    """The card that the trainer computes on; `card` is None where there is none that tells."""

    def __init__(self, device: str) -> None:
        self._nvml = None if device == "cpu" else _nvml()
        self.card = self._asked(lambda nvml: _card(nvml, device))

    def taken(self) -> int | None:
        """Bytes of its memory that are held, but by this node's processes."""
        found: int | None = self._asked(self._taken)
        return found

    def temperature(self) -> float | None:
        found: float | None = self._asked(lambda nvml: nvml.nvmlDeviceGetTemperature(self.card, nvml.NVML_TEMPERATURE_GPU))
        return found

    def power(self) -> float | None:
        found: float | None = self._asked(lambda nvml: nvml.nvmlDeviceGetPowerUsage(self.card) / 1000)
        return found

    def _taken(self, nvml: Any) -> int:  # noqa: ANN401  # as above
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        running = nvml.nvmlDeviceGetComputeRunningProcesses(self.card)
        if not all(psutil.pid_exists(one.pid) for one in running):
            raise ValueError("numbers of another container's processes: ours cannot be told from others'")
        own = sum(one.usedGpuMemory or 0 for one in running if one.pid in ours)
        return max(0, int(nvml.nvmlDeviceGetMemoryInfo(self.card).used) - own)

    def _asked(self, ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # as above
        if self._nvml is None:
            return None
        try:
            return ask(self._nvml)
        except (self._nvml.NVMLError, ValueError):  # a card that does not tell, or is gone
            return None


def _card(nvml: Any, device: str) -> Any:  # noqa: ANN401  # as above
    """NVML counts all cards, torch those that CUDA_VISIBLE_DEVICES names."""
    number = int(device.partition(":")[2] or 0)
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = named[number] if number < len(named) else str(number)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
