#!/usr/bin/env python3
"""Ask the node of this container for one of its pages; exit status 0 if it says yes.

    nolocod-healthy [/healthz | /readyz]

The rule: it runs every few seconds, so it imports nothing of ours. Where the pages are is in the data directory.
"""

import http.client
import json
import os
import sys
from pathlib import Path

page = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
try:
    place = json.loads((Path(os.environ["NOLOCOD_HOME"]) / "daemon.json").read_text(encoding="utf-8"))["http"]
    host, _, port = place.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    connection = http.client.HTTPConnection(f"{host}:{port}", timeout=4)
    connection.request("GET", page, headers={"Host": "localhost"})
    reply = connection.getresponse()
    print(reply.read(2000).decode("utf-8", "replace"))  # noqa: T201 - `docker inspect` shows it
    sys.exit(reply.status != 200)
except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
    sys.exit(f"the node does not answer: {error!r}")
