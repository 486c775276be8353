"""The lab itself: each kind of router does what it is named for, and so do the accidents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.lab.topology import Home, Internet, Line, Place, internet

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT, HERE = 4001, 5000
SERVER = """
import json, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("up", flush=True)
while True:
    connection, address = listener.accept()
    connection.sendall(json.dumps(address[:2]).encode())
    connection.close()
"""
CLIENT = """
import json, socket, sys, time
began = time.monotonic()
try:
    host, port, source, patience = sys.argv[1], *map(float, sys.argv[2:])
    connection = socket.create_connection((host, int(port)), timeout=patience, source_address=("", int(source)))
    seconds = time.monotonic() - began
    told = b"".join(iter(lambda: connection.recv(100), b""))  # to its end: who closes first keeps the port for a minute
    print(json.dumps({"seen": json.loads(told), "seconds": seconds}))
except OSError as error:
    print(json.dumps({"error": type(error).__name__}))
"""
BOTH = """
import json, socket, sys
dialer = socket.socket()
dialer.settimeout(4.0)
dialer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
dialer.bind(("", int(sys.argv[3])))
print("up", flush=True)
sys.stdin.readline()
try:
    dialer.connect((sys.argv[1], int(sys.argv[2])))
    print(json.dumps({"seen": dialer.getpeername()}))
except OSError as error:
    print(json.dumps({"error": type(error).__name__}))
"""


def dial(place: Place, address: str, port: int = PORT, source: int = 0, patience: float = 30.0) -> dict[str, Any]:
    done = subprocess.run(
        place.command(sys.executable, "-c", CLIENT, address, str(port), str(source), str(patience)),
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextmanager
def served(place: Place, *addresses: str, port: int = PORT) -> Iterator[None]:
    """A server on `place` that tells whoever comes from where."""
    servers = []
    try:
        for address in addresses:
            command = place.command(sys.executable, "-c", SERVER, address, str(port))
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert servers[-1].stdout is not None
            assert servers[-1].stdout.readline() == b"up\n"
        yield
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def punched(net: Internet, one: Home, other: Home, source: int) -> bool:
    """Whether two hosts get through both routers when both dial at once, from and to the port that a third has seen."""
    helper = net.public()
    ends = [(one, other), (other, one)]
    with served(helper, *helper.addresses):
        seen = {home: dial(home.hosts[0], helper.addresses[0], source=source)["seen"] for home in (one, other)}
    tries = []
    for home, far in ends:
        host, port = seen[far]
        command = home.hosts[0].command(sys.executable, "-c", BOTH, host, str(port), str(source))
        tries.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in tries:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    for process in tries:
        assert process.stdin is not None
        process.stdin.write("now\n")
        process.stdin.flush()
    return all("seen" in json.loads(process.communicate()[0]) for process in tries)


def test_a_cone_keeps_its_port_a_symmetric_router_does_not_and_both_drop_what_nobody_asked_for() -> None:
    with internet() as net:
        helper, cone, symmetric, plain = net.public(), net.home("cone"), net.home("symmetric"), net.home("open")
        homes = (cone, symmetric, plain)
        with served(helper, *helper.addresses):
            seen = [dial(home.hosts[0], helper.addresses[0], source=HERE)["seen"] for home in homes]
        assert seen[0] == [cone.outside, HERE]
        assert seen[1][0] == symmetric.outside
        assert seen[1][1] != HERE
        assert seen[2] == [plain.hosts[0].addresses[0], HERE]
        for home, answer in zip(homes, ("TimeoutError", "TimeoutError", "ConnectionRefusedError"), strict=True):
            assert dial(helper, home.outside, HERE, patience=2.0)["error"] == answer
        with served(plain.hosts[0], *plain.hosts[0].addresses):
            assert "seen" in dial(helper, plain.hosts[0].addresses[0])


def test_cones_can_be_punched_and_symmetric_routers_cannot() -> None:
    with internet() as net:
        homes = [net.home("cone"), net.home("cone"), net.home("symmetric")]
        assert punched(net, homes[0], homes[1], HERE)
        assert not punched(net, homes[0], homes[2], HERE + 1)  # the port before is kept for a minute after a close


def test_lines_have_the_delay_that_they_are_given_and_can_be_cut() -> None:
    with internet() as net:
        helper, home = net.public(delay=15), net.home(delay=25)
        with served(helper, *helper.addresses):
            assert dial(home.hosts[0], helper.addresses[0])["seconds"] >= 0.08
            home.cut()
            assert dial(home.hosts[0], helper.addresses[0], patience=1.0)["error"] == "TimeoutError"
            home.join()
            assert "seen" in dial(home.hosts[0], helper.addresses[0])


def test_lines_have_a_rate_for_each_way_and_lose_what_they_are_told_to() -> None:
    with internet() as net:
        helper, home = net.public(), net.home()
        host, (address,) = home.hosts[0], helper.addresses
        with served(helper, address):
            net.lay(home.router, Line(up=0.01, down=0.005))  # the first segment out takes 48 ms, and that in 96
            assert dial(host, address)["seconds"] >= 0.14
            net.lay(home.router, Line(loss=1.0))
            assert dial(host, address, patience=1.0)["error"] == "TimeoutError"


def test_addresses_change_outside_and_inside() -> None:
    with internet() as net:
        helper, home = net.public(), net.home(hosts=2)
        before, host = home.outside, home.hosts[0]
        with served(helper, *helper.addresses):
            home.move()
            home.readdress(host)
            assert dial(host, helper.addresses[0])["seen"][0] == home.outside != before
        with served(host, *host.addresses):
            assert dial(home.hosts[1], host.addresses[0])["seen"][0] == home.hosts[1].addresses[0], "neighbours meet straight"


def test_ipv6_is_not_translated_but_filtered() -> None:
    with internet(ipv6=True) as net:
        helper, home = net.public(), net.home()
        host = home.hosts[0]
        with served(helper, *helper.addresses), served(host, *host.addresses):
            assert dial(host, helper.addresses[1])["seen"][0] == host.addresses[1]
            assert dial(helper, host.addresses[1], patience=1.0)["error"] == "TimeoutError"


HELD = """
import os, sys, time
from tests.lab.topology import internet
with internet() as net:
    home = net.home()
    print(net._carrier.pid, home.router.pid, home.hosts[0].pid, flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_of_a_lab_whose_process_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        held = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(held) == 3
        os.kill(process.pid, 9)
    gone, alive = psutil.wait_procs(held, timeout=60)
    assert not alive
    assert len(gone) == 3
