"""A node's own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from nolocod.config import Address, DataDir, NodeConfig
from nolocod.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:65535", "::1", 65_535), ("localhost:80", "localhost", 80)],
)
def test_addresses_read_and_write_the_same(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "--http")
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "localhost", ":80", "localhost:", "localhost:http", "localhost:65536", "localhost:-1", "localhost:²"]
)
def test_a_wrong_address_names_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--listen") as caught:
        Address.parse(text, "--listen")
    assert caught.value.exit_status == 2


def test_pages_are_for_this_machine_alone_unless_told() -> None:
    assert NodeConfig(Path("x")).http.host == "127.0.0.1"


def test_everything_in_the_data_directory_has_its_own_place() -> None:
    paths = DataDir(Path("root"))
    places = [getattr(paths, name) for name in paths.__dataclass_fields__ if name != "root"]
    assert len(set(places)) == len(places)
    assert {place.parent for place in places} == {Path("root")}
