"""Reading a running node's status over HTTP, for `nolocod status` and the testnet."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import msgspec

from nolocod.errors import NotRunningError
from nolocod.status.state import StatusReport

if TYPE_CHECKING:
    from nolocod.datadir import Running

_TIMEOUT = 5.0
"""Seconds; a daemon answers in milliseconds, unless its machine is overloaded."""


def read(running: Running) -> StatusReport:
    """Ask the daemon for its report; NotRunningError if nothing, or somebody else, answers there."""
    connection = http.client.HTTPConnection(running.http, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/status.json", headers={"Host": "localhost"})
        report = msgspec.json.decode(connection.getresponse().read(), type=StatusReport)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise NotRunningError(f"process {running.pid} does not answer at {running.http} ({error}).") from error
    finally:
        connection.close()
    if report.peer_id and report.peer_id != running.peer_id:
        raise NotRunningError(f"another node answers at {running.http}.")
    return report
