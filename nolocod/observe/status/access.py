"""Who may read the node's pages.

The rule: at a loopback address whoever is on this machine, as long as the request names a loopback host, so that
a web page elsewhere cannot read them by DNS rebinding; at any other address whoever holds the token. Whether the node
lives and is ready anyone may ask, and the metrics where the owner opened them. Tokens are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote

import msgspec

from nolocod.disk import write_private
from nolocod.errors import HttpTokenError
from nolocod.observe.status.http import Reply, Request

if TYPE_CHECKING:
    from pathlib import Path

_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_FREE = frozenset({"/healthz", "/readyz"})
_SHORTEST = 16
_LONGEST = 1024


@dataclass(frozen=True)
class PageAccess:
    """Judges requests. `token` is None where none is needed; an open address without one lets nobody in."""

    token: str | None = None
    open_metrics: bool = False

    def judge(self, request: Request, *, only_local: bool, port: int) -> Reply | None:
        """None for who may go on, else the answer: a refusal, or the cookie for who showed the token in the address."""
        if only_local and not is_loopback(_host_of(request.host)):
            return refusal(403, "this address answers only to localhost")
        if request.path in _FREE or (self.open_metrics and request.path == "/metrics"):
            return None
        if self.token is None:
            return None if only_local else refusal(401, "this page needs a token")
        shown = parse_qs(request.query).get("token", [""])[0]
        if shown and _same(shown, self.token):
            return self._welcome(request, port)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(bearer.strip(), self.token):
            return None
        if _same(_cookie(request, port), self._cookie_value()):
            return None
        return refusal(401, "this page needs a token: Authorization: Bearer TOKEN, or once ?token=TOKEN", challenge=True)

    def _welcome(self, request: Request, port: int) -> Reply:
        """Send a browser on to the same page without the token, which so stays in no history and no log."""
        cookie = f"{_cookie_name(port)}={self._cookie_value()}; HttpOnly; SameSite=Strict; Path=/"
        # one slash: two would name another host
        target = quote("/" + request.path.lstrip("/"))
        return Reply(303, b"", "text/plain", (("location", target), ("set-cookie", cookie)))

    def _cookie_value(self) -> str:
        return hmac.digest((self.token or "").encode(), b"nolocod pages", hashlib.sha256).hex()


def refusal(status: int, text: str, *, challenge: bool = False) -> Reply:
    """An error as JSON."""
    headers = (("www-authenticate", 'Bearer realm="nolocod"'),) if challenge else ()
    return Reply(status, msgspec.json.encode({"error": text}), headers=headers)


def is_loopback(host: str) -> bool:
    """Whether `host`, as somebody wrote it, is this machine's loopback without asking anybody."""
    if host.lower() in _LOOPBACK_HOSTS:
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token that `path` holds; HttpTokenError if it cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST + 2)
    except OSError as error:
        raise HttpTokenError(f"{path}: {error.strerror}.") from error
    token = raw.decode("ascii", "replace").strip()
    fits = _SHORTEST <= len(token) <= _LONGEST and all("!" <= char <= "~" for char in token)
    if not fits:
        remedy = "Put one line there, like the output of `openssl rand -hex 32`."
        raise HttpTokenError(f"{path} holds no token of {_SHORTEST} or more visible characters.", remedy=remedy)
    return token


def make_token(path: Path) -> str:
    """The token that `path` holds; a new one, readable by its owner alone, if there is no such file.

    Raises HttpTokenError, DiskFullError or DataDirError.
    """
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    return read_token(path)


def _host_of(header: str) -> str:
    """The name in a Host header ("name", "name:port", "[v6]:port")."""
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdigit() else header


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode())


def _cookie_name(port: int) -> str:
    """Browsers send cookies to all ports of a host, where other nodes may be."""
    return f"nolocod-{port}"


def _cookie(request: Request, port: int) -> str:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(_cookie_name(port))
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""
