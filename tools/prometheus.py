"""A Prometheus that watches daemons with the project's rules, for pictures and tests: Debian's package `prometheus`."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_RULES = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "rules"
_CONFIG = """
global: {{scrape_interval: {every}s, evaluation_interval: {every}s}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: nolocod
    file_sd_configs: [{{files: ["{targets}"], refresh_interval: 5s}}]
"""


@contextmanager
def prometheus(folder: Path, every: int) -> Iterator[tuple[str, Callable[[Sequence[str]], None]]]:
    """Its address, and what tells it whom to watch every `every` seconds; its files are in `folder`. Ends with the block."""
    targets, config = folder / "targets.json", folder / "prometheus.yml"

    def watch(addresses: Sequence[str]) -> None:
        written = targets.with_suffix(".new")
        written.write_text(json.dumps([{"targets": [*addresses]}]))
        written.replace(targets)

    watch([])
    config.write_text(_CONFIG.format(rules=_RULES, targets=targets, every=every))
    with socket.socket() as holder:  # bound, not listening: nobody else is given the port, and Go's servers reuse addresses
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        line = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen([*line, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield f"http://{address}", watch
        finally:
            process.kill()
            process.wait()
