"""A container engine for one check: Debian's, in a folder of its own, gone without a trace afterwards.

The rule: nothing of the machine's own is used or changed but its packages. The engine has its own data, socket and
plugins; a machine on which another engine runs already is left alone, because two would share the packet filter.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = {
    "dockerd": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
    "mmdebstrap": "mmdebstrap",
}
_PLUGINS = ("docker-compose", "docker-buildx")
"""Debian 13's packages of the two plugins that Debian 12 does not have yet."""
_SOURCE = r"^(?:URIs:|deb)\s.*?(https?://\S+/debian)/?(?=\s|$)"
_MEMORY = 16 << 30
"""Bytes: the engine's folder takes 8 GiB of it, the nodes and builds the rest."""
_INSTALL_SECONDS = 240.0
_START_SECONDS = 30.0
_STOP_SECONDS = 20.0
CLIENT = "/usr/bin/docker"
"""Of the engine's own package: another client that may be on the path has plugins of its own."""


class Unavailable(Exception):
    """This machine cannot run the check; says why."""


class CheckFailed(Exception):
    """Something does not do what it must."""


@dataclass(frozen=True)
class Engine:
    """A running engine. Every command has a deadline; a failure is a CheckFailed with the command's last words."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {"DOCKER_HOST": f"unix://{self.folder / 'docker.sock'}", "DOCKER_CONFIG": str(self.folder / "client")}
        return {**os.environ, **own, "COMPOSE_ANSI": "never", "COMPOSE_PROGRESS": "quiet", "BUILDKIT_PROGRESS": "plain"}

    def docker(self, *arguments: str, seconds: float = 60.0, settings: dict[str, str] | None = None) -> str:
        """Run one client command; its standard output."""
        return run([CLIENT, *arguments], seconds, {**self.environment, **(settings or {})})


def run(command: list[str], seconds: float, environment: dict[str, str] | None = None) -> str:
    """Run `command` to its end; its standard output. CheckFailed if it fails or takes longer than `seconds`."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"`{shown}` took longer than {seconds:.0f} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise CheckFailed(f"`{shown}` ended with {done.returncode}:\n{last}")
    return done.stdout


def prepare() -> None:
    """Install what is missing; Unavailable if that is not possible here."""
    if os.geteuid() != 0:
        raise Unavailable("an engine needs root")
    if not shutil.which("apt-get"):
        raise Unavailable("this is no Debian: there is no apt-get")
    if Path("/sys/class/net/docker0").exists():
        raise Unavailable("another container engine has its network here (docker0)")
    missing = [package for tool, package in _PACKAGES.items() if not shutil.which(tool)]
    if missing:
        _try(["apt-get", "update", "-qq"], f"the package lists cannot be had for {' '.join(missing)}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends", *missing]
        with _services_off():
            _try(command, f"cannot install {' '.join(missing)}", quiet)


@contextmanager
def _services_off() -> Iterator[None]:
    """Nothing that is installed meanwhile is started (Debian's policy-rc.d)."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _try(command: list[str], failure: str, settings: dict[str, str] | None = None) -> None:
    try:
        run(command, _INSTALL_SECONDS, {**os.environ, **(settings or {})})
    except CheckFailed as error:
        raise Unavailable(f"{failure}: {str(error).splitlines()[-1]}") from error


def mirror() -> str:
    """Where this machine gets its packages from; Unavailable if that cannot be read."""
    for file in (*sorted(Path("/etc/apt/sources.list.d").glob("debian.*")), Path("/etc/apt/sources.list")):
        with suppress(OSError):
            found = re.search(
                r"^(?:URIs:|deb)\s.*?(https?://\S+/debian)/?(?=\s|$)", file.read_text(encoding="utf-8"), re.MULTILINE
            )
            if found:
                return found.group(1)
    raise Unavailable("no source of Debian's packages is set up here")


def _fetch_plugins(folder: Path) -> None:
    """Compose and buildx, out of the next Debian's packages; nothing of them is installed."""
    apt = folder / "apt"
    for name in ("sources", "lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source = f"Types: deb\nURIs: {mirror()}\nSuites: trixie\nComponents: main\nSigned-By: {key}\n"
    (apt / "sources" / "trixie.sources").write_text(source, encoding="utf-8")
    own = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": str(apt / "sources"),
        "Dir::State::Lists": str(apt / "lists"),
        "Dir::Cache": str(apt / "cache"),
        "APT::Sandbox::User": "root",
    }
    options = [word for key, value in own.items() for word in ("-o", f"{key}={value}")]
    _try(["apt-get", *options, "update", "-qq"], "the lists of the compose package cannot be had")
    download = " ".join(["apt-get", *options, "download", "-qq", *_PLUGINS])
    _try(["sh", "-ec", f"cd {apt / 'packages'}; {download}; for file in *.deb; do dpkg -x $file ..; done"], "no compose plugin")
    shutil.copytree(apt / "usr/libexec/docker/cli-plugins", folder / "client" / "cli-plugins")
    shutil.rmtree(apt)


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for the engine's gigabytes, gone afterwards; in memory where there is enough, which saves half of the time."""
    folder = Path(tempfile.mkdtemp(prefix="nolocod-engine-"))
    in_memory = psutil.virtual_memory().available > _MEMORY
    if in_memory:
        run(["mount", "-t", "tmpfs", "-o", "size=12g,mode=0755", "nolocod-engine", str(folder)], 10)
    try:
        yield folder
    finally:
        if in_memory:
            subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """Run an engine with everything of it in `folder`; Unavailable if this machine lets none run."""
    _fetch_plugins(folder)
    found = Engine(folder)
    command = ["dockerd", "--config-file", str(folder / "none.json"), "-H", f"unix://{folder / 'docker.sock'}"]
    command += ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    command += ["--bip", "10.222.0.1/24", "--default-address-pool", "base=10.223.0.0/16,size=24", "--log-level", "warn"]
    (folder / "none.json").write_text("{}", encoding="utf-8")
    log = folder / "engine.log"
    before = _chains()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        _await(found, process, log)
        yield found
    finally:
        _stop(process)
        _remove_traces(folder, before)


def _await(found: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(CheckFailed):
            found.docker("version", seconds=5)
            return
        time.sleep(0.2)
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    raise Unavailable(f"the engine does not start here:\n{last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _chains() -> str:
    """The whole packet filter, as it can be restored."""
    done = subprocess.run(["iptables-save"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout


def _remove_traces(folder: Path, before: str) -> None:
    """Put the packet filter back as it was, and take away the bridge and what is still mounted."""
    restore = before or "".join(f"*{table}\nCOMMIT\n" for table in ("filter", "nat"))
    subprocess.run(["iptables-restore"], input=restore, text=True, timeout=10, check=False)
    for bridge in Path("/sys/class/net").glob("docker0"):
        subprocess.run(["ip", "link", "delete", bridge.name], timeout=10, check=False)
    for line in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
        place = line.split()[1]
        if Path(place) != folder and Path(place).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", place], timeout=10, check=False)
