"""What keeps a node running without a terminal: an entry for the service manager of this system, written and handed over.

The rule: an entry is one file, written whole, that holds the whole command line, quoted as its manager reads it
(systemd.service(5), launchd.plist(5), CommandLineToArgvW). What the manager refuses is taken away again. Windows: a node runs
in WSL there, which ends with its last program, so it is Windows' own Task Scheduler that starts it.
"""

from __future__ import annotations

import hashlib
import os
import plistlib
import shutil
import subprocess
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from nolocod.disk import disk_errors, write_private
from nolocod.errors import ServiceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nolocod.paths import DataDir

_SECONDS = 150
"""For one command of the manager: a node that is restarted may take 120 to stop."""
_UNIT = """\
[Unit]
Description=nolocod training node
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
# systemd takes no program's name that has quotes in it, a shell does; the colon leaves $ to the shell
ExecStart=:/bin/sh -c "exec \\"$@\\"" sh {line}
WatchdogSec=60
Restart=on-failure
RestartSec=60
# a wrong command line does not become right by itself
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStartSec=120
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""
_TASK = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers>{trigger}</Triggers>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions><Exec><Command>wsl.exe</Command><Arguments>{arguments}</Arguments></Exec></Actions>
</Task>
"""


@dataclass(frozen=True)
class Service:
    """One entry. `take` and `drop` are the commands that hand it over and take it back; one that begins with "-" may fail."""

    file: Path
    content: bytes
    take: Sequence[Sequence[str]]
    drop: Sequence[Sequence[str]]
    manager: str
    log: str
    """How its owner reads what the node said."""

    @property
    def managed(self) -> bool:
        """Whether the manager's own tool is there."""
        return shutil.which(self.manager) is not None


def service(paths: DataDir, command: Sequence[str], env: Mapping[str, str], platform: str, *, start: bool = True) -> Service:
    """The entry that runs `command` for this data directory; `start`: with the machine too, and not only now.

    All paths are absolute; `platform` is as sys.platform. Raises UsageError for a word that no entry can hold.
    """
    for word in (*command, str(paths.root)):
        if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in word):
            raise UsageError(f"{word!r} has a sign that cannot be written into a service's file.", remedy="Rename it.")
    usual = paths.root == Path("~/.nolocod").expanduser()
    name = "nolocod" if usual else f"nolocod-{hashlib.sha256(os.fsencode(paths.root)).hexdigest()[:8]}"
    if platform == "darwin":
        return _launchd(f"org.{name}", str(paths.log), command, start=start)
    if distribution := env.get("WSL_DISTRO_NAME"):
        line = subprocess.list2cmdline(["-d", distribution, "-u", env.get("USER", "root"), "--exec", *command])
        return _task(name, paths.root / f"{name}.xml", line, start=start)
    folder = Path(env.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "systemd" / "user"
    return _systemd(folder / f"{name}.service", command, start=start)


def install(service: Service) -> list[str]:
    """Write the entry and hand it over, if the manager is there; the commands that failed and may. ServiceError if it refuses
    any other: nothing of the entry is left then."""
    write_private(service.file, service.content)
    try:
        return _tell(service.take) if service.managed else []
    except ServiceError:
        remove(service)
        raise


def remove(service: Service) -> list[str] | None:
    """Stop the entry's node, and take it away; the commands that failed, or None if there is no entry."""
    if not service.file.exists():
        return None
    failed = _tell([("-", *command) for command in service.drop]) if service.managed else []
    with disk_errors(service.file):
        service.file.unlink()
    return failed


def _tell(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run the commands in order; those that failed and may."""
    failed = []
    for command in commands:
        words = [word for word in command if word != "-"]
        try:
            subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            if command[0] != "-":
                raise ServiceError(f"`{' '.join(words)}` failed: {said.splitlines()[-1]}") from error
            failed.append(" ".join(words))
    return failed


def _systemd(file: Path, command: Sequence[str], *, start: bool) -> Service:
    line = " ".join('"' + word.replace("\\", r"\\").replace('"', r"\"").replace("%", "%%") + '"' for word in command)
    user = ("systemctl", "--user")
    linger = [("-", "loginctl", "--no-ask-password", "enable-linger")] if start else []
    enabled = (*user, "enable" if start else "disable", file.name)
    taken = [(*user, "daemon-reload"), *linger, enabled, (*user, "restart", file.name)]
    drop, log = [(*user, "disable", "--now", file.name)], f"journalctl --user -u {file.name}"
    return Service(file, _UNIT.format(line=line).encode(), taken, drop, "systemctl", log)


def _launchd(label: str, log: str, command: Sequence[str], *, start: bool) -> Service:
    file, domain = Path("~/Library/LaunchAgents").expanduser() / f"{label}.plist", f"gui/{os.getuid()}"
    agent = {
        "Label": label, "ProgramArguments": list(command), "RunAtLoad": start, "ThrottleInterval": 60, "ExitTimeOut": 120,
        "ProcessType": "Background", "StandardOutPath": log, "StandardErrorPath": log,
        **({"KeepAlive": {"SuccessfulExit": False}} if start else {}),  # which starts it at each login too
    }  # fmt: skip
    gone = ("launchctl", "bootout", f"{domain}/{label}")
    taken = [("-", *gone), ("launchctl", "bootstrap", domain, str(file)), ("launchctl", "kickstart", f"{domain}/{label}")]
    return Service(file, plistlib.dumps(agent), taken, [gone], "launchctl", f"tail {log}")


def _task(name: str, file: Path, line: str, *, start: bool) -> Service:
    trigger = ""
    if start:  # a task for whoever logs in needs an administrator
        try:
            done = subprocess.run(["whoami.exe"], capture_output=True, text=True, timeout=_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServiceError(
                f"Windows does not tell who you are: {error}", remedy="Turn on interop in /etc/wsl.conf."
            ) from error
        trigger = f"<LogonTrigger><UserId>{escape(done.stdout.strip())}</UserId></LogonTrigger>"
    # the file lies in Linux: its path as Windows has it
    create = ("sh", "-c", 'schtasks.exe /Create /F /TN "$1" /XML "$(wslpath -w "$2")"', "sh", name, str(file))
    drop = [("schtasks.exe", "/End", "/TN", name), ("schtasks.exe", "/Delete", "/F", "/TN", name)]
    content = _TASK.format(trigger=trigger, arguments=escape(line)).encode("utf-16")
    return Service(file, content, [create, ("schtasks.exe", "/Run", "/TN", name)], drop, "schtasks.exe", "nolocod status")
