"""What a line can carry: so many bytes over plain TCP, both ways at once.

`python -m tests.lab.plain_tcp COUNT [ADDRESS]`, on the host at ADDRESS without it, and then on the other, which tells seconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.lab.topology import Place

_PORT = 9000


def carried(public: Place, home: Place, count: int) -> float:
    """Bytes a second, each way, between a host with an address of its own and another."""
    command = (sys.executable, "-m", "tests.lab.plain_tcp", str(count))
    with subprocess.Popen(public.command(*command), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        told = subprocess.run(home.command(*command, public.addresses[0]), check=True, capture_output=True, text=True)
    return count / float(told.stdout)


def _swap(connection: socket.socket, count: int) -> None:
    """Send as many bytes as come."""
    sender = threading.Thread(target=connection.sendall, args=(bytes(count),))
    sender.start()
    while count:
        count -= len(connection.recv(min(count, 1 << 16)))
    sender.join()


def main() -> None:
    count, *address = sys.argv[1:]
    if address:
        began = time.monotonic()
        with socket.create_connection((address[0], _PORT)) as connection:
            _swap(connection, int(count))
        sys.stdout.write(f"{time.monotonic() - began}\n")
        return
    with socket.create_server(("", _PORT)) as listener:
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
        with connection:
            _swap(connection, int(count))


if __name__ == "__main__":
    main()
