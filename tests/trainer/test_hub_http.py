"""A data set of the hub by HTTP: the libraries as they are, and a server that stands for the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support import hub

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

READ = """
import sys
from nolocod.run.data import Data
from nolocod.trainer import hub
found = hub.open_hub(Data(source="hub", dataset=sys.argv[1]))
def read():
    try:
        texts = found.open(0).read(0).to_pylist()
        print(len(texts), texts[-1], flush=True)
    except hub.failures():
        print("out", flush=True)
for _ in range(3):
    read()
    sys.stdin.readline()
"""


def test_the_hubs_libraries_read_the_stand_in_by_http_and_fail_of_an_outage_as_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: they read the hub's address when they are imported."""
    lines = [json.dumps({"text": f"document {number}"}).encode() for number in range(50)]
    server = hub.Hub({"README.md": b"---\n---\n", "0.jsonl": b"\n".join(lines)})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    reader = subprocess.Popen([sys.executable, "-c", READ, hub.NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdin is not None
    assert reader.stdout.readline() == "50 document 49\n"
    server.down()
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "out\n"
    server.up()
    assert reader.communicate("\n", timeout=60) == ("50 document 49\n", None)
    server.down()
