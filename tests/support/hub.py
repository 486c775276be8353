"""A hub of data sets on this machine, by HTTP as the real one's libraries ask for them, which can be taken away and come back.

The rule: what is imitated is the server alone; all else, `datasets` included, is what a node runs. Set HF_ENDPOINT to `url`.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "somebody/text"
_COMMIT = "a" * 40
_ETAG = '"' + "c" * 40 + '"'


class Hub:
    """Serves the files of data set `NAME` while it is `up`."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.asked = 0
        self._open: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        server = _Server(("127.0.0.1", self._port), _Handler)
        server.hub = self
        self._port, self._server = int(server.server_address[1]), server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        """Connections are broken, new ones refused."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        for one in [*self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def met(self, connection: socket.socket, *, gone: bool) -> None:
        (self._open.discard if gone else self._open.add)(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.hub.met(self.connection, gone=False)

    def finish(self) -> None:
        self.server.hub.met(self.connection, gone=True)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        self.server.hub.asked += 1

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, files = self.path.partition("?")[0], self.server.hub.files
        name = path.rsplit("/", 1)[-1]
        if path.startswith(f"/api/datasets/{NAME}/tree/"):
            listed = [{"type": "file", "path": one, "size": len(content), "oid": "b" * 40} for one, content in files.items()]
            self._send(200, json.dumps(listed).encode())
        elif path.startswith(f"/api/datasets/{NAME}"):
            facts = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
            siblings = [{"rfilename": one} for one in files]
            self._send(200, json.dumps({"id": NAME, "_id": "x", "sha": _COMMIT, "siblings": siblings} | facts).encode())
        elif "/resolve/" in path and name in files:
            self._send_file(files[name])
        else:
            self._send(404, b"{}")

    def _send_file(self, content: bytes) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            return self._send(200, content, ETag=_ETAG)
        start, end = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
        return self._send(206, content[start : end + 1], ETag=_ETAG, Content_Range=f"bytes {start}-{end}/{len(content)}")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        more = {"X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes", "Content-Length": str(len(body))}
        for name, value in (more | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
