"""Who may read the node's pages: access by loopback or by token.

The rule: a loopback address answers everybody on this machine, but only requests that name a loopback host or one that its
owner named, so that a web page from elsewhere cannot read it by DNS rebinding. Any other address answers whoever holds the
token. /healthz and /readyz are open to all, and so is /metrics where the owner opened it. Who changes something sends the token
from this machine, in a header that no other web page can make a browser send. Tokens are compared in constant time.
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

from nolocod.disk import write_private
from nolocod.errors import HttpTokenError
from nolocod.observe.status.http import Reply, Request, refusal

if TYPE_CHECKING:
    from pathlib import Path

_PASSED_ON = {"forwarded", "via", "x-forwarded-for", "x-real-ip"}
"""What proxies add to a request."""
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_FREE = frozenset({"/healthz", "/readyz"})
_CHALLENGE = ("www-authenticate", 'Bearer realm="nolocod"')
_SHORTEST = 16
_LONGEST = 1024


@dataclass(frozen=True)
class PageAccess:
    """Judges requests. Without a `token` only a loopback address lets anybody in."""

    token: str | None = None
    open_metrics: bool = False
    hosts: frozenset[str] = frozenset()
    """Names that requests to a loopback address may carry beside loopback's own, as a reverse proxy passes them on."""
    changes: str | None = None
    """The token for changes; None where nothing can be changed."""

    def judge(self, request: Request, *, only_local: bool, port: int) -> Reply | None:
        """None if the request may pass. Else the answer: a refusal, or the cookie for a token shown in the URL."""
        if request.method == "POST" and self.changes is not None:
            return self._judge_change(request, self.changes)
        host = _host_of(request.host)
        if only_local and not is_loopback(host) and host.lower() not in self.hosts:
            return refusal(403, "this address answers only to localhost")
        if request.path in _FREE or (self.open_metrics and request.path == "/metrics"):
            return None
        if self.token is None:
            return None if only_local else refusal(401, "this page needs a token")
        shown = parse_qs(request.query).get("token", [""])[0]
        if shown and _same(shown, self.token):
            return self._welcome(request, port)
        if _same(_bearer(request), self.token):
            return None
        if _same(_cookie(request, port), self._cookie_value()):
            return None
        return refusal(401, "this page needs a token: Authorization: Bearer TOKEN, or once ?token=TOKEN", _CHALLENGE)

    def _judge_change(self, request: Request, token: str) -> Reply | None:
        passed_on = _PASSED_ON & request.headers.keys()  # by a proxy on this machine, for whoever reads the page there
        own = is_loopback(request.client.removeprefix("::ffff:")) or "" != request.client == request.server
        if passed_on or not own:
            return refusal(403, "settings are changed on the node's own machine")
        if not _same(_bearer(request), token):
            return refusal(401, "to change something takes the token in http.token of the data directory", _CHALLENGE)
        return None

    def _welcome(self, request: Request, port: int) -> Reply:
        """Redirect a browser to the same page without the token, so that no history and no log keeps the token."""
        cookie = f"{_cookie_name(port)}={self._cookie_value()}; HttpOnly; SameSite=Strict; Path=/"
        # one slash: two would name another host
        target = quote("/" + request.path.lstrip("/"))
        return Reply(303, b"", "text/plain", (("location", target), ("set-cookie", cookie)))

    def _cookie_value(self) -> str:
        return hmac.digest((self.token or "").encode(), b"nolocod pages", hashlib.sha256).hex()


def is_loopback(host: str) -> bool:
    """Whether `host`, as somebody wrote it, is loopback; no name is looked up."""
    if host.lower() in _LOOPBACK_HOSTS:
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token in the file `path`. Raises HttpTokenError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST + 2)
    except OSError as error:
        raise HttpTokenError(f"{path}: {error.strerror}.") from error
    token = raw.decode("ascii", "replace").strip()
    if not (_SHORTEST <= len(token) <= _LONGEST and all("!" <= char <= "~" for char in token)):
        remedy = "Put one line there, like the output of `openssl rand -hex 32`."
        raise HttpTokenError(f"{path} holds no token of {_SHORTEST} or more visible characters.", remedy=remedy)
    return token


def make_token(path: Path) -> str:
    """The token in the file `path`; makes one, readable by its owner alone, if there is no such file.

    Raises HttpTokenError, DiskFullError or DataDirError.
    """
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    return read_token(path)


def _host_of(header: str) -> str:
    """The name in a Host header ("name", "name:port", "[v6]:port")."""
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdigit() else header


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


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
