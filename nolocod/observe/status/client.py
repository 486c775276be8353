"""Reading a running node's status over HTTP, for `nolocod status` and the testnet, and setting its limits."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.errors import HttpTokenError, NotRunningError, SettingError
from nolocod.observe.status.access import read_token
from nolocod.observe.status.report import StatusReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nolocod.node.data_directory import Running

_TIMEOUT = 5.0
"""Seconds; a daemon answers in milliseconds, unless its machine is overloaded."""
_MOST_BYTES = 8 << 20
"""At a daemon's old address anything may answer, and without end."""


def read(running: Running) -> StatusReport:
    """The report of the daemon. Raises NotRunningError if nothing answers there, or another program; HttpTokenError if
    the token cannot be read or is refused."""
    _, raw = _asked(running, Path(running.http_token) if running.http_token else None)
    report = decode(raw)
    if report.peer_id and report.peer_id != running.peer_id:
        raise NotRunningError(f"another node answers at {running.http}.")
    return report


def change(running: Running, token: Path, told: Mapping[str, str]) -> dict[str, str]:
    """Set what is `told`, by key, with the token in a file; returns what counts then. Raises as `read`, or SettingError."""
    read(running)  # the token is not for another program
    status, raw = _asked(running, Path(running.http_token) if running.http_token else token, msgspec.json.encode(told))
    try:
        found = msgspec.json.decode(raw, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotRunningError(f"the program that answers there is not a node of this release ({error}).") from error
    if status == 200:
        return found
    raise SettingError(found.get("error", f"it was refused ({status})."), remedy=found.get("remedy"))


def _asked(running: Running, token: Path | None, body: bytes | None = None) -> tuple[int, bytes]:
    """The report; or with a `body` what /settings answers to it."""
    headers = {"Host": "localhost"}
    if token is not None:
        headers["Authorization"] = f"Bearer {read_token(token)}"
    connection = http.client.HTTPConnection(running.http, timeout=_TIMEOUT)
    try:
        connection.request(*("GET", "/status.json") if body is None else ("POST", "/settings"), body, headers)
        reply = connection.getresponse()
        if reply.status == 401:
            shown = f"the token in {token}" if token else "readers without a token"
            remedy = "Start the node again if its token file was replaced."
            raise HttpTokenError(f"the node at {running.http} refuses {shown}.", remedy=remedy)
        return reply.status, reply.read(_MOST_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise NotRunningError(f"process {running.pid} does not answer at {running.http} ({error}).") from error
    finally:
        connection.close()


def decode(raw: bytes) -> StatusReport:
    """The report in /status.json. Raises NotRunningError if it is not from a node of this release."""
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        return msgspec.json.decode(raw, type=StatusReport)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise NotRunningError(f"the program that answers there is not a node of this release ({error}).") from error
