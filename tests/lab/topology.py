"""Networks for tests: a public internet, homes behind routers with NATs of every kind, and what goes wrong with them.

The rule: nothing is named in the system. Each network lives as long as a process of ours that holds it, so all of it is
gone when that process is, also after a kill -9 of the tests. What is carried between them goes through `internet.c`, with
each line's delay and rate: packets to nowhere vanish, as they do outside.

Routers are Linux's own: "cone" masquerades and keeps the port, which with its filter is a port-restricted cone NAT
(RFC 4787: address- and port-dependent filtering); "symmetric" draws a port for each connection; "open" translates
nothing. All but "open" drop what nobody inside has asked for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.bench.base import BenchError
from tests.bench.parties import enter, private_network

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["open", "cone", "symmetric"]

_SOURCE = Path(__file__).resolve().parent / "internet.c"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nolocod-tests" / "lab"
_TOOLS = {"ip": "iproute2", "iptables": "iptables", "ip6tables": "iptables", "conntrack": "conntrack", "nsenter": "util-linux"}
_SECONDS = 60.0
_QUEUE = 100
"""Milliseconds: the most that waits before a line; what comes then is dropped."""


class LabError(BenchError):
    """The lab cannot be had, or one of its commands failed."""


def missing() -> str:
    """Why this machine can have no lab; empty if it can."""
    if os.geteuid() != 0:
        return "only root may lay networks"
    packages = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if packages:
        return f"these packages are needed: {' '.join(packages)}"
    if shutil.which("cc") is None:
        return "a C compiler is needed"
    if not Path("/dev/net/tun").exists():
        return "this system has no TUN devices"
    with private_network() as network:
        if network is None:
            return "this system gives no network namespaces"
        tried = [*enter(network), "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE", "--random-fully"]
        done = subprocess.run(tried, capture_output=True, text=True, timeout=_SECONDS, check=False)
        return f"this kernel has no NAT: {done.stderr.strip()}" if done.returncode else ""


def compiled() -> Path:
    """The program that carries packets."""
    content = _SOURCE.read_bytes()
    program = _CACHE / f"internet-{hashlib.sha256(content).hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = program.with_name(f"{program.name}.{os.getpid()}")
        _do(["cc", "-O2", "-o", str(fresh), str(_SOURCE)])
        fresh.replace(program)
    return program


def _do(command: Sequence[str], script: str | None = None) -> str:
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}.")
    return done.stdout


@dataclass(frozen=True)
class Line:
    """A line to the internet: milliseconds that it adds each way, Mbit/s out and in (0: unlimited), and the share of packets
    that it drops each way."""

    delay: float = 0.0
    up: float = 0.0
    down: float = 0.0
    loss: float = 0.0


class Network:
    """One network of its own: a host, or a router."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        """Of the process that holds it."""

    def command(self, *command: str) -> list[str]:
        """`command`, to be run in this network; it is killed when the thread that starts it ends."""
        return [*enter(self.pid), "setpriv", "--pdeathsig", "KILL", *command]

    def sh(self, script: str) -> str:
        """Run shell commands in this network; LabError if one fails."""
        return _do([*enter(self.pid), "sh", "-e"], script)


class Place(Network):
    """A host that nodes run on. `addresses` are its own: its interface's, IPv4 first."""

    def __init__(self, name: str, pid: int, addresses: tuple[str, ...]) -> None:
        super().__init__(name, pid)
        self.addresses = addresses


class Home:
    """A private network: its router, and the hosts behind it."""

    def __init__(self, internet: Internet, number: int, kind: Kind, router: Network) -> None:
        self.kind = kind
        self.router = router
        self.outside = f"5.5.{number}.250"
        """The router's address on the internet."""
        self.hosts: list[Place] = []
        self._internet = internet
        self._number = number
        self._moves = 0

    def _inside(self, host: int) -> str:
        return f"{'5.5' if self.kind == 'open' else '10.0'}.{self._number}.{host}"

    def _setup(self) -> None:
        self._internet.route(self.outside, self.router)
        self.router.sh(
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1\n"
            "ip link add lan0 type bridge\n"
            f"ip addr add {self._inside(254)}/24 dev lan0\n"
            f"ip addr add {self._internet.inside6(self._number, 0xFE)}/64 dev lan0 nodad\n"
            "ip link set lan0 up\n"
            f"ip addr add {self.outside}/32 dev wan0\n"
        )
        if self.kind == "open":
            return
        how = " --random-fully" if self.kind == "symmetric" else ""
        # loose tracking would take up connections in their middle: a mapping that was forgotten would come back
        self.router.sh(
            "sysctl -qw net.netfilter.nf_conntrack_tcp_loose=0\n"
            f"iptables -t nat -A POSTROUTING -s 10.0.0.0/8 -o wan0 -j MASQUERADE{how}\n"
        )
        for tables in ("iptables", "ip6tables"):
            self.router.sh(
                "".join(
                    f"{tables} -A {chain} -i wan0 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n"
                    f"{tables} -A {chain} -i wan0 -j DROP\n"
                    for chain in ("INPUT", "FORWARD")
                )
                + f"{tables} -A FORWARD -o wan0 -m conntrack --ctstate INVALID -j DROP\n"
            )

    def host(self) -> Place:
        """One more host in this network."""
        number = len(self.hosts) + 1
        place = Place(f"{self.router.name}.{number}", self._internet.network(), (self._inside(number),))
        self.router.sh(
            f"ip link add port{number} type veth peer name eth0 netns {place.pid}\nip link set port{number} master lan0 up\n"
        )
        place.sh(
            f"ip addr add {place.addresses[0]}/24 dev eth0\nip link set eth0 up\nip route add default via {self._inside(254)}\n"
        )
        if self._internet.ipv6:
            address = self._internet.inside6(self._number, number)
            place.sh(
                f"ip addr add {address}/64 dev eth0 nodad\n"
                f"ip route add default via {self._internet.inside6(self._number, 0xFE)}\n"
            )
            self._internet.route(address, self.router)
            place.addresses += (address,)
        if self.kind == "open":
            self._internet.route(place.addresses[0], self.router)
        self.hosts.append(place)
        return place

    def forget(self) -> None:
        """The router loses all its mappings, as after a restart."""
        self.router.sh("conntrack -F 2>&1\n")

    def move(self) -> None:
        """The provider gives the router another address; the one before leads nowhere from now on."""
        before = self.outside
        self._moves += 1
        self.outside = f"5.6.{self._number}.{self._moves}"
        self.router.sh(f"ip addr add {self.outside}/32 dev wan0\nip addr del {before}/32 dev wan0\nconntrack -F 2>&1\n")
        self._internet.forget(before)
        self._internet.route(self.outside, self.router)

    def readdress(self, place: Place) -> None:
        """`place` gets another address from its router."""
        host = 100 + int(place.addresses[0].rpartition(".")[2])
        fresh = self._inside(host)
        place.sh(
            f"ip addr del {place.addresses[0]}/24 dev eth0\nip addr add {fresh}/24 dev eth0\n"
            f"ip route replace default via {self._inside(254)}\n"
        )
        place.addresses = (fresh, *place.addresses[1:])

    def only6(self) -> None:
        """The hosts have IPv6 and nothing else."""
        for place in self.hosts:
            place.sh("ip -4 addr flush dev eth0\n")
            place.addresses = tuple(address for address in place.addresses if ":" in address)

    def cut(self) -> None:
        """The line to the provider is dead, without a word to anybody."""
        self._internet.cut(self.router)

    def join(self) -> None:
        """The line works again."""
        self._internet.join(self.router)


class Internet:
    """What all are connected to. Made by `internet`."""

    def __init__(self, stack: ExitStack, carrier: subprocess.Popen[str], ipv6: bool) -> None:
        self.ipv6 = ipv6
        self._stack = stack
        self._carrier = carrier
        self._public = 0
        self._homes = 0

    def public(self, delay: float = 0.0, rate: float = 0.0) -> Place:
        """A host with addresses of its own; its line has a delay in milliseconds and a rate in Mbit/s (0: unlimited)."""
        self._public += 1
        place = Place(f"public{self._public}", self.network(), (f"5.5.0.{self._public}",))
        self._attach(place, Line(delay, rate, rate))
        if self.ipv6:
            place.addresses += (f"2a00:5::{self._public:x}",)
        for address in place.addresses:
            place.sh(f"ip addr add {address}{'/128 nodad' if ':' in address else '/32'} dev wan0\n")
            self.route(address, place)
        return place

    def home(self, kind: Kind = "cone", hosts: int = 1, delay: float = 0.0, rate: float = 0.0) -> Home:
        """A private network with so many hosts behind a router of that kind."""
        self._homes += 1
        router = Network(f"home{self._homes}", self.network())
        self._attach(router, Line(delay, rate, rate))
        home = Home(self, self._homes, kind, router)
        home._setup()
        for _ in range(hosts):
            home.host()
        return home

    def inside6(self, home: int, host: int) -> str:
        return f"2a00:5:{home:x}::{host:x}"

    def lay(self, network: Network, line: Line) -> None:
        """Give a router, or a host with addresses of its own, another line."""
        self._tell(f"line {network.name} {line.delay} {line.up} {line.down} {_QUEUE} {line.loss}")

    def _attach(self, network: Network, line: Line) -> None:
        self._tell(f"device {network.name} {network.pid}")
        self.lay(network, line)
        network.sh("ip link set wan0 mtu 1500 txqueuelen 1000 up\nip route add default dev wan0\n")
        if self.ipv6:
            network.sh("ip -6 route add default dev wan0\n")

    # --- for Home ---------------------------------------------------------------------------------

    def network(self) -> int:
        """A new network of its own, as the id of the process that holds it."""
        found = self._stack.enter_context(private_network())
        if found is None:
            raise LabError("this system gives no network namespaces.")
        return found

    def route(self, address: str, to: Network) -> None:
        self._tell(f"route {address} {to.name}")

    def forget(self, address: str) -> None:
        self._tell(f"forget {address}")

    def cut(self, network: Network) -> None:
        self._tell(f"cut {network.name}")

    def join(self, network: Network) -> None:
        self._tell(f"join {network.name}")

    def _tell(self, line: str) -> None:
        assert self._carrier.stdin is not None
        assert self._carrier.stdout is not None
        try:
            self._carrier.stdin.write(line + "\n")
            self._carrier.stdin.flush()
        except BrokenPipeError as error:
            raise LabError("the carrier of packets has ended.") from error
        answer = self._carrier.stdout.readline().strip()
        if answer != "ok":
            raise LabError(f"{line}: {answer or 'the carrier of packets has ended'}.")


@contextmanager
def internet(ipv6: bool = False) -> Iterator[Internet]:
    """An internet without anybody on it. Raises LabError where none can be had.

    With `ipv6` every host has a global IPv6 address too, which routers do not translate, but filter.
    """
    why = missing()
    if why:
        raise LabError(f"{why}.")
    program = str(compiled())
    with ExitStack() as stack:
        carrier = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        stack.callback(_end, carrier)
        yield Internet(stack, carrier, ipv6)


def _end(carrier: subprocess.Popen[str]) -> None:
    carrier.kill()
    carrier.communicate()
