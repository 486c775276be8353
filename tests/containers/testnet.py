"""What the image and the testnet must do, in the order in which an operator would see it.

The rule: only the files that users have, only the commands that users type. Each step prints what it found.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nolocod import __version__
from tests.containers.engine import CheckFailed, run
from tests.containers.monitor import Monitor, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.containers.engine import Engine
    from tests.containers.stand_ins import Names

_MOST_MEGABYTES = 150.0
"""Of the image's own layers, above the base and that of torch and numba."""
_BUILD_SECONDS = 420.0
_UP_SECONDS = 240.0
_NODES = 5
_KILLED = "home:9464"
_STRUCK = "max_over_time(nolocod_trainer_failures_total[5m]) > 0"
_PROJECT = "nolocod"
_UNITS = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print `what` and how long it took."""
    began = time.monotonic()
    print(f"  … {what}", flush=True)
    yield
    print(f"  ok {what}: {time.monotonic() - began:.1f} s", flush=True)


class Testnet:
    """The compose project of the checkout `root`, on an engine of our own."""

    def __init__(self, engine: Engine, root: Path) -> None:
        ports = _free_ports(2)
        self._engine = engine
        self._root = root
        self._settings = {"PROMETHEUS_PORT": str(ports[0]), "ALERTMANAGER_PORT": str(ports[1]), "FAULT_SECONDS": "10"}
        self.monitor = Monitor(*(f"http://127.0.0.1:{port}" for port in ports))

    def compose(self, *arguments: str, seconds: float = 120.0, faults: bool = False) -> str:
        names = ["docker-compose.yml", *(["docker-compose.faults.yml"] if faults else [])]
        files = [word for name in names for word in ("-f", str(self._root / "deploy" / name))]
        return self._engine.docker("compose", *files, *arguments, seconds=seconds, settings=self._settings)

    def check(self, names: Names, *, both_builders: bool) -> None:
        """All steps; CheckFailed at the first that does not hold."""
        with step("the images build"):
            self._build("1")
        if both_builders:
            with step("they build without BuildKit"):
                self._build("0")
        self._look_at_image()
        with step("Prometheus and Alertmanager accept their files"):
            self._validate(names)
        try:
            self._run_it()
        except CheckFailed:
            print(self.compose("ps", "--all"), self.compose("logs", "--tail", "15"), *self._nodes_words(), sep="\n")
            raise
        finally:
            self.compose("down", "-v", "--timeout", "30", seconds=180, faults=True)
        with step("`down -v` has left nothing"):
            self._nothing_left()

    def _nodes_words(self) -> Iterator[str]:
        """What the nodes of different networks say of themselves."""
        for service in ("bootstrap", "home", "flat"):
            try:
                yield f"{service}: {self.compose('exec', '-T', service, 'nolocod', 'status')}"
            except CheckFailed as error:
                yield f"{service} says nothing: {error}"

    def _build(self, buildkit: str) -> None:
        settings = {"DOCKER_BUILDKIT": buildkit}
        for tag, folder in (("nolocod", "."), ("nolocod-router", "deploy/router")):
            line = ["build", "--tag", tag, str(self._root / folder)]
            self._engine.docker(*line, seconds=_BUILD_SECONDS, settings=settings)

    def _look_at_image(self) -> None:
        own = 0.0
        for line in self._engine.docker(
            "history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", "nolocod"
        ).splitlines():
            size, made_by = line.split("\t", 1)
            if "COPY /opt/torch " in made_by or ("COPY dir" in made_by and "in /opt/torch " in made_by):
                break  # torch, and below it the base
            own += _megabytes(size)
        else:
            raise CheckFailed("the image has no layer of torch")
        print(f"  ok the image's own layers: {own:.0f} MB above torch, numba and the base")
        if own > _MOST_MEGABYTES:
            raise CheckFailed(f"that is more than {_MOST_MEGABYTES:.0f} MB")
        labels = json.loads(self._engine.docker("image", "inspect", "--format", "{{json .Config.Labels}}", "nolocod"))
        titles = "org.opencontainers.image."
        if labels.get(titles + "version") != __version__ or not labels.get(titles + "base.name"):
            raise CheckFailed(f"the image's labels are {labels}")
        who = self._engine.docker("run", "--rm", "--entrypoint", "id", "nolocod", "-u").strip()
        if who == "0":
            raise CheckFailed("the image runs as root")

    def _validate(self, names: Names) -> None:
        for tool, image, file in (
            (["promtool", "check", "config"], names.prometheus, "prometheus/prometheus.yml"),
            (["amtool", "check-config"], names.alertmanager, "alertmanager/alertmanager.yml"),
        ):
            volume = f"{self._root / 'deploy'}:/deploy:ro"
            line = ["run", "--rm", "-v", volume, "--entrypoint", tool[0], image, *tool[1:], f"/deploy/{file}"]
            self._engine.docker(*line)

    def _run_it(self) -> None:
        monitor = self.monitor
        with step("`up --wait`: every service is healthy"):
            limit = str(int(_UP_SECONDS))
            self.compose(
                "up", "-d", "--wait", "--wait-timeout", limit, "--pull", "never", "--no-build", seconds=_UP_SECONDS + 60
            )
        with step("paired outer steps of all nodes are in Prometheus"):
            wait(
                "paired steps",
                90,
                lambda: sum(v > 0 for v in monitor.values('nolocod_outer_steps_total{kind="paired"}').values()) >= _NODES,
            )
        for service, kind in (("home", "cone"), ("flat", "symmetric")):
            with step(f"{service} knows that its NAT is {kind}"):
                self._wait_for_kind(service, kind)
        with step("every query of every panel and rule has data"):
            run([sys.executable, "-m", "tools.panels", "--prometheus", monitor.prometheus, "--wait", "120"], 150)
        self._kill_and_recover()
        with step("SIGTERM ends a node in order"):
            self.compose("stop", "trainer", seconds=90)
            self._ended_well("trainer")
        self.strike()

    def _wait_for_kind(self, service: str, kind: str) -> None:
        query = f'nolocod_reachable{{instance="{service}:9464", kind="{kind}"}} == 1'
        try:
            wait("the kind of NAT", 120, lambda: self.monitor.values(query))
        except CheckFailed as error:
            said = json.loads(self.compose("exec", "-T", service, "nolocod", "status", "--json"))
            raise CheckFailed(f"{error}; {service} says {said['reach']}") from error

    def strike(self) -> None:
        """The file of faults: a node comes up among them, and the first of them reaches it."""
        if failed := self.monitor.values(_STRUCK):
            raise CheckFailed(f"trainers failed before there were faults: {failed}")
        with step("the file of faults brings up a node that trains"):
            limit = str(int(_UP_SECONDS))
            line = ["up", "-d", "--wait", "--wait-timeout", limit, "--pull", "never", "--no-build", "--no-recreate", "victim"]
            self.compose(*line, seconds=_UP_SECONDS + 60, faults=True)
        with step("its trainer is killed, and Prometheus knows"):
            wait("a failure of a trainer", 120, lambda: self.monitor.values(_STRUCK))

    def _kill_and_recover(self) -> None:
        monitor = self.monitor
        with step("a node killed with -9 raises its alert"):
            self.compose("kill", "home")
            wait("the alert", 120, lambda: [a for a in monitor.alerts("NolocodNodeDown") if a["labels"]["instance"] == _KILLED])
        with step("it comes back, pairs again, and the alert ends"):
            self.compose("up", "-d", "--no-build", "--no-recreate", "home")
            paired = f'nolocod_outer_steps_total{{kind="paired", instance="{_KILLED}"}} > 0'
            wait("a paired step", 150, lambda: monitor.values(paired))
            wait("the alert's end", 120, lambda: not monitor.alerts("NolocodNodeDown"))

    def _ended_well(self, service: str) -> None:
        for line in self.compose("ps", "--all", "--format", "json", service).splitlines():
            ended = json.loads(line)
            if ended["State"] != "exited" or ended["ExitCode"]:
                raise CheckFailed(f"{ended['Name']} is {ended['State']} with status {ended['ExitCode']}")

    def _nothing_left(self) -> None:
        for what in ("container", "volume", "network"):
            every = ["--all"] if what == "container" else []
            label = f"label=com.docker.compose.project={_PROJECT}"
            if left := self._engine.docker(what, "ls", *every, "-q", "--filter", label).split():
                raise CheckFailed(f"{len(left)} of kind {what} are left")
        if left := self._engine.docker("volume", "ls", "-q").split():
            raise CheckFailed(f"{len(left)} volumes without a name are left")


def _megabytes(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)([kMG]?B)", text)
    if found is None:
        raise CheckFailed(f"a layer's size is {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
