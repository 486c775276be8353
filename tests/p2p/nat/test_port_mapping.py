"""The router's port: against odd routers made up here, and against miniupnpd in network namespaces.

The latter need root, `ip`, `iptables-legacy` and `miniupnpd` (Debian: miniupnpd-iptables), and are skipped without.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import miniupnpc
import pytest
import trio
import trio.testing

from nolocod.errors import RouterError
from nolocod.identity import Identity
from nolocod.p2p.host import open_host
from nolocod.p2p.nat.port_mapping import PortMapper, UpnpTiming
from nolocod.p2p.nat.reachability import Reachability, ReachTiming
from nolocod.p2p.settings import MeshSettings
from nolocod.units import Address
from tests.support.wires import until

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = UpnpTiming(call=3.0, renew=0.05, retry=0.05)
ROOT = Path(__file__).resolve().parents[3]


class Router:
    """What miniupnpc.UPnP does, as routers out there do it."""

    lanaddr = "192.168.1.17"
    outside = "198.51.100.7"
    taken: ClassVar[set[int]] = set()
    permanent_only = False
    mappings: ClassVar[dict[int, tuple[str, int, int]]] = {}
    answers = True
    asked: ClassVar[list[tuple[int, int]]] = []
    slow = 0.0

    def __init__(self) -> None:
        self.discoverdelay = 0

    def discover(self) -> int:
        time.sleep(self.slow)
        return int(self.answers)

    def selectigd(self) -> None:
        if not self.answers:
            raise Exception("No UPnP device discovered")  # as the library does

    def externalipaddress(self) -> str:
        return self.outside

    def addportmapping(self, port: int, _: str, host: str, internal: int, __: str, ___: str, lease: int) -> bool:
        self.asked.append((port, lease))
        if port in self.taken:
            raise Exception("ConflictInMappingEntry")
        if self.permanent_only and lease:
            raise Exception("OnlyPermanentLeasesSupported")
        self.mappings[port] = (host, internal, lease)
        return True

    def deleteportmapping(self, port: int, _: str, __: str) -> bool:
        del self.mappings[port]
        return True


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> type[Router]:
    class Fresh(Router):
        taken: ClassVar[set[int]] = set()
        mappings: ClassVar[dict[int, tuple[str, int, int]]] = {}
        asked: ClassVar[list[tuple[int, int]]] = []

    monkeypatch.setattr(miniupnpc, "UPnP", Fresh)
    return Fresh


def mapper(port: int = 4001, timing: UpnpTiming = QUICK) -> PortMapper:
    return PortMapper(port, random.Random(0), timing)


async def test_a_mapping_is_renewed_and_given_back(router: type[Router]) -> None:
    one = mapper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await until(lambda: len(router.asked) >= 3)
        assert one.mapping is not None
        assert one.mapping == Address("198.51.100.7", 4001)
        assert router.mappings == {4001: ("192.168.1.17", 4001, 3600)}
        nursery.cancel_scope.cancel()
    assert set(router.asked) == {(4001, 3600)}
    assert router.mappings == {}
    assert one.mapping is None


async def test_a_port_that_is_taken_makes_room_for_another_which_is_kept(router: type[Router]) -> None:
    router.taken.add(4001)
    one = mapper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await until(lambda: one.mapping)
        assert one.mapping is not None
        port = one.mapping.port
        assert port != 4001
        router.asked.clear()
        await until(lambda: len(router.asked) >= 2)
        assert set(router.asked) == {(port, 3600)}
        nursery.cancel_scope.cancel()


async def test_a_router_that_knows_no_leases_is_asked_for_good(router: type[Router]) -> None:
    router.permanent_only = True
    assert (await mapper().map()).port == 4001
    assert router.mappings == {4001: ("192.168.1.17", 4001, 0)}


@pytest.mark.parametrize(
    ("quirk", "cause"),
    [
        ({"answers": False}, "no router answers UPnP here"),
        ({"outside": "0.0.0.0"}, "no outside address"),
        ({"outside": ""}, "no outside address"),
        ({"taken": range(65_536)}, "ConflictInMappingEntry"),
        ({"slow": 0.3}, "did not answer in time"),
    ],
)
async def test_why_there_is_no_port_is_told(
    router: type[Router], monkeypatch: pytest.MonkeyPatch, quirk: dict[str, object], cause: str
) -> None:
    for name, value in quirk.items():
        monkeypatch.setattr(router, name, value)
    one = mapper(timing=UpnpTiming(call=0.1 if "slow" in quirk else 3.0, retry=0.05))
    with pytest.raises(RouterError, match=cause):
        await one.map()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await until(lambda: cause in one.why)
        nursery.cancel_scope.cancel()


async def test_a_router_that_comes_back_is_found_again(router: type[Router], monkeypatch: pytest.MonkeyPatch) -> None:
    one = mapper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await until(lambda: one.mapping)
        monkeypatch.setattr(router, "answers", False)
        await until(lambda: one.mapping is None)
        monkeypatch.setattr(router, "answers", True)
        await until(lambda: one.mapping)
        nursery.cancel_scope.cancel()


async def test_the_router_of_each_network_that_we_come_to_is_asked(router: type[Router]) -> None:
    """A node that starts before its network is up, and then moves."""
    config = MeshSettings(data_dir=Path("/nonexistent"))
    async with open_host(Identity.generate(), [Address("127.0.0.1", 0)], (), lambda _: None) as host:
        port = int(host.local[0].rpartition("/")[2])
        reach = Reachability(host, config, lambda _: None, random.Random(0), ReachTiming(first=60.0, look=0.02))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reach.run)
            await trio.testing.wait_all_tasks_blocked()
            assert router.asked == []
            host.announce([Address("192.168.1.17", port)])
            await until(lambda: reach._mapper and reach._mapper.mapping)
            host.announce([Address("192.168.1.17", port), Address("172.17.0.1", port)])  # one more is no other network
            await trio.sleep(0.1)
            assert len(router.asked) == 1
            host.announce([Address("10.0.0.5", port)])
            await until(lambda: len(router.asked) == 2 and reach._mapper and reach._mapper.mapping)
            nursery.cancel_scope.cancel()
        assert router.mappings == {}, "given back"


# --- a real one --------------------------------------------------------------------------------------------

DAEMON = shutil.which("miniupnpd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
MISSING = [name for name in ("ip", "iptables-legacy") if not shutil.which(name)] + ([] if DAEMON else ["miniupnpd"])
needs_router = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and {', '.join(MISSING) or 'nothing else'}"
)

CONFIGURATION = """
ext_ifname=wan
listening_ip=lan
enable_natpmp=no
enable_upnp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000077
allow 1024-65535 10.77.0.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""

NODE = """
import random, sys, trio
from pathlib import Path
from nolocod.identity import Identity
from nolocod.p2p.host import open_host
from nolocod.p2p.nat.autonat import AutoNatServer
from nolocod.p2p.nat.reachability import Reachability, ReachTiming
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.transport.multiaddrs import split
from nolocod.units import Address

async def main(port, expected="", *helpers):
    async with open_host(Identity.generate(), [Address("0.0.0.0", int(port))], (), lambda _: None) as host:
        if not helpers:
            AutoNatServer(host)
            print(host.addresses[0], flush=True)
            await trio.sleep_forever()
        config, found = MeshSettings(data_dir=Path("/nonexistent"), upnp=expected != "symmetric"), trio.Event()

        def tell(event):
            print(event.kind, ",".join(event.addresses), event.why, flush=True)
            if event.kind == expected:
                found.set()

        async with trio.open_nursery() as nursery:
            for helper in helpers:
                peer, address = split(helper)
                await host.connect(peer, [address])
            reach = Reachability(host, config, tell, random.Random(0), ReachTiming(first=0.5, look=0.2, again=1.0))
            nursery.start_soon(reach.run)
            with trio.move_on_after(25):
                await found.wait()
            nursery.cancel_scope.cancel()

trio.run(main, *sys.argv[1:])
"""


class Home:
    """A network behind a router at 5.5.7.1, whose outside has hosts .2 and .3."""

    def __init__(self, stack: ExitStack, *, symmetric: bool) -> None:
        self._stack = stack
        self._name = f"nlcupnp{os.getpid()}"
        for role in ("home", "router", "net"):
            self._sh(f"ip netns add {self._ns(role)}")
            stack.callback(self._sh, f"ip netns del {self._ns(role)}")
            self._sh(f"ip -n {self._ns(role)} link set lo up")
        for inner, outer, link in (("home", "router", "lan"), ("net", "router", "wan")):
            self._sh(f"ip -n {self._ns(inner)} link add {link} type veth peer name {link} netns {self._ns(outer)}")
            for role in (inner, outer):
                self._sh(f"ip -n {self._ns(role)} link set {link} up")
        for role, address, link in (
            ("home", "10.77.0.2/24", "lan"),
            ("router", "10.77.0.1/24", "lan"),
            ("router", "5.5.7.1/24", "wan"),
            ("net", "5.5.7.2/24", "wan"),
            ("net", "5.5.7.3/24", "wan"),
        ):
            self._sh(f"ip -n {self._ns(role)} address add {address} dev {link}")
        self._sh(f"ip -n {self._ns('home')} route add default via 10.77.0.1")
        self.run("router", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for rule in (
            "-t nat -N MINIUPNPD",
            "-t nat -A PREROUTING -i wan -j MINIUPNPD",
            "-t nat -N MINIUPNPD-POSTROUTING",
            f"-t nat -A POSTROUTING -o wan -j MASQUERADE{' --random-fully' if symmetric else ''}",
            "-N MINIUPNPD",
        ):
            self.run("router", "iptables-legacy", "-w", *rule.split())

    def _ns(self, role: str) -> str:
        return f"{self._name}{role}"

    def _sh(self, command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=20)

    def run(self, role: str, *command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self._ns(role), *command], check=True, capture_output=True, text=True, timeout=50, cwd=ROOT
        )
        return done.stdout

    def start(self, role: str, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._ns(role), *command], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        return process

    def start_router(self, folder: Path) -> None:
        (folder / "conf").write_text(CONFIGURATION)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._ns("router"), str(DAEMON), "-d", "-f", folder / "conf", "-P", folder / "pid"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        assert process.stderr is not None
        for line in process.stderr:
            if "listening" in line:
                return
        pytest.fail("miniupnpd did not start")

    def mappings(self) -> int:
        return self.run("router", "iptables-legacy", "-w", "-t", "nat", "-S", "MINIUPNPD").count("-A ")


@contextmanager
def home(*, symmetric: bool = False) -> Iterator[Home]:
    with ExitStack() as stack:
        try:
            found = Home(stack, symmetric=symmetric)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces with iptables-legacy here: {getattr(error, 'stderr', b'') or error!r}")
        yield found


def node(where: Home, expected: str, *helpers: str) -> str:
    """The last that a node at home says of its reach: when it is `expected`, or after 25 s."""
    return where.run("home", sys.executable, "-c", NODE, "4001", expected, *helpers).splitlines()[-1]


@needs_router
def test_a_node_behind_a_router_with_upnp_is_public_by_the_mapped_port(tmp_path: Path) -> None:
    with home() as where:
        where.start_router(tmp_path)
        helper = where.start("net", sys.executable, "-c", NODE, "4001")
        assert helper.stdout is not None
        address = helper.stdout.readline().strip()
        last = node(where, "public", address)
        assert last.startswith("public /ip4/5.5.7.1/tcp/4001/p2p/"), "the mapped address is announced first"
        assert "dialled us at /ip4/5.5.7.1/tcp/4001, the port that the router gave us by UPnP." in last
        assert where.mappings() == 0, "given back at the end"


def two_helpers(where: Home) -> list[str]:
    """Outside, on different addresses."""
    addresses = []
    for port, host in (("4001", "5.5.7.2"), ("4002", "5.5.7.3")):
        helper = where.start("net", sys.executable, "-c", NODE, port)
        assert helper.stdout is not None
        addresses.append(helper.stdout.readline().strip().replace("5.5.7.2", host))
    return addresses


@needs_router
def test_a_node_behind_a_router_that_picks_a_port_per_peer_learns_that_too() -> None:
    with home(symmetric=True) as where:
        last = node(where, "symmetric", *two_helpers(where))
        assert last.startswith("symmetric /ip4/10.77.0.2/tcp/4001/p2p/")
        assert "2 peers could not dial us, and each sees another port (" in last
        assert "Forward TCP port 4001 to this machine, or leave out --no-upnp" in last


@needs_router
def test_a_node_behind_a_router_without_upnp_learns_its_nat() -> None:
    with home() as where:
        last = node(where, "cone", *two_helpers(where))
        assert last.startswith("cone /ip4/10.77.0.2/tcp/4001/p2p/")
        assert "2 peers could not dial us, and 2 see us at 5.5.7.1 port 4001: a NAT that can be punched." in last
        assert "No router answers UPnP here; allow UPnP in yours, or forward TCP port 4001" in last
